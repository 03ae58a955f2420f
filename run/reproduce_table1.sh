#!/usr/bin/env bash
# Reproduces a table of the paper, or shows the method's effect on a CPU (--scale cpu). --help shows
# all options.
#
# usage: run/reproduce_tableN.sh [OPTION...] [-- SNAKEMAKE OPTION...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

number="$(basename "$0" .sh)"
number="${number#reproduce_table}"
case "$number" in # the backbones of its rows, and what scores them; diffusers brings the digits
  2 | 7) extras="diffusers edm eval tables" ;;
  4 | 8) extras="analysis" ;;
  9) extras="adm diffusers eval tables" ;;
  10) extras="diffusers edm2 eval sit tables" ;;
  *) extras="adm diffusers edm eval ldm tables" ;;
esac
case " $* " in *cpu-mnist*) extras+=" mnist" ;; esac
case " $* " in *lite0* | *cpu-cifar10*) extras+=" features" ;; esac
launch run.tables "$extras" "$number" "$@"
