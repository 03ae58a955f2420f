"""The command line of run/export.sh. Standard library only."""

import argparse
from pathlib import Path

from ogdm_core.cli import Parser
from run import backbones
from run.provenance import ROOT

CHOICES = tuple(name for name in backbones.NAMES if Path(__file__).with_name(f"{name}.py").is_file())

DESCRIPTION = """\
Writes the EMA's weights of a checkpoint to DIR: model.safetensors, model.json with the flags of the network, README.md
as a model card, and, where diffusers has this very architecture, unet/ and scheduler/ for plain diffusers. Their
outputs are compared with upstream's before anything is written. ADM's flags are read from flags.json beside the
checkpoint if it is there; those after -- win.

A latent-diffusion model: run/train.sh export CKPT DIR."""


def parser() -> argparse.ArgumentParser:
    """The flags."""
    usage = f"%(prog)s {'|'.join(CHOICES)} CHECKPOINT DIR [OPTION...] [-- MODEL FLAG...]"
    p = Parser(prog="run/export.sh", usage=usage, description=DESCRIPTION)
    add = p.add_argument
    add("backbone", choices=CHOICES, help="what trained it")
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="EDM: network-snapshot-N.pkl; ADM: ema_RATE_N.pt")
    add("folder", type=Path, metavar="DIR", help="folder to write")
    add("--scores", type=Path, nargs="+", default=[], metavar="JSON", help="for the card: what run/evaluate.sh wrote")
    add("--command", default="", metavar="TEXT", help="for the card: the command that trained it")
    add("--data", default="", metavar="TEXT", help="for the card: what it was trained on")
    folder = ROOT / "third_party"
    add("--third-party", type=Path, default=folder, metavar="DIR", help="the patched codebases (default: third_party)")
    return p


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags; `native` holds the words after --. Ends the program where something is wrong."""
    cut = argv.index("--") if "--" in argv else len(argv)
    p = parser()
    args = p.parse_args(argv[:cut])
    args.native = argv[cut + 1 :]
    if args.native and not backbones.get(args.backbone).takes_flags:
        p.error(f"{args.native[0]}: a checkpoint of {args.backbone} knows its network; leave out what stands after --")
    for file in (args.checkpoint, *args.scores):
        if not file.is_file():
            p.error(f"there is no file {file}")
    return args
