"""The paper's pictures for any models: run/figures.sh.

teaser       Fig. 1: same noise, NFE across, methods and samplers down; with drift numbers
grid         appendix F: samples of each method, FID and recall in the captions
neighbours   appendix F.5: nearest training images, and whether samples copy them
diagrams     Figs. 2 and 3: graphical model, role of the discriminator
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ogdm_core.flags import Parser, number
from ogdm_core.samplers import steps_for_nfe
from run.provenance import ROOT

DIAGRAMS = ("graphical_model.svg", "discriminator_role.svg")
METHOD = (
    "NAME=PATH, once per method: a diffusers folder, or files sampled elsewhere from the same "
    "seeds, named by a pattern such as runs/base/{sampler}-{nfe}.npz"
)


def run_teaser(args: argparse.Namespace, command: str) -> list[Path]:
    """fig1.png and drift.csv."""
    from . import teaser
    from .samples import load_method, shared_noise
    from .xi_figure import write_csv

    methods = [load_method(text, args.device) for text in args.method]
    specs = args.row or [f"{m.name}:{s}" for s in ("euler", "s-pndm") for m in methods]
    rows = teaser.parse_rows(specs, methods, args.nfe)
    features = _features(args)
    noise = shared_noise(methods, max(args.drift_images, args.images), args.seed)
    cells = teaser.draw_rows(rows, noise)
    numbers = teaser.drift_rows(rows, cells, features)
    print(f"{'method':20}{'sampler':12}{'NFE':>5}{'drift':>10}{'relative':>10}")
    for n in numbers:
        print("{method:20}{sampler:12}{nfe:5}{drift:10.3f}{relative_drift:10.3f}".format(**n))
    return [
        write_csv(args.out / "drift.csv", numbers),
        teaser.draw(rows, cells, numbers, args.out / "fig1.png", command, args.images),
    ]


def run_grid(args: argparse.Namespace, command: str) -> list[Path]:
    """grid-nfeN.png."""
    from . import grids
    from .samples import load_method, shared_noise

    for sampler in args.sampler:
        steps_for_nfe(sampler, args.nfe)
    rows = grids.load_results(args.results) if args.results else []
    methods = [load_method(text, args.device) for text in args.method]
    noise = shared_noise(methods, args.images, args.seed)
    path = args.out / f"grid-nfe{args.nfe}.png"
    return [grids.draw(methods, args.sampler, args.nfe, noise, rows, path, command, args.columns)]


def run_neighbours(args: argparse.Namespace, command: str) -> list[Path]:
    """neighbours.png, neighbours.csv and memorisation.png."""
    if (args.samples is None) == (args.method is None):
        raise ValueError("give either --samples FILE or --method NAME=PATH")
    from ogdm_core.trainer import images
    from run.evaluate.metrics import nearest_neighbours

    from . import neighbours
    from .samples import load_images, load_method, shared_noise
    from .xi_figure import write_csv

    features = _features(args)
    if args.samples is not None:
        samples = load_images(args.samples)
    else:
        method = load_method(args.method, args.device)
        noise = shared_noise([method], args.count, args.seed)
        samples = method.draw(noise, args.nfe, args.sampler)
    train = images.load(args.train)
    phi_samples, phi_train = features(samples), features(train)
    distances, indices = nearest_neighbours(phi_samples, phi_train, args.k)
    held_out = features(images.load(args.held_out)) if args.held_out else None
    result = neighbours.memorisation(phi_samples, phi_train, held_out)
    name = "held-out images" if args.held_out else "training images, leave-one-out"
    print(f"samples nearer than the nearest 1 % of real images: {100 * result.closer:.1f} %")
    print(f"exact copies: {result.copies} of {len(samples)}")
    print(f"a sample is nearer than a real image: {100 * result.p_nearer:.1f} % of pairs")
    n = min(args.images, len(samples))
    return [
        write_csv(args.out / "neighbours.csv", neighbours.table(distances, indices)),
        neighbours.draw_neighbours(
            samples[:n], train, distances[:n], indices[:n], args.out / "neighbours.png", command
        ),
        neighbours.draw_memorisation(result, name, args.out / "memorisation.png", command),
    ]


def run_diagrams(args: argparse.Namespace, command: str) -> list[Path]:
    """Copies of the drawings in docs/figures."""
    args.out.mkdir(parents=True, exist_ok=True)
    return [
        Path(shutil.copy(ROOT / "docs" / "figures" / name, args.out / name)) for name in DIAGRAMS
    ]


def _features(args: argparse.Namespace):
    """The net that --features or --weights names, for a tensor of images or an `Images`.

    It reads and evaluates 64 images at a time: data sets that do not fit memory are welcome.
    """
    import torch

    from run.evaluate.features import load_features

    spec = args.features or (None if args.weights else "pixels")
    net = load_features(spec, args.weights, args.device)
    print(*net.notes, sep="\n", end="\n" * bool(net.notes), file=sys.stderr)

    def features(images):
        pixels = images.__getitem__ if isinstance(images, torch.Tensor) else images.pixels
        return torch.cat([net(pixels(index)) for index in torch.arange(len(images)).split(64)])

    return features


def parser() -> argparse.ArgumentParser:
    """Command line."""
    main = Parser(prog="run/figures.sh", description=__doc__)
    subparsers = main.add_subparsers(dest="figure", required=True, metavar="FIGURE")
    count = number(int, 1)

    def figure(name: str, run, summary: str):
        sub = subparsers.add_parser(name, help=summary, description=summary)
        sub.set_defaults(run=run)
        sub.add_argument("--out", type=Path, default=Path("out/figures"), help="(out/figures)")
        return sub.add_argument

    def sampling(add) -> None:
        add("--seed", type=int, default=0, help="of the initial noise (0)")
        add("--device", default="cpu", help="cpu (default) or cuda")

    def features(add) -> None:
        add(
            "--weights",
            type=Path,
            help="distances are taken in Inception's features: its weights, as for run/evaluate.sh",
        )
        add("--features",
            help="or in: pixels (default), a quickstart's classifier .pt, or "
                 "MODULE:NAME, a net of uint8 images [N, 3, H, W]")  # fmt: skip

    add = figure("teaser", run_teaser, "Fig. 1, with the drift of samples over NFE")
    sampling(add)
    features(add)
    add("--method", action="append", required=True, help=METHOD)
    add("--row", action="append", help="METHOD:SAMPLER[:NFE,...], once per line of the picture "
        "(all methods, euler and s-pndm)")  # fmt: skip
    add("--nfe", type=count, nargs="+", default=[10, 20, 50, 100], help="(10 20 50 100)")
    add("--images", type=count, default=2, help="noises to show (2)")
    add("--drift-images", type=count, default=256, help="noises to measure on (256)")

    add = figure("grid", run_grid, "qualitative grids with FID and recall")
    sampling(add)
    add("--method", action="append", required=True, help=METHOD)
    add("--sampler", nargs="+", default=["euler", "s-pndm"], help="(euler s-pndm)")
    add("--nfe", type=count, default=10, help="(10)")
    add("--images", type=count, default=50, help="images per panel (50)")
    add("--columns", type=count, default=10, help="images per line (10)")
    add(
        "--results",
        help="results.json of a quickstart or tableN.json of run/reproduce_tableN.sh: FID "
        "and recall for the captions",
    )

    add = figure("neighbours", run_neighbours, "nearest training images and memorisation")
    sampling(add)
    features(add)
    add("--train", required=True, help="digits, mnist, an .npz or a folder")
    add("--samples", help="an .npz or a folder of samples")
    add("--method", help="or NAME=PATH of a model to sample: " + METHOD)
    add("--sampler", default="euler", help="with --method (euler)")
    add("--nfe", type=count, default=50, help="with --method (50)")
    add("--count", type=count, default=500, help="samples with --method (500)")
    add("--held-out", help="real images not trained on (absent: leave-one-out)")
    add("--images", type=count, default=10, help="samples to show (10)")
    add("--k", type=count, default=3, help="neighbours of each (3)")

    figure("diagrams", run_diagrams, "Figs. 2 and 3: two drawings, as SVG")
    return main


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws one figure and prints what it wrote."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser().parse_args(arguments)
    from . import style

    try:
        written = args.run(args, style.command_line("run/figures.sh", arguments))
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
