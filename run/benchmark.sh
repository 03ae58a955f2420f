#!/usr/bin/env bash
# What observation costs: time, peak memory and operations of a training step, as ratios to a plain one.
#
# usage: run/benchmark.sh [--out out/benchmark/speed.json] [--cases A,B] [--repeats 5] [--flags]
#
#   run/benchmark.sh                       EDM's network at the paper's CIFAR-10 size, on the CPU
#   run/benchmark.sh --cases euler_exact,euler_fused --batch 4
#   run/benchmark.sh --device cuda --batch 64 --repeats 20
#   run/benchmark.sh --no-time --resolution 256 --batch 1    count operations only, at any size
#   run/benchmark.sh --quick               a tiny network: seconds, and numbers that mean nothing
#
# It takes about ten minutes on two cores, prints a table and writes FILE.json, FILE.md and FILE.png.
# A run that is stopped keeps what it measured. Without third_party/edm, a diffusers U-Net of about
# the same cost stands in. --flags lists every setting.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_if_asked "$@"
if [ "${1:-}" = --flags ]; then set -- --help; fi

export KINETO_LOG_LEVEL="${KINETO_LOG_LEVEL:-99}" # silences the profiler behind the memory column
launch run.benchmark "diffusers edm" "$@"
