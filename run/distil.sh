#!/usr/bin/env bash
# Which is the better teacher for consistency distillation, the control or OGDM? --help has the flags.
#
# usage: run/distil.sh QUICKSTART [--output out/distil] [OPTION...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

launch run.distil "diffusers mnist" "$@"
