#!/usr/bin/env bash
# Trains a row of the paper's Table 5 with its backbone's own trainer, or samples from it.
#
# usage: run/train.sh PRESET [OPTION...] [-- NATIVE FLAG...]
#        run/train.sh export CKPT DIR
#
# Prints the native command (mpiexec for ADM, torchrun for EDM, main.py for LDM) and runs it. What
# follows -- goes to upstream's script as it is, after the preset's flags, so it wins.
#
#   --data PATH            ADM: folder of images; EDM: its zip or folder; LDM reads its own data/lsun
#   --out DIR              results (default: out/PRESET, out/PRESET-samples)
#   --init FILE            weights that a fine-tune starts from (default: the released model)
#   --resume               go on from the last checkpoint in --out
#   --sample SAMPLER       sample, with --model FILE, --nfe N (10) and --images N (50000)
#   --seed N               of sampling, or of training; ADM's trainer has none
#   --gpus N               processes in all, one per GPU
#   --nodes N              machines; --rendezvous HOST:PORT where EDM's meet (docs/clusters.md)
#   --third-party DIR      the patched codebases (default: third_party)
#   --dry-run              print the command and stop
#
#   run/train.sh cifar10-edm-ogdm-ft --data data/cifar10-32x32.zip --gpus 8 --dry-run
#   run/train.sh cifar10-adm-ogdm-ft --data data/cifar10 --init ema_0.9999_300000.pt -- --use_fp16 True
#   run/train.sh cifar10-edm-ogdm-ft --sample euler --nfe 10 --model out/.../network-snapshot-020000.pkl
#
# `export` writes a trained latent-diffusion model for untouched upstream code. The presets:
#   cifar10-adm-{baseline,ogdm,ogdm-ft}  celeba64-adm-{baseline,ogdm,ogdm-ft}
#   cifar10-edm-{baseline,ogdm-ft,ogdm-ft-heun}  cifar10-edm-cond-{baseline,ogdm-ft}
#   lsun-church-ldm-{baseline,ogdm-ft}
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
help_if_asked "$@"

# The extra of the preset's backbone; a word that is none gets its error from the launcher.
case "${1:-}" in
  *-adm-*) ensure_env adm ;;
  *-edm-*) ensure_env edm ;;
  *) ensure_env ldm ;;
esac
exec "$PYTHON" -m run.train "$@"
