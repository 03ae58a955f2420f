#!/usr/bin/env bash
# Trains a row of the paper's Table 5 with its backbone's own trainer, or samples from it. --help shows
# all options.
#
# usage: run/train.sh PRESET [OPTION...] [-- NATIVE FLAG...]
#        run/train.sh export CKPT DIR
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

extras=ldm # whose models `export` writes
for file in "$ROOT"/run/backbones/*.py; do # the extra of the preset's backbone has its module's name
  name="$(basename "$file" .py)"
  case "-${1:-}-" in *-"$name"-*) extras="$name" ;; esac
done
launch run.train "$extras" "$@"
