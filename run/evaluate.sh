#!/usr/bin/env bash
# FID, precision and recall of samples against a reference; --help has every option.
#
# usage: run/evaluate.sh REFERENCE SAMPLES [OPTION...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

extras="eval diffusers$(extras_of "$@")" # run.sampling draws from diffusers models
case " $* " in *" --evaluator adm "* | *" --evaluator=adm "*) ensure_upstream guided-diffusion ;; esac
launch run.evaluate "$extras" --cache "$ROOT/out/evaluation-cache" "$@"
