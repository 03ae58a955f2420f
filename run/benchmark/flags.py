"""The flags of `run/benchmark.sh`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ogdm_core.cli import Parser, number
from run.provenance import ROOT

from .cases import CASES, DEFAULT

EDM = ROOT / "third_party" / "edm"
DESCRIPTION = """\
What observation costs a training step, in time and operations (on a GPU, also in memory), on EDM's
own network at the paper's CIFAR-10 size.

Every number is a ratio to the plain step of the same network in the same process; plain steps and
observed ones alternate. Ten minutes on two cores. A run that is stopped keeps what it measured.

  run/benchmark.sh
  run/benchmark.sh --cases euler_exact,euler_fused --batch 4
  run/benchmark.sh --device cuda --batch 64 --repeats 20
  run/benchmark.sh --no-time --resolution 256 --batch 1    count operations only, at any size"""


def choose(names: str) -> list[str]:
    """Cases from `a,b,c` or `all`; raises what argparse shows."""
    chosen = list(CASES) if names == "all" else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in CASES:
            raise argparse.ArgumentTypeError(f"{name!r} is not allowed; give all, or some of {','.join(CASES)}")
    return list(dict.fromkeys(chosen))


def parser() -> argparse.ArgumentParser:
    """Every flag."""
    cases = "\n".join(f"  {name:<18}{case.words}" for name, case in CASES.items())
    p = Parser(prog="run/benchmark.sh", description=DESCRIPTION, epilog=f"cases:\n{cases}")
    add, count = p.add_argument, number(int, 1)
    # fmt: off
    add("--out", metavar="FILE.json", type=Path, default=Path("out/benchmark/speed.json"),
        help="results; FILE.md and FILE.png beside it (default: %(default)s)")
    add("--cases", metavar="A,B,...", type=choose, default=DEFAULT,
        help="some of the cases below, or all (default: the first 8)")
    add("--repeats", metavar="N", type=count, default=5, help="rounds of timed steps (default: %(default)s)")
    add("--no-time", action="store_true",
        help="count operations and evaluations from shapes alone, at any size; time nothing")
    add("--batch", metavar="N", type=count, default=2, help="images per step (default: %(default)s)")
    add("--resolution", metavar="N", type=count, default=32, help="width and height of images (default: %(default)s)")
    add("--channels", metavar="N", type=count, default=128, help="the network's base channels (default: %(default)s)")
    add("--threads", metavar="N", type=count, help="CPU threads (default: one per core)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    # fmt: on
    return p


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags; refuses what cannot work."""
    p = parser()
    args = p.parse_args(argv)
    if args.out.suffix != ".json":
        p.error(f"--out: {str(args.out)!r} is not allowed; name a file that ends in .json")
    if args.resolution < 8 or args.resolution & (args.resolution - 1):
        p.error(f"--resolution: {args.resolution} is not a power of two from 8")
    if args.channels % 16:
        p.error(f"--channels: {args.channels} is not a multiple of 16")
    return args
