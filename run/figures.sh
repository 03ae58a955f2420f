#!/usr/bin/env bash
# The paper's pictures, for any models; --help has examples.
#
# usage: run/figures.sh teaser | grid | neighbours | xi [OPTION...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

extras="analysis diffusers" # models and data sets come with the second
case " $*" in *" --weights"*) extras+=" eval" ;; esac # Inception comes with it
launch run.figures "$extras" "$@"
