#!/usr/bin/env bash
# Discriminator guidance (Kim et al. 2023; Table 7 of the paper); --help has examples.
#
# usage: run/guidance.sh sample | train [OPTION...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

launch run.guidance diffusers "$@"
