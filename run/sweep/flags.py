"""Fine-tunes one diffusers model over a grid of OGDM's settings and compares FID with a plain
fine-tune (the control) of the same length and seed.

    run/sweep.sh --set k=0.2,0.4 --set rho=5,20

writes sweep.json, sweep.md and sweep.png. k and rho are swept unless --ogdm-k or --ogdm-rho
gives one value. Settings that are not swept are the trainer's, or what the --ogdm- flags say.
Options after -- are Snakemake's.
"""

import argparse
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ogdm_core import cli, flags
from ogdm_core.config import OGDMConfig, recipe
from run.quickstart.flags import experiment_of

PROGRAM = "run/sweep.sh"
DATA = "digits"
GRID = {"k": "0.1,0.2,0.4,0.6", "rho": "2,5,20,60"}
CELLS = "euler-5,euler-10,s-pndm-10"


@dataclass(frozen=True)
class Arm:
    """One fine-tune: the values of the swept settings, none for the control."""

    values: dict[str, str]
    config: OGDMConfig | None
    seed: int

    @property
    def name(self) -> str:
        words = [f"{name}{value}" for name, value in self.values.items()] or ["control"]
        return re.sub(r"[^\w.-]", "_", "-".join([*words, f"seed{self.seed}"]))


def combinations(grid: dict[str, list[str]]) -> list[dict[str, str]]:
    """Every combination of the settings' values."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Every flag, with the defaults that hold beside the flags in `argv`."""
    experiment = experiment_of(argv, PROGRAM, DATA)
    p = cli.Parser(prog=PROGRAM, description=__doc__)
    add, count = p.add_argument, cli.number(int, 1)
    words = f"values of a setting, as in --ogdm-NAME (default: {' '.join(f'{n}={v}' for n, v in GRID.items())})"
    add("--set", action="append", default=[], metavar="NAME=V1,V2", help=words)
    words = "samplers and their NFEs (default: %(default)s)"
    add("--cells", type=lambda text: cli.cells(text) and text, default=CELLS, metavar="SAMPLER-NFE,...", help=words)
    words = "folder in diffusers' format (default: the quickstart's baseline for --data)"
    add("--model", default=str(experiment["model"]), help=words)
    add("--data", default=DATA, help="digits, mnist, an .npz or a folder (default: %(default)s)")
    add("--classifier", type=Path, help="its features give FID (default: one that is trained here)")
    add("--features", metavar="NET", help="a feature net in its place, one of those that run/evaluate.sh takes")
    add("--weights", type=Path, metavar="FILE", help="Inception's weights, likewise")
    add("--steps", type=count, default=2000, help="steps of each fine-tune (default: %(default)s)")
    words = "images per sampler and NFE (default: %(default)s)"
    add("--samples", type=cli.number(int, 100), default=2500, help=words)
    words = "seeds; each has its own control (default: 0)"
    add("--seeds", type=cli.numbers(int, 0, 2**31), default=[0], metavar="0,1,...", help=words)
    add("--jobs", type=count, default=1, help="fine-tunes side by side (default: %(default)s)")
    add("--slurm", action="store_true", help="submit the jobs to Slurm")
    words = "GPUs that each job asks Slurm for (default: %(default)s)"
    add("--gpus", type=cli.number(int, 0, 2), default=0, help=words)
    add("--out", type=Path, default=Path("out/sweep"), help="folder to write (default: %(default)s)")
    add("--dry-run", action="store_true", help="print every command, run nothing")
    flags.add_arguments(p, "diffusers", switch=False)
    for action in p._actions:
        if (name := action.dest.removeprefix("ogdm_")) in GRID:
            action.help = f"one value, which is not swept (default: swept over {GRID[name]})"
    return p


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags; `native` holds Snakemake's, `grid` the swept values and `arms` the fine-tunes, controls first."""
    cut = argv.index("--") if "--" in argv else len(argv)
    p = parser(argv[:cut])
    args = p.parse_args(argv[:cut])
    args.native, args.out = argv[cut + 1 :], args.out.absolute()
    args.experiment = experiment_of(argv[:cut], PROGRAM, DATA)
    given = {name.partition("_")[2]: value for name, value in vars(args).items() if name.startswith("ogdm_")}
    settings = {name: value for name, value in given.items() if value is not None}
    swept = {name: str(settings.get(name, values)) for name, values in GRID.items()}
    if settings.get("gamma", recipe(settings.get("recipe") or "default").get("gamma")) is not None:
        del swept["rho"]  # which a fixed gamma replaces
    for text in args.set:
        name, equals, values = text.partition("=")
        if not (name and equals and values):
            p.error(f"--set: {text!r} is not NAME=V1,V2")
        swept[name.removeprefix("ogdm_").replace("-", "_")] = values
    if "gamma" in swept and "rho" in swept:
        del swept["rho"]
    args.grid = {name: list(dict.fromkeys(values.split(","))) for name, values in swept.items()}
    args.arms = [Arm({}, None, seed) for seed in args.seeds]
    for chosen in combinations(args.grid):
        try:
            config = OGDMConfig.from_mapping(settings | chosen, "diffusers")
        except ValueError as error:
            p.error(f"--set: {error}")
        args.arms += [Arm(chosen, config, seed) for seed in args.seeds]
    return args
