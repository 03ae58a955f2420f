"""What a run takes: images, evaluations and disk for `--plan`, and what a scheduler is told about a job."""

from collections.abc import Callable
from typing import Any

from . import check
from .jobs import Job, chain
from .rows import Options, Row

# (minutes, MB of memory per process)
LIMITS = {"data": (240, 8_000), "weights": (60, 8_000), "train": (7 * 1440, 24_000),
          "guide": (480, 24_000), "sample": (1440, 24_000), "score": (240, 48_000)}  # fmt: skip


def resources(options: Options) -> Callable[[Job], dict[str, Any]]:
    """What a scheduler is told about a job; `runtime` is in minutes, --time-limit's where it is given."""
    small = options.scale.small

    def of(job: Job) -> dict[str, Any]:
        processes, nodes = (job.engine.gpus, job.engine.nodes) if job.engine else (1, 1)
        each = 1 if nodes > 1 else processes  # the processes of one task; see below
        minutes, memory = LIMITS[job.kind]
        found: dict[str, Any] = {
            "cpus_per_task": each * (max(1, options.engine.threads) if small else 8),
            "mem_mb": (2_000 if small else memory) * processes // nodes,
            "runtime": options.time_limit or minutes,
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


def print_plan(options: Options, rows: list[Row]) -> None:
    """What is left to do, per row, and what --checkpoint would save.

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
    print(f"Left to do for Table {options.number}, {options.engine.gpus} process(es) per command")
    line = "{:<34} {:>16} {:>14} {:>12}".format
    print(line("row", "trains on", "samples", "evaluations"))
    seen: set[str] = set()
    for row in rows:
        jobs = [job for job in row.chain(pending=True) if job.key not in seen]
        seen |= {job.key for job in jobs}
        images = sum(job.preset.images for job in jobs if job.kind == "train")
        cells = [job.nfe for job in jobs if job.kind == "sample"]
        print(line(row.name, f"{images / 1e6:g}M images" if images else "–", f"{len(cells)} x {options.samples:,}",
                   f"{options.samples * sum(cells) / 1e6:g}M"))  # fmt: skip
        for job in jobs:
            if job.kind == "train" and job.row != row.preset.name:
                print(f"    with the training of {job.row}")
    parts = ", ".join(f"{name} {size:.0f}" for name, size in disk.items())
    print(f"disk: {sum(disk.values()):.0f} GB in all, done or not ({parts})")
    for job in (job for job in left if job.kind == "train"):
        print(f"--checkpoint {job.row}=PATH would save the training: {job.preset.images / 1e6:g}M images")
