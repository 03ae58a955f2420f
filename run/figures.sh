#!/usr/bin/env bash
# The paper's pictures, for any models; --help has examples.
#
# usage: run/figures.sh teaser | grid | neighbours | diagrams | xi [OPTION...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

extras=analysis
[ "${1:-}" = diagrams ] || extras+=" diffusers" # models and data sets come with it
case " $*" in *" --weights"*) extras+=" eval" ;; esac # Inception comes with it
launch run.figures "$extras" "$@"
