"""Samples a model, or two, by every solver on every time grid that fit the numbers of network evaluations,
and scores each by FID and recall. With two models, as a control and its OGDM, it also compares the best
cell of one with the best of the other.

A MODEL is a folder in diffusers' format, or a checkpoint: .pkl of EDM or EDM2, .pt of ADM or SiT, LDM's
.ckpt. REFERENCE and the feature net are those of run/evaluate.sh. docs/solvers.md says how to read the result."""

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from ogdm_core.cli import Parser, number, numbers
from ogdm_core.nfe import DISCRETISATIONS, SAMPLERS, steps_for_nfe
from run.provenance import ROOT

SOLVERS = tuple(name for name in SAMPLERS if name != "stochastic")


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of a flag with several of these names."""

    def parse(text: str) -> list[str]:
        if wrong := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not known; use some of {', '.join(known)}")
        return list(dict.fromkeys(text.split(",")))

    return parse


def parser() -> argparse.ArgumentParser:
    """Every flag."""
    p = Parser(prog="run/solvers.sh", description=__doc__)
    add = p.add_argument
    # fmt: off
    add("paths", nargs="+", type=Path, metavar="MODEL [MODEL] REFERENCE",
        help="what to sample, and what to score against")
    add("--nfe", type=numbers(int, 1), default=[5, 10], metavar="N,...", help="network evaluations (default: 5,10)")
    add("--solvers", type=names(SOLVERS), default=list(SOLVERS), metavar="NAME,...",
        help=f"of {', '.join(SOLVERS)} (default: all of them)")
    add("--grids", type=names(DISCRETISATIONS), default=list(DISCRETISATIONS), metavar="NAME,...",
        help=f"of {', '.join(DISCRETISATIONS)} (default: all of them)")
    add("--names", metavar="NAME,NAME", help="of the models in the table (default: control,OGDM where there are two)")
    add("--count", type=number(int, 4), default=10_000, metavar="N", help="images per cell (default: %(default)s)")
    add("--seed", type=number(int, 0, 2**63), default=0, metavar="N", help="of the noise (default: %(default)s)")
    add("--search", type=number(int, 0), default=0, metavar="N",
        help="try N time grids for the best solver of each model and NFE, without training and data, and keep the best")
    add("--native", type=shlex.split, default=[], metavar="FLAGS",
        help="ADM, SiT: the network's flags in the sampling script, in quotes, where the checkpoint, or flags.json "
        "beside it, does not say them")
    add("--features", metavar="NET", help="one feature net of those that run/evaluate.sh takes (default: Inception)")
    add("--weights", type=Path, metavar="FILE", help="Inception's weights, as in run/evaluate.sh")
    add("--batch", type=number(int, 1), default=256, metavar="N", help="images at once (default: %(default)s)")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    add("--third-party", type=Path, default=ROOT / "third_party", metavar="DIR",
        help="the patched codebases (default: third_party)")
    add("--out", type=Path, default=Path("out/solvers"), metavar="DIR",
        help="results, and a cache of samples and features (default: %(default)s)")
    # fmt: on
    return p


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags; `models` and `reference` are the paths, `names` the models' names, `cells` (solver, NFE)."""
    p = parser()
    args = p.parse_args(argv)
    if not 2 <= len(args.paths) <= 3:
        p.error(f"give MODEL REFERENCE, or MODEL MODEL REFERENCE, not {len(args.paths)} paths")
    *args.models, args.reference = args.paths
    default = ["control", "OGDM"] if len(args.models) == 2 else [args.models[0].name]
    args.names = args.names.split(",") if args.names else default
    if len(set(args.names)) != len(args.models):
        p.error(f"--names: {','.join(args.names)} must be {len(args.models)} different names, one for each model")
    args.cells = [(solver, nfe) for nfe in args.nfe for solver in args.solvers if fits(solver, nfe)]
    if missing := [nfe for nfe in args.nfe if not any(nfe == n for _, n in args.cells)]:
        p.error(f"--nfe: none of {', '.join(args.solvers)} can run in exactly {missing[0]} evaluations")
    return args


def fits(solver: str, nfe: int) -> bool:
    """Whether the solver can run in exactly so many evaluations."""
    try:
        steps_for_nfe(solver, nfe)
    except ValueError:
        return False
    return True


def evaluator(args: argparse.Namespace) -> argparse.Namespace:
    """What run.evaluate's torch evaluator is told."""
    return argparse.Namespace(
        features=args.features, weights=args.weights, batch=args.batch, device=args.device, seed=args.seed,
        cache=args.out / "features", no_cache=False, pr_images=50_000, save_statistics=None, floor=False,
    )  # fmt: skip
