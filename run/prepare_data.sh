#!/usr/bin/env bash
# Turns a data set's archive into the folder of images that the trainers read.
#
# usage: run/prepare_data.sh NAME SOURCE FOLDER [OPTION...]
#
#   run/prepare_data.sh cifar10 cifar-10-python.tar.gz data/cifar10
#   run/prepare_data.sh celeba img_align_celeba.zip data/celeba64
#   run/prepare_data.sh              the names there are
#   run/prepare_data.sh NAME --help  what SOURCE may be, and the options
#
# Can be stopped and started again; counts the images at the end.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

names() { find "$ROOT/run/data" -name '[!_]*.py' -exec basename {} .py \; | sort | xargs; }

case "${1:-}" in
  -h | --help)
    usage
    exit 0
    ;;
  "") die "which data set? one of: $(names)" ;;
esac
[ -f "$ROOT/run/data/$1.py" ] || die "no data set is named '$1'; there are: $(names)"

case "${1:-}" in
  lsun*) ensure_env ldm ;; # its archives are LMDBs
  *) ensure_env common ;;
esac
exec "$PYTHON" -m "run.data.$1" "${@:2}"
