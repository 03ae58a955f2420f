#!/usr/bin/env bash
# FID, precision and recall of samples against a reference; --help has every option.
#
# usage: run/evaluate.sh REFERENCE SAMPLES [OPTION...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

check_arguments run.evaluate "$@"
extras=(eval)
for arg in "$@"; do
  case "$arg" in
    digits) extras+=(diffusers) ;; # comes with it
    mnist) extras+=(mnist) ;;
    *) [ ! -d "$arg/unet" ] || extras+=(diffusers) ;; # a model, which is sampled here
  esac
done
ensure_env "${extras[@]}"
case " $* " in
  *" --evaluator adm "* | *" --evaluator=adm "*) ensure_upstream guided-diffusion ;;
esac
exec "$PYTHON" -m run.evaluate --cache "$ROOT/out/evaluation-cache" "$@"
