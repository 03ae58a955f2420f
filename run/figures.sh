#!/usr/bin/env bash
# The paper's pictures, for any models. Every picture carries the command that made it.
#
# usage: run/figures.sh teaser | grid | neighbours | diagrams | xi [OPTION...]
#        run/figures.sh teaser --help          the options of one of them
#
#   teaser       Fig. 1: same noise, NFE across, methods and samplers down, and how far samples
#                move as NFE changes, as numbers
#   grid         appendix F: samples of each method, FID and recall from a results.json or a table1.json
#   neighbours   appendix F.5: nearest training images, and whether samples copy them; with
#                --weights FILE in Inception's features
#   diagrams     Figs. 2 and 3: the graphical model and the role of the discriminator, as SVG files
#   xi           Fig. 4 and Lemma 1: what run/analysis_xi.sh draws
#
# A model is a folder in diffusers' format, sampled here:
#   run/figures.sh teaser --method Baseline=DIR --method OGDM=DIR --nfe 5 10 20 50
# or samples made by ADM's, EDM's or LDM's own commands from the same seeds, an .npz or a folder of
# images for each sampler and NFE:
#   run/figures.sh teaser --method 'Baseline=base/{sampler}-{nfe}.npz' \
#                         --method 'OGDM=ogdm/{sampler}-{nfe}.npz'
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[ $# -gt 0 ] || {
  usage
  exit 2
}
help_if_asked "$1"

extras=analysis
[ "$1" = diagrams ] || extras+=" diffusers" # models and data sets come with it
case " $*" in *" --weights"*) extras+=" eval" ;; esac # Inception comes with it
launch run.figures "$extras" "$@"
