#!/usr/bin/env bash
# Turns a data set's archive into the folder of images that the trainers read.
#
# usage: run/prepare_data.sh NAME SOURCE FOLDER [OPTION...]
#
#   run/prepare_data.sh cifar10 cifar-10-python.tar.gz data/cifar10
#   run/prepare_data.sh celeba img_align_celeba.zip data/celeba64
#   run/prepare_data.sh folder PICTURES data/mine --size 32
#   run/prepare_data.sh NAME --help  what SOURCE may be, and the options
#
# Can be stopped and started again; counts the images at the end.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

help_if_asked "${1:-}"
extras=common
[ "${1:-}" != lsun ] || extras=ldm # its archives are LMDBs
launch run.data "$extras" "$@"
