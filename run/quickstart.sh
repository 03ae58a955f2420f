#!/usr/bin/env bash
# The main job on a bare machine: does OGDM beat plain training when sampling in few steps?
#
# usage: run/quickstart.sh [--out out/quickstart] [--seeds 0,1,2] [--data digits|mnist] [FLAGS]
#
#   run/quickstart.sh                       real 8x8 digits, two fine-tunes of 2000 steps, 5 minutes
#   run/quickstart.sh --seeds 0,1,2         means over three pairs of fine-tunes
#   run/quickstart.sh --from-scratch        trains the baseline, too
#   run/quickstart.sh --data mnist          16x16, with a baseline trained on the spot; half an hour
#   run/quickstart.sh --ogdm-adversarial hinge --ogdm-gamma 0.02
#                                           any setting of the method may be changed
#   run/quickstart.sh --flags               every flag
#
# Sets itself up; needs Python and a package index, no GPU, no submodule, no download. Writes
# OUT/results.json, OUT/fid_vs_nfe.png, OUT/samples.png and OUT/report.html, and prints the table.
# Ctrl-C saves; the same command continues.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_if_asked "$@"

extras=(diffusers)
for arg in "$@"; do
  case "$arg" in
    --flags) set -- --help ;;
    mnist | --data=mnist) extras+=(mnist) ;;
  esac
done
check_arguments run.quickstart "$@"
ensure_env "${extras[@]}"
exec "$PYTHON" -m run.quickstart "$@"
