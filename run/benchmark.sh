#!/usr/bin/env bash
# What observation costs: time and peak memory of a training step, as ratios to the baseline's.
#
# usage: run/benchmark.sh [--out out/benchmark/speed.json] [--cases A,B] [--repeats 5] [--flags]
#
#   run/benchmark.sh                       EDM's network at the paper's CIFAR-10 size, on the CPU
#   run/benchmark.sh --cases euler_exact,euler_fused --batch 4
#   run/benchmark.sh --device cuda --batch 64 --repeats 20
#   run/benchmark.sh --resolutions 32,64,128 --batches 1,4 --channels 64,128     also how it grows
#   run/benchmark.sh --quick               a tiny network: seconds, and numbers that mean nothing
#
# Ten minutes or so on two cores. Prints a table and writes FILE.json, FILE.md and FILE.png. Stopped
# runs keep what they measured; the same command goes on, and more --repeats add to it. Where
# third_party/edm is not here, a diffusers U-Net of like cost stands in. --flags lists every setting.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_if_asked "$@"
if [ "${1:-}" = --flags ]; then set -- --help; fi

ensure_env diffusers edm
export KINETO_LOG_LEVEL="${KINETO_LOG_LEVEL:-99}" # the profiler behind the memory column announces itself
exec "$PYTHON" -m run.benchmark "$@"
