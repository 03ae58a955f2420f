"""The flags of `run/evaluate.sh`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ogdm_core.cli import Parser, number, time_grid
from ogdm_core.grids import check_solver
from ogdm_core.nfe import DISCRETISATIONS, SAMPLERS
from run.backbones import reader_of

DESCRIPTION = """\
FID, precision and recall (k = 3) of samples against a reference.

Each of the two is an npz of images (arr_0: uint8, [N, H, W, C], as the samplers write it), a folder
of images, digits, mnist, or an npz of saved statistics (mu, sigma). ADM's reference batches are
read, too. The same command continues a run that was stopped. docs/evaluation.md has more."""
TORCH, ADM = "torch", "adm"
TORCH_ONLY = ("features", "batch", "device", "pr_images", "seed", "save_statistics", "floor")
# The flags of a model that is sampled here, and their defaults.
OF_MODEL = {"sampler": "euler", "nfe": 10, "discretisation": None, "rho": None, "order": None, "count": 50_000}


def parser() -> argparse.ArgumentParser:
    """Every flag."""
    p = Parser(prog="run/evaluate.sh", description=DESCRIPTION)
    add = p.add_argument
    # fmt: off
    add("reference", type=Path, help="training images, ADM's reference batch, statistics")
    add("samples", type=Path, help="what a sampler wrote; or a model, which is sampled here: a folder in diffusers' "
        "format, or a checkpoint of ADM's (with its flags.json), EDM's or LDM's")
    add("--sampler", choices=tuple(SAMPLERS), metavar="NAME",
        help=f"of a model: {', '.join(SAMPLERS)} (default: {OF_MODEL['sampler']})")
    add("--nfe", type=number(int, 1), metavar="N",
        help=f"of a model: network evaluations (default: {OF_MODEL['nfe']})")
    add("--discretisation", "--discretization", "--grid", type=time_grid, metavar="NAME|FILE",
        help=f"of a model: time grid, {', '.join(DISCRETISATIONS)}, or a FILE of run/solvers.sh --search (default: "
        "the model's own)")
    add("--rho", type=number(float, 1e-3), metavar="X",
        help="of a model: power of the time grid karras, polynomial or uniform")
    add("--order", type=number(int, 1), metavar="N",
        help="of a model: order of a multistep solver (default: its highest)")
    add("--count", type=number(int, 4), metavar="N",
        help=f"of a model: images to draw (default: {OF_MODEL['count']})")
    add("--evaluator", choices=(TORCH, ADM), default=TORCH,
        help="torch: ours, on a GPU or a CPU; adm: guided-diffusion's own, which also gives sFID and the Inception "
        "score; it gets an environment with TensorFlow, which is made once (default: %(default)s)")
    add("--weights", type=Path, metavar="FILE",
        help="torch: torch-fidelity's Inception weights; adm: classify_image_graph_def.pb (without it, "
        "guided-diffusion's evaluator downloads the file)")
    add("--features", metavar="NET",
        help="another feature net, or several, comma-separated: lite0, lite0-64 (EfficientNet-Lite0, which installs by "
        "itself); MODULE:NAME, a callable on the import path that turns uint8 [N, 3, H, W] into [N, D]; the "
        "quickstart's classifier, FILE.pt; pixels (default: Inception)")
    add("--floor", action="store_true",
        help="also FID of as many images of the reference as there are samples, against its others")
    add("--batch", type=number(int, 1), default=64, metavar="N", help="images at once (default: %(default)s)")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    add("--cache", type=Path, default=Path("out/evaluation-cache"), metavar="DIR",
        help="keeps the reference's features and unfinished work (default: %(default)s)")
    add("--no-cache", action="store_true", help="keep nothing")
    add("--pr-images", type=number(int, 4), default=50_000, metavar="N",
        help="precision and recall use at most N images of a set (default: %(default)s, the paper's)")
    add("--seed", type=number(int, 0, 2**63), default=0, metavar="N",
        help="draws those N images, and a model's samples (default: %(default)s)")
    add("--save-statistics", type=Path, metavar="NPZ", help="write the reference's, to be used as a REFERENCE later")
    add("--curve", type=Path, metavar="PNG",
        help="SAMPLES is a pattern of snapshots of a backbone or diffusers, in quotes, such as 'RUN/*snapshot*': "
        "sample and score each, and draw FID over the number in its name; scores are kept in --cache")
    add("--json", type=Path, metavar="FILE", help="write the numbers, the command, versions and the commit")
    # fmt: on
    return p


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, `model` (whether SAMPLES is one) among them, with the defaults of a model filled in."""
    p = parser()
    args = p.parse_args(argv)
    configs = (args.samples / name for name in ("unet/config.json", "config.json"))
    args.model = bool(args.curve or reader_of(args.samples) or any(file.is_file() for file in configs))
    if args.curve and args.save_statistics:
        p.error("--save-statistics is for one evaluation: leave out it or --curve")
    given = [name for name in OF_MODEL if getattr(args, name) is not None]
    if given and not args.model:
        p.error(f"--{given[0]} is for a model; {args.samples} is none")
    if args.model:
        vars(args).update({name: getattr(args, name) or default for name, default in OF_MODEL.items()})
        try:
            check_solver(args.sampler, args.nfe, args.discretisation, args.rho, args.order)
        except ValueError as error:
            p.error(str(error))
    given = [name for name in TORCH_ONLY if getattr(args, name) != p.get_default(name)]
    if args.evaluator == ADM and (other := [n for n in given if not (args.model and n == "seed")]):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in other)
        p.error(f"--evaluator {ADM} does not know {flags}: leave out, or --evaluator {TORCH}")
    return args
