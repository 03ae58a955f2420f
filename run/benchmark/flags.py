"""The flags of `run/benchmark.sh`, and its cases: settings of the method, and the naive schedule they improve on."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ogdm_core.cli import Parser, number
from ogdm_core.config import OGDMConfig
from run.provenance import ROOT

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
NARROW_WIDTH = 0.0625  # d_width of a narrow D of the paper's kind: 32 channels throughout


@dataclass(frozen=True)
class Case:
    """One way to train with observation guidance."""

    words: str
    settings: dict[str, Any] = field(default_factory=dict)  # OGDMConfig's that are not the defaults, or the paper's D
    naive: bool = False  # evaluates the denoiser anew for the projection, and again for D's step

    @property
    def config(self) -> OGDMConfig:
        """The settings."""
        return OGDMConfig(**{"d_kind": "paper"} | self.settings)

    def kinds(self) -> dict[str, float]:
        """Kinds of step and the share of each: `r1` takes the penalty, `plain` does not."""
        rare = 1 / self.config.r1_every if self.config.r1 > 0 else 0.0
        return {kind: share for kind, share in (("plain", 1 - rare), ("r1", rare)) if share}


FUSED, LIGHT, HEUN = {"fused": True}, {"d_kind": "light"}, {"projection": "heun"}
CASES = {
    "euler_exact": Case("Euler, the paper's D, two passes over the fakes"),
    "euler_fused": Case("Euler, the paper's D, one pass over the fakes", FUSED),
    "euler_light": Case("Euler, the light D, the quickstart's", LIGHT),
    "heun_exact": Case("Heun, the paper's D", HEUN),
    "euler_naive": Case("Euler, the denoiser evaluated again for the projection and for D, R1 at every step",
                        {"r1_every": 1}, naive=True),
    "euler_light_fused": Case("Euler, the light D, one pass over the fakes", LIGHT | FUSED),
    "heun_fused": Case("Heun, the paper's D, one pass over the fakes", HEUN | FUSED),
    "euler_r1": Case("Euler, the paper's D, R1 at every step", {"r1_every": 1}),
    "euler_narrow": Case(f"Euler, the paper's D at width {NARROW_WIDTH:g}", {"d_width": NARROW_WIDTH}),
    "euler_half": Case("Euler, D of half the paper's width", {"d_width": 0.5}),
    "euler_bf16": Case("Euler, the paper's D in bfloat16", {"d_precision": "bf16"}),
}  # fmt: skip
DEFAULT = list(CASES)[:8]


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
