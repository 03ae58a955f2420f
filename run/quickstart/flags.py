"""The project's main job on a bare machine: does OGDM beat plain training at few steps?

From one pretrained baseline, two fine-tunes of equal length start: the control (plain loss) and
OGDM. Both see the same images and the same noise. Then both are sampled from the same initial
noise with six samplers at several NFEs, and FID and recall are measured.

    run/quickstart.sh --out out/quickstart

writes results.json, fid_vs_nfe.png, samples.png, trajectory.png and report.html. A run that
was stopped continues with the same command. The defaults below depend on the flags that stand
beside --help: `run/quickstart.sh --data digits --help` prints those for the digits.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ogdm_core import flags
from ogdm_core.cli import Parser, number, numbers
from ogdm_core.config import OGDMConfig
from run.presets import EXPERIMENTS
from run.provenance import cores

PROGRAM = "run/quickstart.sh"
DATA = "mnist"


def experiment_of(argv: Sequence[str], program: str, data: str) -> dict[str, Any]:
    """The experiment of --data in `argv`, whose default is `data`; it decides other flags' defaults.

    Data that is not the quickstart's has the digits' experiment, fine-tuned with the trainer's own defaults.
    """
    p = Parser(prog=program, add_help=False)
    p.add_argument("--data", default=data)
    return EXPERIMENTS.get(p.parse_known_args(argv)[0].data, EXPERIMENTS["digits"] | {"finetune": {}})


def parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Every flag, with the defaults that hold beside the flags in `argv`."""
    experiment = experiment_of(argv, PROGRAM, DATA)
    p = Parser(prog=PROGRAM, description=__doc__)
    add, count = p.add_argument, number(int, 1)
    add("--out", type=Path, default=Path("out/quickstart"), help="folder to write (default: %(default)s)")
    words = "mnist: 16x16; digits: 8x8, half the time (default: %(default)s)"
    add("--data", choices=tuple(EXPERIMENTS), default=DATA, help=words)
    words = "seeds; each has its own pair of fine-tunes (default: 0)"
    add("--seeds", type=numbers(int, 0, 2**31), default=[0], metavar="0,1,...", help=words)
    add("--steps", type=count, default=experiment["steps"], help="steps of each fine-tune (default: %(default)s)")
    words = "steps of the control (default: as many as OGDM's); more of them give it as much time as OGDM took"
    add("--control-steps", type=count, help=words)
    words = "images per sampler and NFE, 100 or more (default: %(default)s)"
    add("--samples", type=number(int, 100), default=experiment["samples"], help=words)
    add("--from-scratch", action="store_true", help="train a new baseline, do not use the shipped one")
    words = "fine-tunes, and cells of a score, side by side (default: %(default)s: one per core, at most 2)"
    add("--jobs", type=count, default=min(2, cores()), help=words)
    flags.add_arguments(p, "diffusers", switch=False)
    return p


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags; `config` holds the settings of the OGDM fine-tune."""
    args = parser(argv).parse_args(argv)
    args.control_steps = args.control_steps or args.steps
    args.config = flags.from_args(args, "diffusers")
    return args


def trainer_flags(config: OGDMConfig) -> dict[str, Any]:
    """The flags of ogdm_core.diffusers that give these settings: those that differ from its defaults."""
    plain = OGDMConfig.from_mapping({}, "diffusers").to_dict()
    differ = {name: value for name, value in config.to_dict().items() if value != plain[name]}
    return {"ogdm": True} | {f"ogdm_{name}": value for name, value in differ.items()}


def to_argv(settings: Mapping[str, Any]) -> list[str]:
    """Flags as words of a command line: {"lr": 1e-4, "anneal": True} gives ["--lr", "0.0001", "--anneal"]."""
    words = []
    for name, value in settings.items():
        value = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        words += [f"--{name.replace('_', '-')}", *([] if value == "True" else [value])]
    return words
