#!/usr/bin/env bash
# FID, sFID, precision and recall of samples against a reference.
#
# usage: run/evaluate.sh REFERENCE SAMPLES [OPTION...]
#
# Each of the two is an npz of images (arr_0: uint8, [N, H, W, C], as the samplers write it), a
# folder of images, or an npz of saved statistics (mu, sigma). ADM's reference batches are read, too.
#
#   --evaluator torch    ours, on a GPU or a CPU (default)
#   --evaluator adm      guided-diffusion's own; makes itself an environment with TensorFlow, once
#   --weights FILE       torch: torch-fidelity's Inception weights
#                        adm: classify_image_graph_def.pb; without, upstream downloads it
#   --features MOD:NAME  another feature net, by import path: uint8 [N, 3, H, W] -> [N, D]
#   --batch N            images at once (default 64)
#   --device NAME        cpu, cuda, cuda:1 (default: cuda where there is one)
#   --cache DIR          keeps the reference's features and unfinished work
#                        (default: out/evaluation-cache); --no-cache keeps nothing
#   --pr-images N        precision and recall use at most N images a set (default 50000), drawn
#   --seed N             with this seed (default 0)
#   --save-statistics NPZ  writes the reference's statistics, to be used as a REFERENCE later
#   --json FILE          writes the numbers, the command, versions and the commit
#
# A stopped run goes on where it was. docs/evaluation.md has more.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_if_asked "$@"

[ $# -ge 2 ] || die "usage: run/evaluate.sh REFERENCE SAMPLES [OPTION...]; --help has more"
ensure_env eval
case " $* " in
  *" --evaluator adm "* | *" --evaluator=adm "*) ensure_upstream guided-diffusion ;;
esac
exec "$PYTHON" -m run.evaluate --cache "$ROOT/out/evaluation-cache" "$@"
