"""A spiral, an MLP, one picture: few-step samples that stray from it, and OGDM's that stray less.

    run/toy.sh --out out/toy

Trains a baseline, and from it a control and an OGDM fine-tune of equal length. Samples both with
Euler from the same noise and prints the samples' mean distance to the data.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from ogdm_core import flags
from ogdm_core.cli import Parser, number
from ogdm_core.config import OGDMConfig

OGDM = {"k": 0.5, "gamma": 0.1}
# D is the toy's own, and gamma is fixed.
NETWORK = ("d_kind", "d_width", "d_mapping_lr", "d_precision", "augment_labels", "rho", "plain_end")


def parser() -> argparse.ArgumentParser:
    """Every flag."""
    p = Parser(prog="run/toy.sh", description=__doc__)
    add, count = p.add_argument, number(int, 1)
    add("--out", type=Path, default=Path("out/toy"), help="folder to write (default: %(default)s)")
    add("--seed", type=number(int, 0, 2**31), default=0, help="seed of data, noise and weights (default: %(default)s)")
    add("--pretrain", type=count, default=6000, help="steps of the baseline (default: %(default)s)")
    add("--steps", type=count, default=3000, help="steps of each fine-tune (default: %(default)s)")
    flags.add_arguments(p, defaults=OGDM, switch=False, without=NETWORK)
    return p


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags; `config` holds the settings of the OGDM fine-tune."""
    args = parser().parse_args(argv)
    config, plain = flags.from_args(args, defaults=OGDM), OGDMConfig()
    args.config = replace(config, **{name: getattr(plain, name) for name in NETWORK})  # whatever a recipe says
    return args
