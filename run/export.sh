#!/usr/bin/env bash
# Weights of ADM or EDM as safetensors, as a diffusers folder where that is exact, with a model card.
#
# usage: run/export.sh adm|edm CHECKPOINT DIR [OPTION...] [-- ADM'S MODEL FLAGS]
#
#   run/export.sh edm out/run/network-snapshot-020000.pkl out/published --scores fid.json
#   run/export.sh adm out/run/ema_0.9999_015000.pt out/published -- --num_heads 1
#   run/export.sh --help                           every flag
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case "${1:-}" in adm | edm) extras="$1 diffusers" ;; *) extras="diffusers" ;; esac
launch run.export "$extras" "$@"
