#!/usr/bin/env bash
# What observation costs: time and operations of a training step, as ratios to a plain one; --help has examples.
#
# usage: run/benchmark.sh [--out out/benchmark/speed.json] [--cases A,B] [--repeats 5] [OPTION...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

launch run.benchmark "edm" "$@"
