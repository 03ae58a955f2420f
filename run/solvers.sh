#!/usr/bin/env bash
# Which solver and time grid are best for a model? And does OGDM with its best beat the control with its best?
#
# usage: run/solvers.sh MODEL [MODEL] REFERENCE --nfe 5,10 [FLAGS]
#
#   run/solvers.sh MODEL REFERENCE --weights weights-inception-2015-12-05-6726825d.pth
#   run/solvers.sh CONTROL OGDM REFERENCE --features FILE.pt --nfe 5,10
#   run/solvers.sh MODEL REFERENCE --features FILE.pt --search 300    and a better grid for the best solver
#   run/solvers.sh --help                                             every flag, with its default
#
# A MODEL is a folder in diffusers' format, or a checkpoint: EDM's .pkl, ADM's .pt, LDM's .ckpt.
# Prints a table for each NFE, the best cell in bold, and writes results.json, table.md, solvers.png and
# grids/ into OUT. Ctrl-C stops; the same command continues, and another one reuses what is there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
export TQDM_DISABLE=1 # a line for each cell says how far it is
extras="analysis diffusers$(extras_of "$@")"
case " $*" in *" --weights"*) extras+=" eval" ;; esac # Inception comes with it
launch run.solvers "$extras" "$@"
