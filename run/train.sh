#!/usr/bin/env bash
# Trains a row of the paper's Table 5 with its backbone's own trainer, or samples from it. --help shows
# all options.
#
# usage: run/train.sh PRESET [OPTION...] [-- NATIVE FLAG...]
#        run/train.sh export CKPT DIR
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case "${1:-}" in # the extra of the preset's backbone
  *-adm-*) extras=adm ;;
  *-edm-*) extras=edm ;;
  *) extras=ldm ;;
esac
launch run.train "$extras" "$@"
