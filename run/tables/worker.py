"""Runs one job of a plan: `python -m run.tables.worker PLAN JOB`. The Snakefile's rules call it.

In the job's folder are `job.log` (the command and all it prints), `done.json` once it is done (with
command, versions, commit and seconds), and `state.json` until then. A training goes on from its own
last checkpoint. One process at a time works in a folder; a second one waits, and finds it done.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from ogdm_core.files import write_json
from ogdm_core.progress import duration
from run.lock import exclusive
from run.provenance import commit, versions
from run.train.commands import Command, Engine, newest, resumed, steps_left

from .jobs import read_json

PACKAGES = ("torch", "numpy", "scipy", "pytorch-lightning", "mpi4py", "torch-fidelity", "snakemake")
# Snakemake has started us by srun, as one task. Seeing Slurm, mpiexec would call srun for its
# processes, and wait for resources that we hold; Lightning would expect one task per GPU.
IN_SLURM = {"adm": {"HYDRA_LAUNCHER": "fork"}, "ldm": {"SLURM_JOB_NAME": "interactive"}}
LOG = "job.log"  # upstreams call theirs log.txt, and some empty it first
GRACE = 15  # seconds that a command gets to end after each signal
SCRAP = "images"  # folder of the images as single files, which the npz holds as well


class Failed(Exception):
    """The job cannot be done; its text says why."""


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 once the job is done, by this process or by another one."""
    file, name = argv or sys.argv[1:]
    plan = json.loads(Path(file).read_text())
    job = plan["jobs"][name]
    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as a cluster ends a job
    # The command inherits the lock: where this process is killed, and not the command, a second
    # attempt waits for its end.
    with exclusive(folder / ".lock", f"doing {name}") as lock:
        if (folder / "done.json").exists():
            return 0
        try:
            run(job, folder, lock)
        except (Failed, OSError) as error:
            reason = f"{error}; see {folder / LOG}"
            note(folder, status="failed", reason=reason)
            print(f"error: {name}: {reason}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            note(folder, status="stopped", reason="stopped by a signal")
            return 130
    if seconds := seconds_left(plan):
        print(f"about {duration(seconds)} left", file=sys.stderr)
    return 0


def seconds_left(plan: dict[str, Any]) -> float:
    """By the mean time of each kind's jobs so far; 0 where a kind has none, or nothing is left."""
    times: dict[str, list[float]] = {}
    left = []
    for job in plan["jobs"].values():
        if record := read_json(Path(job["folder"]) / "done.json"):
            times.setdefault(job["kind"], []).append(record.get("seconds", 0.0))
        else:
            left.append(job["kind"])
    if not plan.get("at_a_time") or not set(left) <= times.keys():
        return 0.0
    return sum(fmean(times[kind]) for kind in left) / plan["at_a_time"]


def run(job: dict[str, Any], folder: Path, lock: int) -> None:
    """Runs the job's command and leaves done.json; raises Failed."""
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    command = command_of(job, folder)
    note(folder, status="running", host=socket.gethostname(), since=started)
    if command and (status := call(command, folder / LOG, lock)):
        raise Failed(f"exit status {status}")
    training = command and job["kind"] == "train"
    if training and (left := steps_left(command, job["backbone"], folder)) > 0:
        raise Failed(f"the training was ended {left} steps early; the same command continues it")
    output = Path(job["output"])
    if job["found"]:
        made = newest(folder, job["found"])
        if made is None:
            raise Failed(f"the command ended well, but made no {job['found']}")
        output.unlink(missing_ok=True)
        output.symlink_to(made.relative_to(folder))
    if not output.exists():
        raise Failed(f"the command ended well, but made no {output}")
    if job["kind"] == "sample":
        shutil.rmtree(folder / SCRAP, ignore_errors=True)
    record = {name: job[name] for name in ("name", "kind", "key", "settings", "inputs", "output")}
    seconds = round(time.monotonic() - began, 2)
    record |= {"command": str(command or ""), "started": started, "seconds": seconds}
    record |= {"commit": commit(), "versions": versions(PACKAGES)}
    write_json(folder / "done.json", record)
    (folder / "state.json").unlink(missing_ok=True)


def command_of(job: dict[str, Any], folder: Path) -> Command | None:
    """The job's command on these nodes, from its last checkpoint; None: nothing is to be done."""
    if job["command"] is None:
        return None
    command = Command(**job["command"])
    if job["engine"] and job["engine"]["nodes"] > 1:  # their names are known only now
        command = replace(command, launcher=Engine(**job["engine"]).launcher(job["backbone"]))
    elif "SLURM_JOB_ID" in os.environ:
        command = replace(command, env={**command.env, **IN_SLURM.get(job["backbone"], {})})
    training = job["kind"] == "train" and job["backbone"]  # ogdm_core.diffusers continues by itself
    return resumed(command, job["backbone"], folder) if training else command


def call(command: Command, log: Path, lock: int) -> int:
    """Runs a command with all its output in the log; ends it if this process is to end."""
    with log.open("ab", buffering=0) as file:
        file.write(f"\n$ {command}\n".encode())
        process = subprocess.Popen(
            command.argv, cwd=command.cwd, env=os.environ | dict(command.env), stdout=file,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, pass_fds=(lock,),
        )  # fmt: skip
        try:
            return process.wait()
        except KeyboardInterrupt:
            # It has mostly got the same signal, as one of our process group. A second one would
            # interrupt torchrun while it ends its workers, and leave them running. What is
            # there after a while is ended with its children: one of them would keep the lock.
            for end in (0, signal.SIGTERM, signal.SIGKILL):
                for pid in family(process.pid) if end else ():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, end)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
                    break
            raise


def family(pid: int) -> list[int]:
    """The ids of the process and of all its descendants; none if it has ended."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(one.pid for one in psutil.Process(pid).children(recursive=True))]
    return []


def note(folder: Path, **state: str) -> None:
    """What the table says about a job that is not done."""
    write_json(folder / "state.json", state)


if __name__ == "__main__":
    sys.exit(main())
