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

import psutil

from ogdm_core.files import write_json
from ogdm_core.lock import exclusive
from run import backbones
from run.launch import Command, Engine, newest
from run.provenance import commit, versions

from .jobs import read_json

PACKAGES = ("torch", "numpy", "scipy", "pytorch-lightning", "mpi4py", "torch-fidelity", "snakemake")
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
        print(f"about {seconds / 60:.0f} min left", file=sys.stderr)
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
    backbone = backbones.get(job["backbone"]) if job["kind"] == "train" and job["backbone"] else None
    if command and backbone and (left := backbone.steps_left(command, folder)) > 0:
        raise Failed(f"the training was ended {left} steps early; the same command continues it")
    output = Path(job["output"])
    if job["output_glob"]:
        made = newest(folder, job["output_glob"])
        if made is None:
            raise Failed(f"the command ended well, but made no {job['output_glob']}")
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
    if not job["backbone"]:  # our own trainer continues by itself
        return command
    backbone = backbones.get(job["backbone"])
    if job["engine"] and job["engine"]["nodes"] > 1:  # their names are known only now
        command = replace(command, launcher=backbone.launcher(Engine(**job["engine"])))
    elif "SLURM_JOB_ID" in os.environ:
        command = replace(command, env={**command.env, **backbone.in_slurm})
    return backbone.resumed(command, folder) if job["kind"] == "train" else command


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
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(one.pid for one in psutil.Process(pid).children(recursive=True))]
    return []


def note(folder: Path, **state: str) -> None:
    """What the table says about a job that is not done."""
    write_json(folder / "state.json", state)


if __name__ == "__main__":
    sys.exit(main())
