"""Discriminator guidance (Kim et al. 2023; Table 7 of the paper): a discriminator between data and
samples of a fixed model, the guide, corrects the model's score while it samples.

    run/guidance.sh sample MODEL --output samples.npz           of a model in diffusers' format
    run/guidance.sh train --data IMAGES --samples samples.npz --output guide.safetensors
    run/guidance.sh sample MODEL --guide guide.safetensors --nfe 25 --output guided.npz

The guide works with every backbone that samples the same kind of images: EDM's own generate.py
takes --guide FILE and --guide-weight W, too. docs/guidance.md explains.
"""

import argparse
import math
from pathlib import Path

from ogdm_core.cli import Parser, number
from ogdm_core.nfe import DISCRETISATIONS, steps_for_nfe

PROGRAM = "run/guidance.sh"


def parser() -> argparse.ArgumentParser:
    """The flags of both commands."""
    p = Parser(prog=PROGRAM, description=__doc__)
    commands = p.add_subparsers(dest="command", required=True)
    count = number(int, 1)

    def command(name: str, words: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=words, description=words, prog=f"{PROGRAM} {name}")
        made.add_argument("--seed", type=number(int, 0, 2**31), default=0, help="seed (default: %(default)s)")
        return made

    add = command("sample", "Writes samples of a diffusers model to an npz.").add_argument
    add("model", help="folder in diffusers' format, or a hub name")
    add("--output", type=Path, required=True, help="npz to write, as evaluators read it")
    add("--count", type=count, default=5000, help="number of images (default: %(default)s)")
    add("--sampler", default="heun", help="(default: %(default)s)")
    add("--nfe", type=count, default=35, help="network evaluations per image (default: %(default)s)")
    words = "time grid (default: the schedule's own)"
    add("--discretisation", "--discretization", choices=DISCRETISATIONS, help=words)
    add("--guide", type=Path, help="guide to sample with")
    add("--guide-weight", type=number(float, -math.inf), default=1.0, help="w (default: %(default)s)")

    add = command("train", "Trains a guide between data and samples of one model.").add_argument
    add("--data", required=True, help="real images: digits, mnist, an .npz or a folder")
    add("--samples", required=True, help="samples of the model: an .npz or a folder")
    add("--output", type=Path, required=True, help="safetensors file to write")
    add("--size", type=count, help="image size, where the data can be resized")
    add("--class-cond", action="store_true", help="give the guide the labels of both sets")
    add("--flip", action="store_true", help="mirror images at random, as guided-diffusion does")
    add("--steps", type=count, default=2000, help="optimiser steps (default: %(default)s)")
    add("--batch-size", type=count, default=128, help="images of each set per step (default: %(default)s)")
    add("--lr", type=number(float, 0), default=1e-3, help="learning rate (default: %(default)s)")
    add("--kind", choices=("light", "paper"), default="light", help="the guide's network (default: %(default)s)")
    add("--width", type=number(float, 0), default=1.0, help="the network's width (default: %(default)s)")
    return p


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of one command; a sampler that cannot run in --nfe evaluations is refused."""
    p = parser()
    args = p.parse_args(argv)
    if args.command == "sample":
        try:
            steps_for_nfe(args.sampler, args.nfe)
        except ValueError as error:
            p.error(str(error))
    return args
