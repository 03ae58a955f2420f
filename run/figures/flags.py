"""The flags of `run/figures.sh` and `run/analysis_xi.sh`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ogdm_core.cli import Parser, cells, number

DESCRIPTION = """\
The paper's pictures, for any models. Every picture carries the command that made it.

teaser       Fig. 1: same noise, NFE across, methods and samplers down, and how far samples move as
             NFE changes, as numbers
grid         appendix F: samples of each method, FID and recall from a results.json or a table1.json
pairs        real images, and methods below each other, with exact pixels
neighbours   appendix F.5: nearest training images, and whether samples copy them
xi           Fig. 4 and Lemma 1: what run/analysis_xi.sh draws

A model is a folder in diffusers' format, sampled here:
  run/figures.sh teaser --method Baseline=DIR --method OGDM=DIR --nfe 5 10 20 50
or samples made by ADM's, EDM's or LDM's own commands from the same seeds, an .npz or a folder of
images for each sampler and NFE:
  run/figures.sh teaser --method 'Baseline=base/{sampler}-{nfe}.npz' \\
                        --method 'OGDM=ogdm/{sampler}-{nfe}.npz'
run/figures.sh teaser --help lists the options of one of them."""
METHOD = (
    "NAME=PATH, once per method: a diffusers folder, or files sampled elsewhere from the same "
    "seeds, named by a pattern such as runs/base/{sampler}-{nfe}.npz"
)
XI = """\
How the true reverse density lies between its limits (section 3.5, appendix A.4): Fig. 4 in about 5
seconds on a CPU. Writes OUT/fig4.png, OUT/xi.csv (xi and squared L2 distances, with their numerical
errors) and OUT/lemma1.csv (how fast each limit of Lemma 1 is reached), and prints where 0 < xi < 1
fails."""
SAMPLERS = ["euler", "s-pndm"]  # of a picture, unless its flags name others


def parser() -> argparse.ArgumentParser:
    """One subcommand per figure."""
    main = Parser(prog="run/figures.sh", description=DESCRIPTION)
    figures = main.add_subparsers(dest="figure", required=True, metavar="FIGURE")
    count = number(int, 1)

    def figure(name: str, summary: str, *groups: str, out: str = "out/figures", **options: str):
        sub = figures.add_parser(name, help=summary, **{"description": summary} | options)

        def add(flag: str, help: str, **kwargs) -> None:
            """A flag, with its default behind the help."""
            default = kwargs.get("default")
            shown = " ".join(map(str, default)) if isinstance(default, list) else default
            sub.add_argument(flag, help=help if shown is None else f"{help} (default: {shown})".strip(), **kwargs)

        add("--out", "folder", type=Path, default=Path(out))
        if "sampling" in groups:
            add("--seed", "of the initial noise", type=int, default=0)
            add("--device", "cpu or cuda", default="cpu")
        if "features" in groups:
            add("--weights", "take distances in Inception's features: its weights, as for run/evaluate.sh", type=Path)
            add("--features", "take distances in: pixels (the default), a quickstart's classifier .pt, or MODULE:NAME, "
                "a net of uint8 images [N, 3, H, W]")  # fmt: skip
        return sub, add

    _, add = figure("teaser", "Fig. 1, with the drift of samples over NFE", "sampling", "features")
    add("--method", METHOD, action="append", required=True)
    every = " and ".join(SAMPLERS)
    add("--row", f"METHOD:SAMPLER[:NFE,...], once per row (default: all methods, {every})", action="append")
    add("--nfe", "network evaluations", type=count, nargs="+", default=[10, 20, 50, 100])
    add("--images", "noises to show", type=count, default=2)
    add("--drift-images", "noises to measure on", type=count, default=256)

    _, add = figure("grid", "qualitative grids with FID and recall", "sampling")
    add("--method", METHOD, action="append", required=True)
    add("--sampler", "one row of panels each", nargs="+", default=SAMPLERS)
    add("--nfe", "network evaluations", type=count, default=10)
    add("--images", "images per panel", type=count, default=50)
    add("--columns", "images per line", type=count, default=10)
    add("--results", "results.json of a quickstart or tableN.json of run/reproduce_tableN.sh: FID and recall for the "
        "captions")  # fmt: skip

    sub, add = figure(
        "pairs", "real images, and methods below each other from the same noise, pixel by pixel", "sampling"
    )
    add("--method", METHOD, action="append", required=True)
    add("--real", "digits, mnist, an .npz or a folder", required=True)
    sub.add_argument("--cells", type=cells, default=[("euler", 5), ("euler", 10)], metavar="SAMPLER-NFE,...",
                     help="rows of samples (default: euler-5,euler-10)")  # fmt: skip
    add("--images", "per row: the first of the noise", type=count, default=12)

    sub, add = figure("neighbours", "nearest training images and memorisation", "sampling", "features")
    one = sub.add_mutually_exclusive_group(required=True).add_argument
    add("--train", "digits, mnist, an .npz or a folder", required=True)
    one("--samples", help="an .npz or a folder of samples")
    one("--method", help="or NAME=PATH of a model to sample: " + METHOD)
    add("--sampler", "with --method", default="euler")
    add("--nfe", "with --method", type=count, default=50)
    add("--count", "samples with --method", type=count, default=500)
    add("--held-out", "real images not trained on (default: each training image beside the others)")
    add("--images", "samples to show", type=count, default=10)
    add("--k", "neighbours of each", type=count, default=3)

    options = {"prog": "run/analysis_xi.sh", "description": XI}
    _, add = figure("xi", "Fig. 4, the numbers behind it, and Lemma 1 measured", out="out/xi", **options)
    add("--mu", "the modes sit at +-mu", type=float, default=2.0)
    add("--v", "v of panels (a) and (c)", type=float, default=0.1)
    add("--beta", "beta of panel (c)", type=float, default=0.4)
    add("--vs", "v of the curves of panel (b)", type=float, nargs="+", default=[0.1, 0.5, 1.0, 1.5, 2.0, 3.0])
    return main


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of one figure."""
    return parser().parse_args(argv)
