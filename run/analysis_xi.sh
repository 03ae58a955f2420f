#!/usr/bin/env bash
# Section 3.5 and appendix A.4 of the paper: how the true reverse density lies between its limits.
#
# usage: run/analysis_xi.sh [--mu 2] [--v 0.1] [--beta 0.4] [--vs V...] [--out out/xi]
#
#   run/analysis_xi.sh               Fig. 4 (a), (b), (c), about 5 seconds on a CPU
#   run/analysis_xi.sh --mu 3        the same for modes at +-3
#
# Writes OUT/fig4.png, OUT/xi.csv (xi and squared L2 distances, with their numerical errors) and
# OUT/lemma1.csv (how fast each limit of Lemma 1 is reached), and prints where 0 < xi < 1 fails.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_if_asked "$@"

launch run.figures "analysis" xi "$@"
