"""Trains or fine-tunes a diffusers `UNet2DModel`, with or without OGDM.

    python -m ogdm_core.diffusers --data digits --model PATH --output OUT --ogdm
    accelerate launch -m ogdm_core.diffusers ...        (several GPUs or processes)

Writes to OUT a folder that plain diffusers loads (`DDPMPipeline.from_pretrained(OUT)`), with the
EMA weights. `OUT/checkpoint.pt` holds the rest; Ctrl-C saves it, and the same command continues.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from ..cli import Parser, number
from ..flags import add_arguments
from ..images import ImageError


def parser() -> argparse.ArgumentParser:
    """Every flag of a run."""
    p = Parser(prog="python -m ogdm_core.diffusers", description=__doc__)
    add, count, share = p.add_argument, number(int, 1), number(float, 0, 1)
    rate, seed = number(float, 0, 1e37), number(int, 0, 2**31)  # Adam divides the rate by 0.1
    add("--data", default="digits", help="digits, mnist, an .npz or a folder (default: digits)")
    add("--size", type=number(int, 1, 2**15), help="image size, where the data can be resized")
    add("--output", required=True, type=Path, help="folder to write")
    add("--model", help="folder in diffusers' format, or a hub name; absent: from scratch")
    add("--channels", default="24,32", help="U-Net width per level, from scratch (default: 24,32)")
    add("--layers", type=count, default=1, help="blocks per level, from scratch (default: 1)")
    add("--norm-groups", type=count, default=8, help="of its norms, from scratch (default: 8)")
    add("--attention", type=number(int, 0), default=0, metavar="SIZE",
        help="attention at this image size and below, from scratch "
        "(default: in the middle only)")  # fmt: skip
    add("--scale-shift", action="store_true", help="time scales and shifts its norms, from scratch")
    add("--class-cond", action="store_true", help="train on the data's labels, from scratch")
    add("--steps", type=count, default=2000, help="optimiser steps in all (default: 2000)")
    add("--batch-size", type=number(int, 1, 2**20), default=64, help="images per process and step (default: 64)")
    add("--accumulate", type=count, default=1, help="microbatches per step (default: 1)")
    add("--lr", type=rate, default=1e-4, help="learning rate (default: 1e-4)")
    add("--anneal", action="store_true", help="lower both learning rates linearly to 0")
    add("--ema", type=share, help="decay of the weights' average (default: over the last tenth of "
        "the run so far, at most 0.999)")  # fmt: skip
    add("--x0-weight", type=number(float, 1), default=1.0, metavar="MOST", help="weight the plain "
        "loss by sigma^2, held between 1 and this number (default: 1)")  # fmt: skip
    add("--flip", action="store_true", help="mirror images at random")
    add("--mixed-precision", choices=("no", "fp16", "bf16"), default="no")
    add("--seed", type=seed, default=0, help="seed of data order and noise (default: 0)")
    add("--save-every", type=count, default=500, help="steps between checkpoints (default: 500)")
    add("--keep-every", type=count, metavar="N", help="also keep the model of every N-th step, in "
        "OUTPUT/snapshot-NNNNNN, for run/evaluate.sh --curve")  # fmt: skip
    add("--log-every", type=count, default=50, help="steps between log.jsonl's lines (default: 50)")
    add("--report-to", choices=("tensorboard", "wandb", "none"), default="none", help="losses, D's accuracy and, "
        "at each checkpoint, samples; a resumed run goes on in the same place (default: none)")  # fmt: skip
    add("--tensorboard", action="store_const", dest="report_to", const="tensorboard",
        help="the same as --report-to tensorboard, in OUTPUT/tensorboard")  # fmt: skip
    add_arguments(p, "diffusers")
    return p


@contextlib.contextmanager
def memory_errors_named() -> Iterator[None]:
    """Turns the errors of numpy, PIL and torch where memory is short into one OSError with advice."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        words = ("allocate memory", "out of memory", "bad_alloc", "overflowed")
        if not isinstance(error, MemoryError) and not any(word in str(error) for word in words):
            raise
        why = (str(error).splitlines() or ["MemoryError"])[0]
        raise OSError(f"not enough memory ({why}); give a smaller --batch-size, --channels or --size") from error


def main(argv: list[str] | None = None) -> int:
    """Trains; returns the exit code: 0 when done, 130 when stopped before."""
    p = parser()
    args = p.parse_args(argv)
    try:
        from .train import Trainer  # takes seconds, and needs packages that may be missing

        with memory_errors_named():
            trainer = Trainer(args)
    except ModuleNotFoundError as error:
        if error.name == "wandb":
            p.error("--report-to wandb: there is no wandb; pip install wandb")
        extra = "ldm" if error.name == "tensorboard" else "diffusers"
        p.error(f"{error}; pip install -e '.[{extra}]' in a clone brings the trainer's packages")
    except (ValueError, OSError, ImportError) as error:
        p.error(str(error))
    try:
        with memory_errors_named():
            finished = trainer.train()
    except (ImageError, OSError) as error:  # a bad image, a full disk; any other is a bug
        p.error(str(error))
    if not finished:
        trainer.accelerator.print(f"stopped at step {trainer.step}; the same command continues from there")
    return 0 if finished else 130


if __name__ == "__main__":
    sys.exit(main())
