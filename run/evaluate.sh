#!/usr/bin/env bash
# FID, precision and recall of samples against a reference; --help has every option.
#
# usage: run/evaluate.sh REFERENCE SAMPLES [OPTION...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

check_arguments run.evaluate "$@"
ensure_env eval
case " $* " in
  *" --evaluator adm "* | *" --evaluator=adm "*) ensure_upstream guided-diffusion ;;
esac
exec "$PYTHON" -m run.evaluate --cache "$ROOT/out/evaluation-cache" "$@"
