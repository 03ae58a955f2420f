"""Discriminator guidance (Kim et al. 2023; Table 7 of the paper): a discriminator between data and
samples of a fixed model, the guide, corrects the model's score while it samples.

    run/guidance.sh sample MODEL --output samples.npz           of a model in diffusers' format
    run/guidance.sh train --data IMAGES --samples samples.npz --output guide.safetensors
    run/guidance.sh sample MODEL --guide guide.safetensors --nfe 25 --output guided.npz
    run/guidance.sh compare out/quickstart --output out/guidance

The guide works with every backbone that samples the same kind of images: EDM's own generate.py
takes --guide FILE and --guide-weight W, too. docs/guidance.md explains.
"""

import argparse
import math
import sys
from pathlib import Path

from ogdm_core.cli import Parser, cells, errors_in_one_line, number, numbers
from ogdm_core.nfe import DISCRETISATIONS, steps_for_nfe

PROGRAM = "run/guidance.sh"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags of one of three commands."""
    p = Parser(prog=PROGRAM, description=__doc__)
    commands = p.add_subparsers(dest="command", required=True)
    count, seed = number(int, 1), number(int, 0, 2**31)

    def command(name: str, words: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=words, description=words, prog=f"{PROGRAM} {name}")
        made.add_argument("--seed", type=seed, default=0, help="seed (default: 0)")
        return made

    add = command("sample", "Writes samples of a diffusers model to an npz.").add_argument
    add("model", help="folder in diffusers' format, or a hub name")
    add("--output", type=Path, required=True, help="npz to write, as evaluators read it")
    add("--count", type=count, default=5000, help="number of images (default: 5000)")
    add("--sampler", default="heun", help="default: heun")
    add("--nfe", type=count, default=35, help="network evaluations per image (default: 35)")
    add("--discretisation", choices=DISCRETISATIONS, help="time grid (default: the schedule's own)")
    add("--guide", type=Path, help="guide to sample with")
    add("--guide-weight", type=number(float, -math.inf), default=1.0, help="w (default: 1)")

    add = command("train", "Trains a guide between data and samples of one model.").add_argument
    add("--data", required=True, help="digits, mnist, an .npz or a folder: what is real")
    add("--samples", required=True, help="an .npz or a folder: samples of the model")
    add("--output", type=Path, required=True, help="safetensors file to write")
    add("--size", type=count, help="image size, where the data can be resized")
    add("--class-cond", action="store_true", help="give the guide the labels of both sets")
    add("--flip", action="store_true", help="mirror images at random, as guided-diffusion does")
    add("--steps", type=count, default=2000, help="optimiser steps (default: 2000)")
    add("--batch-size", type=count, default=128, help="images of each set per step (default: 128)")
    add("--lr", type=number(float, 0), default=1e-3, help="learning rate (default: 1e-3)")
    add("--kind", choices=("light", "paper"), default="light", help="network (default: light)")
    add("--width", type=number(float, 0), default=1.0, help="its width (default: 1)")

    add = command("compare", "Measures guidance on the fine-tunes of a quickstart.").add_argument
    add("quickstart", type=Path, help="the folder that run/quickstart.sh wrote")
    add("--data", choices=("digits", "mnist"), default="digits",
        help="what the fine-tunes were trained on (default: digits)")  # fmt: skip
    add("--output", type=Path, required=True, help="folder for samples, guides and results.json")
    add("--cells", type=cells, default="euler-10,heun-11,heun-15,heun-25",
        metavar="SAMPLER-NFE,...", help="default: %(default)s")  # fmt: skip
    add("--weights", type=numbers(float, -math.inf), default=[1.0], metavar="W,...",
        help="guidance weights, as in 0.5,1,2; 0 for none (default: 1)")  # fmt: skip
    add("--discretisation", choices=DISCRETISATIONS, default="linear",
        help="time grid (default: linear)")  # fmt: skip
    add("--samples", type=number(int, 100), default=2000, help="images per cell (default: 2000)")
    add("--count", type=count, default=5000, help="samples that train a guide (default: 5000)")
    add("--steps", type=count, default=2000, help="training steps of a guide (default: 2000)")
    args = p.parse_args(argv)
    if args.command == "sample":
        try:
            steps_for_nfe(args.sampler, args.nfe)
        except ValueError as error:
            p.error(str(error))
    return args


def train(args: argparse.Namespace) -> None:
    """Reads both sets, trains, writes the guide with what it was made of."""
    import torch

    from ogdm_core.files import sha256
    from ogdm_core.guidance import save_guide
    from ogdm_core.images import load
    from run.guidance.train import load_samples, train_guide
    from run.provenance import commit

    real = load(args.data, args.size)
    fake = load_samples(args.samples, real.channels, args.size)
    labels = real.classes if args.class_cond else 0
    guide, loss = train_guide(
        real, fake, steps=args.steps, batch=args.batch_size, lr=args.lr, kind=args.kind,
        width=args.width, labels=labels, flip=args.flip, seed=args.seed,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )  # fmt: skip
    digest = sha256(args.samples) if Path(args.samples).is_file() else "a folder"
    save_guide(args.output, guide, held_out_loss=f"{loss:.4f}", data=args.data, steps=args.steps,
               samples=args.samples, samples_sha256=digest, seed=args.seed,
               commit=commit())  # fmt: skip
    print(f"wrote {args.output}: cross-entropy {loss:.4f} on held-out images, 0.6931 is chance")


@errors_in_one_line()
def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    args = parse(argv)
    from run.sampling import draw_images

    from .compare import compare

    if args.command == "sample":
        draw_images(args.model, args.output, args.count, args.sampler, args.nfe, args.seed,
                    args.discretisation, args.guide, args.guide_weight)  # fmt: skip
    else:
        {"train": train, "compare": compare}[args.command](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
