#!/usr/bin/env bash
# Reproduces a table of the paper: data, training, sampling, scores, by the backbones' own commands.
#
# usage: run/reproduce_tableN.sh [OPTION...] [-- SNAKEMAKE OPTION...]
#
#   run/reproduce_table1.sh    Euler's sampler, 12 rows on ADM, EDM and LDM
#   run/reproduce_table2.sh    Heun's method, 2 rows on EDM
#   run/reproduce_table3.sh    S-PNDM and F-PNDM, 16 rows on ADM, EDM and LDM
#   run/reproduce_table4.sh    other methods, and the best of Tables 1 to 3
#   run/reproduce_table7.sh    Heun's method and discriminator guidance, 4 rows on EDM
#   run/reproduce_table8.sh    DDGAN, and the best of Tables 1 to 3
#   run/reproduce_table9.sh    stochastic sampler, 4 rows on ADM
#
# Writes the table with our numbers beside the paper's. Can be stopped at any time; the same command
# continues. The jobs are a Snakemake workflow, on this machine or on a cluster (docs/clusters.md).
# Tables 4 and 8 run nothing: they read the others' results in --out, and name what is missing.
#
#   --rows NAME[,NAME]     rows by name or glob, as in 'cifar10-edm-*'; --list shows them
#   --nfes N[,N]           network evaluations, as in 10,20
#   --images N             samples per cell (default: 50000)
#   --checkpoint ROW=PATH  sample these weights; no training of that row
#   --set ROW:--FLAG=VALUE a native flag of a row, as in 'cifar10-adm-*:--num_heads=4'
#   --seed N               of training and sampling (default: 0)
#   --scale smoke          tiny networks on a few digits, on a CPU: shows that every command runs
#
#   --gpus N               processes per command, one per GPU
#   --nodes N              machines per command, with --slurm
#   --jobs N               commands at a time (default: 1)
#   --slurm                submit the jobs to Slurm; say the partition after --
#   --data DIR             where the data sets' archives are (default: data)
#   --weights FILE         Inception's weights; or --features MODULE:NAME, or --evaluator adm
#   --out DIR              results (default: out/tables)
#   --third-party DIR      the patched codebases (default: third_party)
#
#   --list                 rows and NFEs
#   --dry-run              every native command in full; runs nothing
#   --plan                 images, evaluations, disk, and hours from a few timed steps
#   --table                the table from what is there now, also while a run goes on
#
#   run/reproduce_table1.sh --scale smoke
#   run/reproduce_table1.sh --rows cifar10-edm-ogdm-ft --gpus 8 --plan
#   run/reproduce_table1.sh --slurm --gpus 8 -- --default-resources slurm_partition=gpu
#
# Needs run/setup.sh once, for the codebases. docs/tables.md has more.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_if_asked "$@"

number="$(basename "$0" .sh)"
number="${number#reproduce_table}"
case "$number" in # the backbones of its rows, and what scores them; diffusers brings the digits
  2 | 7) ensure_env diffusers edm eval tables ;;
  4 | 8) ensure_env analysis ;;
  9) ensure_env adm diffusers eval tables ;;
  *) ensure_env adm diffusers edm eval ldm tables ;;
esac
exec "$PYTHON" -m run.tables "$number" "$@"
