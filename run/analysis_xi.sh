#!/usr/bin/env bash
# Section 3.5 and appendix A.4 of the paper: Fig. 4 and Lemma 1; --help has more.
#
# usage: run/analysis_xi.sh [--mu 2] [--v 0.1] [--beta 0.4] [--vs V...] [--out out/xi]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

launch run.figures "analysis" xi "$@"
