"""The command line behind run/evaluate.sh."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from ogdm_core.files import write_json
from run.provenance import commit, versions

from . import adm, torch_evaluator
from .sources import KINDS, Source, open_source

PACKAGES = ("torch", "numpy", "torch-fidelity", "ogdm")
TORCH_ONLY = ("batch", "device", "pr_images", "seed", "save_statistics")


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser(
        prog="evaluate.sh",
        description="FID, sFID, precision and recall (k = 3) of samples against a reference. "
        f"Each is {KINDS}.",
        epilog="docs/evaluation.md says how feature nets are given, and what is cached.",
    )
    p.add_argument(
        "reference", type=Path, help="training images, ADM's reference batch, statistics"
    )
    p.add_argument("samples", type=Path, help="what a sampler wrote")
    p.add_argument(
        "--evaluator", choices=("torch", "adm"), default="torch",
        help="torch: ours (default); adm: guided-diffusion's own, in an environment of its own",
    )  # fmt: skip
    p.add_argument(
        "--weights", type=Path, metavar="FILE",
        help="torch: torch-fidelity's Inception weights; adm: classify_image_graph_def.pb "
        "(without, upstream downloads it)",
    )  # fmt: skip
    p.add_argument("--features", metavar="MODULE:NAME", help="a feature net instead of Inception")
    p.add_argument("--batch", type=int, default=64, help="images at once (default: %(default)s)")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    p.add_argument("--device", default=default, help="cpu, cuda, cuda:1, ... (here: %(default)s)")
    p.add_argument(
        "--cache", type=Path, default=Path("out/evaluation-cache"), metavar="DIR",
        help="keeps the reference's features and unfinished work (default: %(default)s)",
    )  # fmt: skip
    p.add_argument("--no-cache", action="store_true", help="keep nothing")
    p.add_argument(
        "--pr-images", type=int, default=50_000, metavar="N",
        help="precision and recall use at most N images of a set (default: %(default)s, the "
        "paper's)",
    )  # fmt: skip
    p.add_argument("--seed", type=int, default=0, help="draws those N (default: %(default)s)")
    p.add_argument("--save-statistics", type=Path, metavar="NPZ", help="write the reference's")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the numbers and their origin")
    return p


def main(argv: list[str] | None = None) -> int:
    """Prints the numbers; 2 for what the user can mend, with the way to do so."""
    p = parser()
    args = p.parse_args(argv)
    started = time.time()
    try:
        reference, samples = open_source(args.reference), open_source(args.samples)
        if args.evaluator == "adm":
            refuse_torchs(p, args)
            found = adm.evaluate(reference, samples, args)
        else:
            settings = torch_evaluator.Settings(
                args.weights, args.features, args.batch, args.device,
                None if args.no_cache else args.cache, args.pr_images, args.seed,
                args.save_statistics,
            )  # fmt: skip
            torch_evaluator.check(reference, samples, settings)
            with _bars(reference, samples) as progress:
                found = asdict(torch_evaluator.evaluate(reference, samples, settings, progress))
    except (ValueError, OSError, adm.AdmError) as error:
        p.exit(2, f"error: {error}\n")
    except KeyboardInterrupt:
        p.exit(130, "stopped; the same command goes on from here\n")
    result = found | {
        "evaluator": args.evaluator,
        "reference": str(args.reference),
        "samples": str(args.samples),
        "command": shlex.join(["python", "-m", "run.evaluate", *(argv or sys.argv[1:])]),
        "versions": versions(PACKAGES) | found.get("versions", {}),
        "commit": commit(),
        "seconds": round(time.time() - started, 1),
    }
    if args.json:
        write_json(args.json, result)
    show(result)
    return 0


def refuse_torchs(p: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Raises ValueError for flags that ADM's evaluator would silently ignore."""
    given = [name for name in TORCH_ONLY if getattr(args, name) != p.get_default(name)]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--evaluator adm does not know {flags}: leave out, or --evaluator torch")


def show(result: dict) -> None:
    """The numbers as a small table on stdout, notes on stderr."""
    for name, digits in (("fid", 4), ("sfid", 4), ("precision", 4), ("recall", 4)):
        value = result[name]
        shown = "--" if value is None else f"{value:.{digits}f}"
        print(f"{name.replace('fid', 'FID'):<10} {shown:>10}")
    counts = [result[f"{name}_images"] for name in ("reference", "sample")]
    print("images     {} reference, {} samples".format(*("?" if n is None else n for n in counts)))
    print(f"features   {result['features']}, {result['evaluator']} evaluator")
    for note in result["notes"]:
        print(f"note: {note}", file=sys.stderr)


@contextmanager
def _bars(reference: Source, samples: Source):
    """progress(what, images) on a terminal; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    columns = [*Progress.get_default_columns(), MofNCompleteColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        sources = {"reference": reference, "samples": samples}
        tasks = {n: bars.add_task(n, total=s.count) for n, s in sources.items() if s.count}
        yield lambda what, images: bars.update(tasks[what], completed=images)


if __name__ == "__main__":
    sys.exit(main())
