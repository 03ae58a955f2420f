#!/usr/bin/env bash
# Which k and rho? Fine-tunes one model over a grid of settings and draws a heat map of FID.
#
# usage: run/sweep.sh [OPTION...] [--ogdm-SETTING VALUE...] [-- SNAKEMAKE OPTION...]
#
#   run/sweep.sh                                  k x rho, 16 fine-tunes of the quickstart's baseline
#   run/sweep.sh --set k=0.2,0.4 --set rho=5,20 --set plain_end=0,0.33
#   run/sweep.sh --cells euler-5,heun-11 --seeds 0,1,2
#   run/sweep.sh --model DIR --data IMAGES --features lite0   a diffusers model of your own
#   run/sweep.sh --slurm -- --default-resources slurm_partition=gpu
#   run/sweep.sh --help                           every flag
#
# FID is compared with that of a plain fine-tune of equal length. Writes OUT/sweep.json, sweep.md and
# sweep.png. Can be stopped at any time; the same command continues, and a changed setting runs only
# the fine-tunes that are new. The jobs are a Snakemake workflow. docs/settings.md has more.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

extras="analysis diffusers tables"
for arg in "$@"; do
  case "$arg" in mnist | --data=mnist) extras+=" mnist" ;; *lite0*) extras+=" features" ;; esac
done
launch run.sweep "$extras" "$@"
