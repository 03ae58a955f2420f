#!/usr/bin/env bash
# The main job on a bare machine: does OGDM beat plain training when sampling in few steps?
#
# usage: run/quickstart.sh [--out out/quickstart] [--seeds 0,1,2] [--data mnist|digits|cifar10] [FLAGS]
#
#   run/quickstart.sh                       MNIST at 16x16: two fine-tunes side by side, minutes
#   run/quickstart.sh --data digits         8x8 digits and a smaller U-Net
#   run/quickstart.sh --data cifar10        CIFAR-10 at 16x16 with native EDM, an hour; see below
#   run/quickstart.sh --seeds 0,1,2         means over three pairs of fine-tunes
#   run/quickstart.sh --control-steps 2800  a longer control, for as much time as OGDM took
#   run/quickstart.sh --from-scratch        trains the baseline, too
#   run/quickstart.sh --ogdm-plain-end 0    any setting of the method may be changed
#   run/quickstart.sh --help                every flag, with the defaults for --data
#
# Sets itself up; needs Python and a package index, no GPU, no submodule, no download. Writes
# results.json, fid_vs_nfe.png, samples.png, trajectory.png and report.html into OUT, and prints the
# table. Ctrl-C saves; the same command continues.
#
# --data cifar10 takes --out DIR, --jobs N and --archives DIR, where cifar-10-python.tar.gz is or goes (default: data).
# It runs EDM's rows of Tables 1 and 3 at --scale cpu-cifar10 with one seed, and draws OUT/pairs.png.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

CIFAR10=https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz

cifar10() {
  local out=out/quickstart-cifar10 archives=data jobs=() archive number
  while [ $# -gt 0 ]; do
    case "$1" in
      -h | --help) usage && exit ;;
      --data=*) shift ;;
      --data | --out | --archives | --jobs)
        [ $# -gt 1 ] || die "$1 needs a value"
        case "$1" in --out) out="$2" ;; --archives) archives="$2" ;; --jobs) jobs=(--jobs "$2") ;; esac
        shift 2
        ;;
      *) die "--data cifar10 takes --out, --archives and --jobs, not $1; run/reproduce_table1.sh has more" ;;
    esac
  done
  archive="$archives/$(basename "$CIFAR10")"
  if [ ! -e "$archive" ] && [ ! -e "$archives/cifar10-16" ]; then
    say "fetching $CIFAR10 (170 MB)"
    mkdir -p "$archives"
    curl -fL --retry 2 -o "$archive.part" "$CIFAR10" && mv "$archive.part" "$archive" ||
      die "it cannot be fetched; put it into a folder by hand, and name that: --archives DIR"
  fi
  ensure_upstream edm
  for number in 1 3; do
    "$ROOT/run/reproduce_table$number.sh" --scale cpu-cifar10 --rows 'cifar10-edm-control*,cifar10-edm-ogdm-ft*' \
      --seeds 0 --out "$out" --data "$archives" "${jobs[@]}"
  done
  "$ROOT/run/figures.sh" pairs --real "$archives/cifar10-16" --cells euler-5,euler-10,unipc-10 --out "$out" \
    --method "control=$out/stages/cifar10-edm-control.{sampler}-{nfe}.sample-*/samples.npz" \
    --method "OGDM=$out/stages/cifar10-edm-ogdm-ft.{sampler}-{nfe}.sample-*/samples.npz"
}

case " $* " in
  *" --data cifar10 "* | *" --data=cifar10 "*)
    cifar10 "$@"
    exit
    ;;
esac
launch run.quickstart "diffusers mnist" "$@"
