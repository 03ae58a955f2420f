"""What run/guidance.sh does: trains a guide, or samples a model with and without one."""

import argparse
import sys
from pathlib import Path

from ogdm_core.cli import errors_in_one_line
from ogdm_core.files import sha256
from ogdm_core.guidance import save_guide
from ogdm_core.images import load
from run.guidance.flags import parse
from run.guidance.train import load_samples, train_guide
from run.provenance import commit
from run.sampling import device_here, draw_images


def train(args: argparse.Namespace) -> None:
    """Reads both sets, trains a guide, and writes it together with the settings and files that it was made from."""
    real = load(args.data, args.size)
    fake = load_samples(args.samples, real.channels, args.size)
    options = {name: getattr(args, name) for name in ("steps", "lr", "kind", "width", "flip", "seed")}
    labels = real.classes if args.class_cond else 0
    guide, loss = train_guide(real, fake, batch=args.batch_size, labels=labels, device=device_here(), **options)
    digest = sha256(args.samples) if Path(args.samples).is_file() else "a folder"
    made_from = {name: getattr(args, name) for name in ("data", "steps", "samples", "seed")}
    save_guide(args.output, guide, held_out_loss=f"{loss:.4f}", samples_sha256=digest, commit=commit(), **made_from)
    print(f"wrote {args.output}: cross-entropy {loss:.4f} on held-out images, 0.6931 is chance")


@errors_in_one_line()
def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    args = parse(argv)
    if args.command == "train":
        train(args)
    else:
        where = {"discretisation": args.discretisation, "guide": args.guide, "weight": args.guide_weight}
        draw_images(args.model, args.output, args.count, args.sampler, args.nfe, args.seed, **where)
    return 0


if __name__ == "__main__":
    sys.exit(main())
