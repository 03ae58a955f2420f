#!/usr/bin/env bash
# The paper's Table 1: Euler sampler, FID and recall over NFE, 12 rows on ADM, EDM and LDM.
#
# usage: run/reproduce_table1.sh [OPTION...]
#
# For each row: prepares the data, trains or fine-tunes, samples at each NFE and evaluates, with the
# backbones' native commands, then writes the table with our numbers beside the paper's. Can be
# stopped at any time; the same command continues.
#
#   --rows NAME[,NAME]     rows by name or glob, as in 'cifar10-edm-*'; --list shows them
#   --nfes N[,N]           network evaluations, as in 10,20
#   --gpus N               processes a command, one a GPU
#   --images N             samples a cell (default: 50000)
#   --checkpoint ROW=PATH  sample these weights; no training of that row
#   --data DIR             where the data sets' archives are (default: data)
#   --weights FILE         Inception's weights; or --features MODULE:NAME, or --evaluator adm
#   --out DIR              results (default: out/tables)
#   --seed N               of training and sampling (default: 0)
#   --jobs N               stages at a time (default: 1)
#   --third-party DIR      the patched codebases (default: third_party)
#
#   --scale smoke          tiny networks on a few digits, on a CPU: shows that every command runs
#   --list                 rows and NFEs
#   --dry-run              every command in full; runs nothing
#   --plan                 images, evaluations, disk, and hours from a few measured steps
#
#   run/reproduce_table1.sh --scale smoke
#   run/reproduce_table1.sh --rows cifar10-edm-ogdm-ft --gpus 8 --plan
#
# Needs run/setup.sh once, for the codebases. docs/tables.md has more.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_if_asked "$@"

ensure_env adm diffusers edm eval ldm
exec "$PYTHON" -m run.tables 1 "$@"
