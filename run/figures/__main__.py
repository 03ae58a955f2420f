"""The paper's pictures, for any models. Every picture carries the command that made it.

teaser       Fig. 1: same noise, NFE across, methods and samplers down, and how far samples move as
             NFE changes, as numbers
grid         appendix F: samples of each method, FID and recall from a results.json or a table1.json
neighbours   appendix F.5: nearest training images, and whether samples copy them
diagrams     Figs. 2 and 3: the graphical model and the role of the discriminator, as SVG files
xi           Fig. 4 and Lemma 1: what run/analysis_xi.sh draws

A model is a folder in diffusers' format, sampled here:
  run/figures.sh teaser --method Baseline=DIR --method OGDM=DIR --nfe 5 10 20 50
or samples made by ADM's, EDM's or LDM's own commands from the same seeds, an .npz or a folder of
images for each sampler and NFE:
  run/figures.sh teaser --method 'Baseline=base/{sampler}-{nfe}.npz' \\
                        --method 'OGDM=ogdm/{sampler}-{nfe}.npz'
run/figures.sh teaser --help lists the options of one of them.
"""

import argparse
import importlib
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ogdm_core.cli import Parser, errors_in_one_line, number
from run.provenance import ROOT

MODULES = {"teaser": "teaser", "grid": "grids", "neighbours": "neighbours", "xi": "xi_figure"}
DIAGRAMS = ("graphical_model.svg", "discriminator_role.svg")
METHOD = (
    "NAME=PATH, once per method: a diffusers folder, or files sampled elsewhere from the same "
    "seeds, named by a pattern such as runs/base/{sampler}-{nfe}.npz"
)
XI = """\
How the true reverse density lies between its limits (section 3.5, appendix A.4): Fig. 4 in about 5
seconds on a CPU. Writes OUT/fig4.png, OUT/xi.csv (xi and squared L2 distances, with their numerical
errors) and OUT/lemma1.csv (how fast each limit of Lemma 1 is reached), and prints where 0 < xi < 1
fails."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of one figure."""
    main = Parser(prog="run/figures.sh", description=__doc__)
    figures = main.add_subparsers(dest="figure", required=True, metavar="FIGURE")
    count = number(int, 1)

    def figure(name: str, summary: str, *groups: str, out: str = "out/figures", **options: str):
        sub = figures.add_parser(name, help=summary, **{"description": summary} | options)
        add = sub.add_argument
        add("--out", type=Path, default=Path(out), help=f"folder ({out})")
        if "sampling" in groups:
            add("--seed", type=int, default=0, help="of the initial noise (0)")
            add("--device", default="cpu", help="cpu (default) or cuda")
        if "features" in groups:
            add("--weights", type=Path, help="distances are taken in Inception's features: its "
                "weights, as for run/evaluate.sh")  # fmt: skip
            add("--features", help="or in: pixels (default), a quickstart's classifier .pt, or "
                "MODULE:NAME, a net of uint8 images [N, 3, H, W]")  # fmt: skip
        return sub

    summary = "Fig. 1, with the drift of samples over NFE"
    add = figure("teaser", summary, "sampling", "features").add_argument
    add("--method", action="append", required=True, help=METHOD)
    add("--row", action="append", help="METHOD:SAMPLER[:NFE,...], once per line of the picture "
        "(all methods, euler and s-pndm)")  # fmt: skip
    add("--nfe", type=count, nargs="+", default=[10, 20, 50, 100], help="(10 20 50 100)")
    add("--images", type=count, default=2, help="noises to show (2)")
    add("--drift-images", type=count, default=256, help="noises to measure on (256)")

    add = figure("grid", "qualitative grids with FID and recall", "sampling").add_argument
    add("--method", action="append", required=True, help=METHOD)
    add("--sampler", nargs="+", default=["euler", "s-pndm"], help="(euler s-pndm)")
    add("--nfe", type=count, default=10, help="(10)")
    add("--images", type=count, default=50, help="images per panel (50)")
    add("--columns", type=count, default=10, help="images per line (10)")
    add("--results", help="results.json of a quickstart or tableN.json of run/reproduce_tableN.sh: "
        "FID and recall for the captions")  # fmt: skip

    summary = "nearest training images and memorisation"
    sub = figure("neighbours", summary, "sampling", "features")
    add, one = sub.add_argument, sub.add_mutually_exclusive_group(required=True).add_argument
    add("--train", required=True, help="digits, mnist, an .npz or a folder")
    one("--samples", help="an .npz or a folder of samples")
    one("--method", help="or NAME=PATH of a model to sample: " + METHOD)
    add("--sampler", default="euler", help="with --method (euler)")
    add("--nfe", type=count, default=50, help="with --method (50)")
    add("--count", type=count, default=500, help="samples with --method (500)")
    add("--held-out", help="real images not trained on (absent: leave-one-out)")
    add("--images", type=count, default=10, help="samples to show (10)")
    add("--k", type=count, default=3, help="neighbours of each (3)")

    figure("diagrams", "Figs. 2 and 3: two drawings, as SVG")

    summary = "Fig. 4, the numbers behind it, and Lemma 1 measured"
    options = {"prog": "run/analysis_xi.sh", "description": XI}
    add = figure("xi", summary, out="out/xi", **options).add_argument
    add("--mu", type=float, default=2.0, help="the modes sit at +-mu (2)")
    add("--v", type=float, default=0.1, help="v of panels (a) and (c) (0.1)")
    add("--beta", type=float, default=0.4, help="beta of panel (c) (0.4)")
    add("--vs", type=float, nargs="+", default=[0.1, 0.5, 1.0, 1.5, 2.0, 3.0],
        help="v of the curves of panel (b) (0.1 0.5 1 1.5 2 3)")  # fmt: skip
    return main.parse_args(argv)


@errors_in_one_line()
def main(argv: Sequence[str] | None = None) -> int:
    """Draws one figure and prints what it wrote."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    script = ["run/analysis_xi.sh", *argv[1:]] if args.figure == "xi" else ["run/figures.sh", *argv]
    if args.figure == "diagrams":
        args.out.mkdir(parents=True, exist_ok=True)
        drawings = (ROOT / "docs" / "figures" / name for name in DIAGRAMS)
        written = [shutil.copy(file, args.out / file.name) for file in drawings]
    else:
        module = importlib.import_module(f"run.figures.{MODULES[args.figure]}")
        written = module.run(args, shlex.join(script))
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
