#!/usr/bin/env bash
# Discriminator guidance (Kim et al. 2023; Table 7 of the paper): a discriminator between data and
# samples of a fixed model corrects the model's score while it samples.
#
# usage: run/guidance.sh sample MODEL --output samples.npz
#        run/guidance.sh train --data IMAGES --samples samples.npz --output guide.safetensors
#        run/guidance.sh sample MODEL --guide guide.safetensors --nfe 25 --output guided.npz
#        run/guidance.sh compare out/quickstart --output out/guidance
#        run/guidance.sh train --help          the options of one of them
#
#   sample    samples of a model in diffusers' format, with a guide or without
#   train     a guide, from images and samples that any model made (.npz or a folder)
#   compare   FID and recall of a quickstart's fine-tunes, with and without guidance
#
# EDM's own generate.py takes --guide FILE and --guide-weight W, too. docs/guidance.md explains.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[ $# -gt 0 ] || {
  usage
  exit 2
}
help_if_asked "$1"

launch run.guidance diffusers "$@"
