"""Fine-tunes one diffusers model over a grid of OGDM's settings and compares FID with a plain
fine-tune (the control) of the same length and seed.

    run/sweep.sh --set k=0.1,0.2 --set gamma=0.01,0.025

writes sweep.json, sweep.md and sweep.png. Settings that are not swept are the quickstart's (t_max
0.7, the light discriminator, fused), or what the --ogdm- flags say. What follows -- is Snakemake's.
"""

import argparse
import itertools
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from ogdm_core import cli, flags
from ogdm_core.config import OGDMConfig
from run.quickstart.settings import EXPERIMENTS, experiment_of, fill_in
from run.tables.jobs import Job, chain, module
from run.tables.workflow import workflow

GRID = {"k": "0.05,0.1,0.2,0.35", "gamma": "0.005,0.01,0.025,0.06"}
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


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[Arm]]:
    """The flags, with Snakemake's as `native`, and the fine-tunes, controls first."""
    cut = argv.index("--") if "--" in argv else len(argv)
    p = cli.Parser(prog="run/sweep.sh", description=__doc__)
    add, count = p.add_argument, cli.number(int, 1)
    add("--set", action="append", default=[], metavar="NAME=V1,V2", help="values of a setting, as "
        f"in --ogdm-NAME (default: {' '.join(f'{n}={v}' for n, v in GRID.items())})")  # fmt: skip
    add("--cells", type=lambda text: cli.cells(text) and text, default=CELLS,
        metavar="SAMPLER-NFE,...", help=f"(default: {CELLS})")  # fmt: skip
    add("--model", default=str(EXPERIMENTS["digits"].shipped), help="folder in diffusers' format "
        "(default: the quickstart's baseline)")  # fmt: skip
    add("--data", default="digits", help="digits, mnist, an .npz or a folder (default: digits)")
    add("--classifier", type=Path, help="whose features FID is taken in (default: trained here)")
    add("--steps", type=count, default=2000, help="of each fine-tune (default: 2000)")
    add("--samples", type=cli.number(int, 100), default=2500, help="images per sampler and NFE "
        "(default: 2500)")  # fmt: skip
    add("--seeds", type=cli.numbers(int, 0, 2**31), default=[0], metavar="0,1,...",
        help="(default: 0)")  # fmt: skip
    add("--jobs", type=count, default=1, help="fine-tunes side by side (default: 1)")
    add("--slurm", action="store_true", help="submit the jobs to Slurm")
    add("--gpus", type=cli.number(int, 0, 2), default=0, help="GPUs that each job asks Slurm for")
    add("--out", type=Path, default=Path("out/sweep"), help="folder to write (default: out/sweep)")
    add("--dry-run", action="store_true", help="print every command, run nothing")
    flags.add_arguments(p, "diffusers")
    args = p.parse_args(argv[:cut])
    fill_in(args)
    args.native, args.out = argv[cut + 1 :], args.out.absolute()
    given = dict(GRID)
    for name in GRID:  # a value that its own flag gives is not swept
        if any(word.startswith((f"--ogdm-{name}", f"--ogdm_{name}")) for word in argv[:cut]):
            given[name] = str(getattr(args, f"ogdm_{name}"))
    for text in args.set:
        name, equals, values = text.partition("=")
        if not (name and equals and values):
            p.error(f"--set: {text!r} is not NAME=V1,V2")
        given[name.removeprefix("ogdm_").replace("-", "_")] = values
    args.grid = {name: list(dict.fromkeys(text.split(","))) for name, text in given.items()}
    arms = [Arm({}, None, seed) for seed in args.seeds]
    for values in itertools.product(*args.grid.values()):
        chosen = dict(zip(args.grid, values, strict=True))
        settings = {n: v for n, v in vars(args).items() if n.startswith("ogdm_") and v is not None}
        settings = {n.removeprefix("ogdm_"): v for n, v in settings.items()} | chosen
        try:
            config = OGDMConfig.from_mapping(settings, "diffusers")
        except ValueError as error:
            p.error(f"--set: {error}")
        arms += [Arm(chosen, config, seed) for seed in args.seeds]
    return args, arms


def score_job(args: argparse.Namespace, arm: Arm, classifier: Path) -> Job:
    """The job that leaves the FIDs of one fine-tune; it needs the job that trains."""
    data, model = (
        str(Path(name).absolute()) if Path(name).exists() and name not in EXPERIMENTS else name
        for name in (args.data, args.model)
    )
    ogdm, finetune = flags.to_argv(arm.config) if arm.config else [], experiment_of(args).finetune
    train_words = ["--data", data, "--model", model, "--steps", args.steps, "--seed", arm.seed,
                   *finetune.split(), *ogdm]  # fmt: skip
    score_words = ["--data", data, "--samples", args.samples, "--cells", args.cells,
                   "--classifier", classifier]  # fmt: skip
    train = Job(
        arm.name, "train", args.out,
        {"steps": args.steps, "seed": arm.seed, "finetune": finetune,
         "ogdm": arm.config and arm.config.to_dict()},
        lambda folder: module("ogdm_core.diffusers", *train_words, "--output", folder),
        "unet", inputs=(f"{model}/unet/diffusion_pytorch_model.safetensors", data),
    )  # fmt: skip
    return Job(
        arm.name, "score", args.out, {"samples": args.samples, "cells": args.cells},
        lambda folder: module("run.quickstart.score", train.folder, *score_words,
                              "--output", folder / "scores.json"),
        "scores.json", needs=(train,), inputs=(str(classifier),),
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 all done, 1 some fine-tunes failed, 2 nothing was started, 130 Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    args, arms = parse(argv)
    with cli.errors_in_one_line():
        from ogdm_core.diffusers.train import check_model
        from run.quickstart.score import classifier_path, ensure_classifier

        from . import report

        check_model(args.model)
        args.out.mkdir(parents=True, exist_ok=True)
        find = classifier_path if args.dry_run else ensure_classifier
        classifier = (args.classifier or find(args.out, args.data)).absolute()
    jobs = [score_job(args, arm, classifier) for arm in arms]
    if args.dry_run:
        for job in chain(jobs):
            print(f"# {job.name}{' (done)' if job.record() else ''}\n{job.command()}")
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"  # these networks gain nothing from more
    resources = {"cpus_per_task": 1, "mem_mb": 4_000, "runtime": 240}
    resources |= {"gpu": args.gpus} if args.gpus else {}
    status = workflow(jobs, args.out, "sweep", lambda job: resources, args.native, args.slurm,
                      args.jobs)  # fmt: skip
    command = shlex.join(["run/sweep.sh", *argv])
    results = report.collect(args, zip(arms, jobs, strict=True), command)
    if not results["rows"]:
        print("error: no control has been scored yet; nothing to compare with", file=sys.stderr)
        return status or 1
    print(report.to_markdown(results))
    for path in report.write(results, args.out):
        print(path)
    return status


if __name__ == "__main__":
    sys.exit(main())
