#!/usr/bin/env bash
# OGDM in two dimensions, in one picture: a spiral, an MLP, Euler's method at few steps.
#
# usage: run/toy.sh [--out out/toy] [--seed 0]
#
# Under two minutes on a CPU. Prints the mean distance of samples to the data for the control and
# for OGDM, and writes OUT/toy.png and OUT/toy.json. --help lists every setting.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
launch run.toy diffusers "$@"
