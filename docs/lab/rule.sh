#!/usr/bin/env bash
# Plain --ogdm against its control on what took no part in choosing the defaults (rule.md), three seeds each:
# ADM, class-conditional EDM and LDM on digits, ADM on MNIST, EDM and ADM on CIFAR-10 at 16x16, and a diffusers model
# on a folder of images. Days on two cores; can be stopped, and the same command continues. Writes docs/results.md.
#
# usage: docs/lab/rule.sh OUT DATA [IMAGES]
#
#   OUT      folder to write
#   DATA     the folder with CIFAR-10's archive, cifar-10-python.tar.gz
#   IMAGES   a folder of images at 16x16 with one subfolder per class, such as Fashion-MNIST's
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../run/lib.sh"
help_if_asked "$@"
[ $# -ge 2 ] || die "give OUT and DATA; --help says what they are"
out="$1" data="$2" images="${3:-}"
[ -f "$data/cifar-10-python.tar.gz" ] || die "$data has no cifar-10-python.tar.gz; run/prepare_data.sh cifar10 --help"
ensure_env all

if [ -n "$images" ]; then
  "$PYTHON" -m ogdm_core.diffusers --data "$images" --channels 8,16,32 --attention 4 --scale-shift --steps 4000 \
    --lr 2e-3 --anneal --output "$out/base"
  "$ROOT"/run/sweep.sh --model "$out/base" --data "$images" --set k=0.4 --set rho=20 --steps 1000 --seeds 0,1,2 \
    --cells euler-5,euler-10,euler-25,s-pndm-10,dpmpp-2m-5,dpmpp-2m-10,unipc-5,unipc-10 --out "$out/sweep"
fi
for number in 1 3; do
  table="$ROOT/run/reproduce_table$number.sh"
  "$table" --scale cpu --out "$out/digits"
  "$table" --scale cpu-mnist --rows 'cifar10-adm-*' --out "$out/mnist"
  "$table" --scale cpu-cifar10 --data "$data" --out "$out/cifar10"
  "$PYTHON" -m run.tables.results "$out"/{digits,mnist,cifar10}/table$number.json
done
