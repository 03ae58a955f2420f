"""Has Snakemake do the jobs that are not done yet, on this machine or on a cluster."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .jobs import Job, chain, write_plan

HERE = Path(__file__).parent


def workflow(
    goals: Sequence[Job], out: Path, name: str, resources: Callable[[Job], dict],
    native: Sequence[str], slurm: bool = False, jobs: int = 1,
) -> int:  # fmt: skip
    """Does what is still to be done for the jobs `goals`; returns Snakemake's exit status.

    resources   what a scheduler is told about a job
    native      options of Snakemake's
    jobs        so many at a time, where it is not Slurm that decides
    """
    pending, total = chain(goals, pending=True), len(chain(goals))
    print(f"{len(goals)} results, {total} jobs, {len(pending)} to do; in {out}", file=sys.stderr)
    if not pending:
        return 0
    for job in pending:
        job.marker.unlink(missing_ok=True)  # of an output that is gone
    plan = write_plan(out, name, pending, resources, 0 if slurm or native else jobs)
    where = ["--profile", str(HERE / "slurm")] if slurm else ["--cores", str(jobs)]
    command = [
        sys.executable, "-m", "snakemake", "--snakefile", str(HERE / "Snakefile"),
        "--directory", str(out), "--config", f"plan={plan.relative_to(out)}",  # is read as YAML: no path of the user's
        # The keys in the folders' names say what is to be run again. Each job locks its own folder.
        "--rerun-triggers", "mtime", "--ignore-incomplete", "--nolock", "--keep-going",
        "--scheduler", "greedy", "--quiet", "host", "reason", *where, *native,
    ]  # fmt: skip
    stopped, group = [], []

    def stop(*_: object) -> None:
        """Ctrl-C, or SIGTERM: ends snakemake and the running commands, once they are known.

        It raises nothing: an exception while snakemake is being started would lose its process.
        """
        stopped.append(True)
        while group:  # once: a second signal would interrupt a command that is about to end
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group.pop(), signal.SIGINT)

    # Set before it starts: a shell that starts us in the background has SIGINT ignored, and a child
    # would inherit that.
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(command, process_group=0)
        group.append(process.pid)
        if stopped:
            stop()
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stopped:
        print("stopped; all that is done is kept, and the same command continues", file=sys.stderr)
        return 130
    return status
