"""The command line of run/train.sh, up to the native command. Standard library only."""

# ruff: noqa: E501 (aligned columns)

import argparse
from dataclasses import replace
from pathlib import Path

from ogdm_core.cli import Parser, number
from ogdm_core.nfe import SAMPLERS, steps_for_nfe
from run import backbones
from run.launch import Command, Engine, absolute
from run.presets import CONTROLS, PRESETS, Preset, get_preset, others
from run.provenance import ROOT


# fmt: off
def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = Parser(
        prog="run/train.sh", usage="%(prog)s PRESET [OPTION...] [-- NATIVE FLAG...]",
        description=DESCRIPTION, epilog=EPILOG,
    )
    add = p.add_argument
    add("preset",        metavar="PRESET", help="a row of Table 5, see below")
    add("--data",        metavar="PATH", default="", help="ADM: a folder of images; EDM: a zip or folder in its format (run/prepare_data.sh makes them). LDM reads data/lsun in its own folder")
    add("--out",         metavar="DIR",  type=Path, help="results (default: out/PRESET, or out/PRESET-samples)")
    add("--init",        metavar="FILE", default="", help="weights that a fine-tune starts from (default: the released model; ADM has none)")
    add("--resume",      action="store_true", help="go on from the last checkpoint in --out")
    add("--sample",      metavar="SAMPLER", default="", help=f"sample, in place of training: {', '.join(SAMPLERS)}")
    add("--nfe",         metavar="N",    type=int, default=10, help="with --sample (default: 10)")
    add("--model",       metavar="FILE", default="", help="with --sample: the weights")
    add("--images",      metavar="N",    type=number(int, 1), default=50_000, help="with --sample (default: 50000)")
    add("--seed",        metavar="N",    type=int, help="of sampling (default: 0), or of training; ADM's trainer has none")
    add("--gpus",        metavar="N",    type=number(int, 1), default=1, help="processes in all, one per GPU (default: 1)")
    add("--nodes",       metavar="N",    type=number(int, 1), default=1, help="machines (default: 1); see docs/clusters.md")
    add("--rendezvous",  metavar="HOST:PORT", default="", help="where EDM's nodes meet, if it is not Slurm that starts them")
    add("--third-party", metavar="DIR",  type=Path, default=ROOT / "third_party", help="the patched codebases (default: third_party)")
    add("--dry-run",     action="store_true", help="print the command and stop")
    return p


DESCRIPTION = """\
Trains a row of the paper's Table 5 with its backbone's own trainer, or samples from it (--sample).
Prints the native command (mpiexec for ADM, torchrun for EDM, main.py for LDM) and runs it. What follows
-- goes to upstream's script as it is, after the preset's flags, so it wins."""
EPILOG = f"""\
presets: {", ".join(PRESETS)}
not in the paper, the same fine-tunes without OGDM: {", ".join(CONTROLS)}
of other codebases: {", ".join(others())}

`run/train.sh export CKPT DIR` writes a trained latent-diffusion model for untouched upstream code.

examples:
  run/train.sh cifar10-edm-ogdm-ft --data data/cifar10-32x32.zip --gpus 8 --dry-run
  run/train.sh cifar10-adm-ogdm-ft --data data/cifar10 --init ema_0.9999_300000.pt -- --use_fp16 True
  run/train.sh cifar10-edm-ogdm-ft --sample euler --nfe 10 --model out/.../network-snapshot-020000.pkl"""
# fmt: on


def out_of(args: argparse.Namespace, preset: Preset) -> Path:
    """--out, or the preset's own folder."""
    return args.out or Path("out") / (preset.name + ("-samples" if args.sample else ""))


def command(args: argparse.Namespace, preset: Preset) -> Command | None:
    """The native command, with paths that hold in any folder; None if there is nothing left."""
    engine = Engine(args.gpus, args.nodes, args.rendezvous, args.third_party.absolute())
    backbone, out = backbones.get(preset.backbone), out_of(args, preset).absolute()
    if args.sample:
        if not args.model:
            raise ValueError("--sample needs --model, the weights that training wrote")
        if args.data or args.init or args.resume:
            raise ValueError("--data, --init and --resume are for training; leave them out with --sample")
        backbone.check_sampling(args.sample)
        steps_for_nfe(args.sample, args.nfe)  # refuses unknown samplers, and NFEs they cannot hit
        model = absolute(args.model)
        return backbone.sample(preset, model, out, args.sample, args.nfe, args.images, args.seed or 0, engine)
    backbone.check_training(preset, args.data, args.seed, engine)
    made = backbone.train(preset, absolute(args.data), out, absolute(args.init), args.seed, engine)
    return backbone.resumed(made, out) if args.resume else made


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags; `command` is the native command, None if nothing is left to do, and `export` the words of that
    subcommand, or None. Ends the program where something is wrong."""
    if argv[:1] == ["export"]:
        return argparse.Namespace(export=argv[1:])
    cut = argv.index("--") if "--" in argv else len(argv)
    p = parser()
    args = p.parse_args(argv[:cut])
    args.export = None
    try:
        preset = get_preset(args.preset)
        made = command(args, preset)
        made = made and backbones.get(preset.backbone).as_trained(made)
    except ValueError as error:
        p.error(str(error))
    args.command = made and replace(made, native=tuple(argv[cut + 1 :]))
    return args
