"""What run/sweep.sh does: the jobs, and what their scores say."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from ogdm_core.cli import errors_in_one_line
from ogdm_core.diffusers.model import check_model
from run.evaluate.features import check_features
from run.launch import module
from run.presets import EXPERIMENTS
from run.quickstart.flags import to_argv, trainer_flags
from run.quickstart.score import classifier_path, ensure_classifier
from run.sweep import report
from run.sweep.flags import Arm, parse
from run.tables.jobs import Job, chain
from run.tables.workflow import workflow


def score_job(args: argparse.Namespace, arm: Arm, net: dict[str, str | Path]) -> Job:
    """The job that leaves the FIDs of one fine-tune in a net's features; it needs the job that trains."""
    data, model = (
        str(Path(name).absolute()) if Path(name).exists() and name not in EXPERIMENTS else name
        for name in (args.data, args.model)
    )
    finetune, ogdm = args.experiment["finetune"], trainer_flags(arm.config) if arm.config else {}
    steps, scoring = {"steps": args.steps, "seed": arm.seed}, {"samples": args.samples, "cells": args.cells}
    words = to_argv({"data": data, "model": model} | steps | finetune | ogdm)
    train = Job(
        arm.name, "train", args.out, steps | {"finetune": finetune, "ogdm": arm.config and arm.config.to_dict()},
        lambda folder: module("ogdm_core.diffusers", *words, "--output", folder), "unet",
        inputs=(f"{model}/unet/diffusion_pytorch_model.safetensors", data),
    )  # fmt: skip
    score_words = to_argv({"data": data} | net | scoring)
    named = {"features": args.features} if args.features else {}
    return Job(
        arm.name, "score", args.out, scoring | named,
        lambda folder: module("run.quickstart.score", train.folder, *score_words, "--output", folder / "scores.json"),
        "scores.json", needs=(train,), inputs=() if named else tuple(map(str, net.values())),
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 all done, 1 some fine-tunes failed, 2 nothing was started, 130 Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    with errors_in_one_line():
        check_model(args.model)
        if not args.dry_run:
            args.out.mkdir(parents=True, exist_ok=True)
        if args.features or args.weights:
            check_features(args.features, args.weights)
            net = {"features": args.features} if args.features else {"weights": args.weights.absolute()}
        else:
            find = classifier_path if args.dry_run else ensure_classifier
            net = {"classifier": (args.classifier or find(args.out, args.data)).absolute()}
    jobs = [score_job(args, arm, net) for arm in args.arms]
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
    results = report.collect(args, zip(args.arms, jobs, strict=True), command)
    if not results["rows"]:
        print("error: no control has been scored yet; nothing to compare with", file=sys.stderr)
        return status or 1
    print(report.to_markdown(results))
    for path in report.write(results, args.out):
        print(path)
    return status


if __name__ == "__main__":
    sys.exit(main())
