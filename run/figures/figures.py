"""The paper's pictures for any models: run/figures.sh.

teaser       Fig. 1: same noise, NFE across, methods and samplers down; with drift numbers
grid         appendix F: samples of each method, FID and recall in the captions
neighbours   appendix F.5: nearest training images, and whether samples copy them
diagrams     Figs. 2 and 3: graphical model, role of the discriminator
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import diagrams, grids, neighbours, style, teaser
from .features import load_features
from .images import load_images
from .sources import load_method, shared_noise
from .xi_figure import write_csv

METHOD_HELP = (
    "NAME=PATH, once per method: a diffusers folder, or files sampled elsewhere from the same "
    "seeds, named by a pattern such as runs/base/{sampler}-{nfe}.npz"
)
FEATURES_HELP = "distances are taken in: pixels (default), a quickstart's classifier .pt, MODULE:FN"


def run_teaser(args: argparse.Namespace, command: str) -> list[Path]:
    """fig1.png and drift.csv."""
    methods = [load_method(text, args.device) for text in args.method]
    specs = args.row or [f"{m.name}:{s}" for s in ("euler", "s-pndm") for m in methods]
    rows = teaser.parse_rows(specs, methods, args.nfe)
    features = load_features(args.features)
    noise = shared_noise(methods, max(args.drift_images, args.images), args.seed)
    cells = teaser.draw_rows(rows, noise)
    numbers = teaser.drift_rows(rows, cells, features)
    print(f"{'method':20}{'sampler':12}{'NFE':>5}{'drift':>10}{'relative':>10}")
    for n in numbers:
        print(
            f"{n['method']:20}{n['sampler']:12}{n['nfe']:5}{n['drift']:10.3f}"
            f"{n['relative_drift']:10.3f}"
        )
    return [
        write_csv(args.out / "drift.csv", numbers),
        teaser.draw(rows, cells, numbers, args.out / "fig1.png", command, args.images),
    ]


def run_grid(args: argparse.Namespace, command: str) -> list[Path]:
    """grid-nfeN.png."""
    from ogdm_core.samplers import steps_for_nfe

    for sampler in args.sampler:
        steps_for_nfe(sampler, args.nfe)
    rows = grids.load_results(args.results) if args.results else []
    methods = [load_method(text, args.device) for text in args.method]
    noise = shared_noise(methods, args.images, args.seed)
    path = args.out / f"grid-nfe{args.nfe}.png"
    return [grids.draw(methods, args.sampler, args.nfe, noise, rows, path, command, args.columns)]


def run_neighbours(args: argparse.Namespace, command: str) -> list[Path]:
    """neighbours.png, neighbours.csv and memorisation.png."""
    from run.evaluate.metrics import nearest_neighbours

    features = load_features(args.features)
    samples, train = _samples(args), load_images(args.train)
    phi_samples, phi_train = features(samples), features(train)
    distances, indices = nearest_neighbours(phi_samples, phi_train, args.k)
    held_out = features(load_images(args.held_out)) if args.held_out else None
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


def _samples(args: argparse.Namespace):
    """Images from --samples, or drawn from --method."""
    if (args.samples is None) == (args.method is None):
        raise ValueError("give either --samples FILE or --method NAME=PATH")
    if args.samples is not None:
        return load_images(args.samples)
    method = load_method(args.method, args.device)
    noise = shared_noise([method], args.count, args.seed)
    return method.draw(noise, args.nfe, args.sampler)


def run_diagrams(args: argparse.Namespace, command: str) -> list[Path]:
    """graphical_model.png and discriminator_role.png."""
    return [
        diagrams.draw_graphical_model(args.out / "graphical_model.png", command),
        diagrams.draw_discriminator_role(args.out / "discriminator_role.png", command),
    ]


def parser() -> argparse.ArgumentParser:
    """Command line."""
    main = argparse.ArgumentParser(
        prog="run/figures.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    subparsers = main.add_subparsers(dest="figure", required=True, metavar="FIGURE")

    def figure(name: str, run, summary: str) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        sub.set_defaults(run=run)
        sub.add_argument("--out", type=Path, default=Path("out/figures"), help="(out/figures)")
        return sub

    def models(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--seed", type=int, default=0, help="of the initial noise (0)")
        sub.add_argument("--device", default="cpu", help="cpu (default) or cuda")

    sub = figure("teaser", run_teaser, "Fig. 1, with the drift of samples over NFE")
    models(sub)
    sub.add_argument("--method", action="append", required=True, help=METHOD_HELP)
    sub.add_argument(
        "--row", action="append",
        help="METHOD:SAMPLER[:NFE,...], a line of the picture each (all methods, euler and s-pndm)",
    )  # fmt: skip
    sub.add_argument("--nfe", type=int, nargs="+", default=[10, 20, 50, 100], help="(10 20 50 100)")
    sub.add_argument("--images", type=int, default=2, help="noises to show (2)")
    sub.add_argument("--drift-images", type=int, default=256, help="noises to measure on (256)")
    sub.add_argument("--features", default="pixels", help=FEATURES_HELP)

    sub = figure("grid", run_grid, "qualitative grids with FID and recall")
    models(sub)
    sub.add_argument("--method", action="append", required=True, help=METHOD_HELP)
    sub.add_argument("--sampler", nargs="+", default=["euler", "s-pndm"], help="(euler s-pndm)")
    sub.add_argument("--nfe", type=int, default=10, help="(10)")
    sub.add_argument("--images", type=int, default=50, help="images a panel (50)")
    sub.add_argument("--columns", type=int, default=10, help="images a line (10)")
    sub.add_argument("--results", help="results.json with FID and recall for the captions")

    sub = figure("neighbours", run_neighbours, "nearest training images and memorisation")
    models(sub)
    sub.add_argument("--train", required=True, help="digits, mnist, an .npz or a folder")
    sub.add_argument("--samples", help="an .npz or a folder of samples")
    sub.add_argument("--method", help="or NAME=PATH of a model to sample: " + METHOD_HELP)
    sub.add_argument("--sampler", default="euler", help="with --method (euler)")
    sub.add_argument("--nfe", type=int, default=50, help="with --method (50)")
    sub.add_argument("--count", type=int, default=500, help="samples with --method (500)")
    sub.add_argument("--held-out", help="real images not trained on (absent: leave-one-out)")
    sub.add_argument("--images", type=int, default=10, help="samples to show (10)")
    sub.add_argument("--k", type=int, default=3, help="neighbours of each (3)")
    sub.add_argument("--features", default="pixels", help=FEATURES_HELP)

    figure("diagrams", run_diagrams, "Figs. 2 and 3, drawn")
    return main


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws one figure and prints what it wrote."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser().parse_args(arguments)
    command = style.command_line("run/figures.sh", arguments)
    try:
        written = args.run(args, command)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
