"""What a run costs: images, evaluations, disk, and hours from a few steps timed on this machine.

`--plan` starts run.tables.measure for each network, since each codebase brings modules that the
others must not see, and keeps the times: a scheduler is told how long a job will take.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from ogdm_core.files import write_json
from ogdm_core.progress import duration
from run.train import commands

from . import check
from .jobs import Job, chain, module, read_json
from .rows import Options, Row

# (minutes of jobs that were not timed, MB of memory per process)
LIMITS = {"data": (240, 8_000), "weights": (60, 8_000), "train": (7 * 1440, 24_000),
          "guide": (480, 24_000), "sample": (1440, 24_000), "score": (240, 48_000)}  # fmt: skip
TIMES = "measured.json"


def resources(options: Options) -> Callable[[Job], dict[str, Any]]:
    """What a scheduler is told about a job; `runtime` is in minutes."""
    times, small = read_json(options.out / TIMES), options.scale.small

    def of(job: Job) -> dict[str, Any]:
        processes, nodes = (job.engine.gpus, job.engine.nodes) if job.engine else (1, 1)
        each = 1 if nodes > 1 else processes  # the processes of one task; see below
        seconds, (minutes, memory) = job_seconds(options, job, times), LIMITS[job.kind]
        found: dict[str, Any] = {
            "cpus_per_task": each * (max(1, options.engine.threads) if small else 8),
            "mem_mb": (2_000 if small else memory) * processes // nodes,
            "runtime": round(seconds / 60 * 1.5) + 60 if seconds else minutes,
            "nodes": nodes,
        }
        if job.kind != "data" and not small:
            found["gpu"] = processes
        if nodes > 1:  # a task per process, and snakemake leaves starting them to the command
            several = processes > nodes
            found |= {"tasks_per_node": processes // nodes} if several else {"tasks": nodes}
            found["mpi"] = "srun"
        return found

    return of


# ---- multiplying out ----------------------------------------------------------------------------


def job_seconds(options: Options, job: Job, times: dict[str, Any]) -> float:
    """Estimated seconds of a training or a sampling; 0 if its network was not timed.

    On a CPU no more processes run side by side than there are cores for.
    """
    if job.kind not in ("train", "sample") or not job.preset or not job.engine:
        return 0.0
    step = times.get(job.preset.network)
    if not isinstance(step, dict):
        return 0.0
    ranks = job.engine.gpus
    if step["device"] == "cpu":
        ranks = min(ranks, max(1, (os.cpu_count() or 1) // step["threads"]))
    if job.kind == "train":
        image = step["train"].get(job.preset.projection or "none", 0.0) + step["encode"]
        return job.preset.images * image / ranks
    return options.samples * (job.nfe * step["evaluate"] + step["decode"]) / ranks


def times_of(options: Options, jobs: list[Job]) -> dict[str, Any]:
    """Times every network that these jobs have, {network: times, or a text why not}; keeps them."""
    wanted: dict[str, tuple[Any, set[str]]] = {}
    for job in jobs:
        if job.preset:
            _, projections = wanted.setdefault(job.preset.network, (job.preset, set()))
            projections |= {job.preset.projection or "none"} if job.kind == "train" else set()
    times = {}
    for network, (preset, projections) in wanted.items():
        print(f"timing a few steps of {network}'s network", file=sys.stderr)
        times[network] = _times(options, preset, projections)
    if times:
        write_json(options.out / TIMES, times)
    return times


def _times(options: Options, preset: Any, projections: set[str]) -> dict | str:
    home = options.engine.third_party
    if problem := commands.not_ready(preset.backbone, home):
        return f"not timed: {problem}"
    command = module("run.tables.measure", preset.name, home, ",".join(sorted(projections)))
    done = subprocess.run(command.argv, env=os.environ | dict(command.env), capture_output=True,
                          text=True)  # fmt: skip
    if done.returncode:
        return f"not timed: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
    return json.loads(done.stdout.strip().splitlines()[-1])


def print_plan(options: Options, rows: list[Row]) -> None:
    """What is left to do, per row, what --checkpoint would save, and how the hours were found.

    A training that several rows share is counted for the first of them.
    """
    goals = [job for row in rows for job in row.scores.values()]
    left, disk = chain(goals, pending=True), check.disk_gb(options, rows)
    if options.scale.small:
        trainings = sum(job.kind == "train" for job in left)
        print(f"{options.scale.name} run: {len(left)} of {len(chain(goals))} commands left, "
              f"{trainings} of them trainings, {options.jobs} at a time; "
              f"{sum(disk.values()):.0f} GB at most")  # fmt: skip
        return
    times = times_of(options, left)
    print(f"Left to do for Table {options.number}, {options.engine.gpus} process(es) per command")
    line = "{:<34} {:>16} {:>14} {:>12} {:>10} {:>10}".format
    print(line("row", "trains on", "samples", "evaluations", "training", "sampling"))
    seen: set[str] = set()
    totals = {"train": 0.0, "sample": 0.0}
    for row in rows:
        jobs = [job for job in row.chain(pending=True) if job.key not in seen]
        seen |= {job.key for job in jobs}
        told = []
        for kind in totals:
            seconds = [job_seconds(options, job, times) for job in jobs if job.kind == kind]
            totals[kind] += sum(seconds)
            told.append("–" if not seconds else duration(sum(seconds)) if all(seconds) else "?")
        images = sum(job.preset.images for job in jobs if job.kind == "train")
        cells = [job.nfe for job in jobs if job.kind == "sample"]
        print(line(row.name, f"{images / 1e6:g}M images" if images else "–",
                   f"{len(cells)} x {options.samples:,}",
                   f"{options.samples * sum(cells) / 1e6:g}M", *told))  # fmt: skip
        for job in jobs:
            if job.kind == "train" and job.row != row.preset.name:
                print(f"    with the training of {job.row}")
    parts = ", ".join(f"{name} {size:.0f}" for name, size in disk.items())
    print(f"disk: {sum(disk.values()):.0f} GB in all, done or not ({parts})")
    if all(isinstance(step, dict) for step in times.values()):
        print(f"time: {duration(totals['train'])} of training, {duration(totals['sample'])} of "
              "sampling; without evaluation and data")  # fmt: skip
    for job in (job for job in left if job.kind == "train"):
        seconds = job_seconds(options, job, times)
        saved = f"{job.preset.images / 1e6:g}M images, {duration(seconds) if seconds else '?'}"
        print(f"--checkpoint {job.row}=PATH would save the training: {saved}")
    for network, step in times.items():
        print(f"{network}: {step if isinstance(step, str) else _told(step)}")


def _told(m: dict) -> str:
    steps = ", ".join(f"{name} {value:.3g} s" for name, value in m["train"].items())
    clock = " (processor time)" if m["device"] == "cpu" else ""
    coder = f"; autoencoder {m['encode']:.3g} s in, {m['decode']:.3g} s out" if m["encode"] else ""
    return (
        f"timed on {m['device']}{clock}, {m['threads']} thread(s), the row's own network "
        f"({m['parameters'] / 1e6:.1f}M parameters), {m['repeats']} steps of batch {m['batch']}, "
        f"scaled by the number of images: an image's evaluation {m['evaluate']:.3g} s; "
        f"its training step {steps or 'not needed'}{coder}"
    )
