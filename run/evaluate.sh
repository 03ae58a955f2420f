#!/usr/bin/env bash
# FID, precision and recall of samples against a reference.
#
# usage: run/evaluate.sh REFERENCE SAMPLES [OPTION...]
#
# Each of the two is an npz of images (arr_0: uint8, [N, H, W, C], as the samplers write it), a
# folder of images, or an npz of saved statistics (mu, sigma). ADM's reference batches are read, too.
#
#   --evaluator torch    ours, on a GPU or a CPU (default)
#   --evaluator adm      guided-diffusion's own, which also gives sFID and the Inception score; it
#                        gets an environment with TensorFlow, which is made once
#   --weights FILE       torch: torch-fidelity's Inception weights
#                        adm: classify_image_graph_def.pb; without it, upstream downloads the file
#   --features NET       another feature net: MODULE:NAME, a callable on the import path that turns
#                        uint8 [N, 3, H, W] into [N, D]; the quickstart's classifier, FILE.pt; or
#                        pixels
#   --batch N            images at once (default 64)
#   --device NAME        cpu, cuda, cuda:1 (default: cuda where there is one)
#   --cache DIR          keeps the reference's features and unfinished work
#                        (default: out/evaluation-cache); --no-cache keeps nothing
#   --pr-images N        precision and recall use at most N images per set (default 50000), drawn
#   --seed N             with this seed (default 0)
#   --save-statistics NPZ  writes the reference's statistics, to be used as a REFERENCE later
#   --json FILE          writes the numbers, the command, versions and the commit
#
# The same command continues a run that was stopped. docs/evaluation.md has more.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_if_asked "$@"

[ $# -ge 2 ] || die "usage: run/evaluate.sh REFERENCE SAMPLES [OPTION...]; --help has more"
check_arguments run.evaluate "$@"
ensure_env eval
case " $* " in
  *" --evaluator adm "* | *" --evaluator=adm "*) ensure_upstream guided-diffusion ;;
esac
exec "$PYTHON" -m run.evaluate --cache "$ROOT/out/evaluation-cache" "$@"
