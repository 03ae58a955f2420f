#!/usr/bin/env bash
# The main job on a bare machine: does OGDM beat plain training when sampling in few steps?
#
# usage: run/quickstart.sh [--out out/quickstart] [--seeds 0,1,2] [--data mnist|digits] [FLAGS]
#
#   run/quickstart.sh                       MNIST at 16x16: two fine-tunes side by side, minutes
#   run/quickstart.sh --data digits         8x8 digits and a smaller U-Net
#   run/quickstart.sh --seeds 0,1,2         means over three pairs of fine-tunes
#   run/quickstart.sh --control-steps 2800  a longer control, for as much time as OGDM took
#   run/quickstart.sh --from-scratch        trains the baseline, too
#   run/quickstart.sh --ogdm-plain-end 0    any setting of the method may be changed
#   run/quickstart.sh --help                every flag, with the defaults for --data
#
# Sets itself up; needs Python and a package index, no GPU, no submodule, no download. Writes
# results.json, fid_vs_nfe.png, samples.png, trajectory.png and report.html into OUT, and prints the
# table. Ctrl-C saves; the same command continues.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
launch run.quickstart "diffusers mnist" "$@"
