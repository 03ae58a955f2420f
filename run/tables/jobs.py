"""Jobs: a command that makes one thing, in a folder that carries the job's key in its name.

A job's key is a hash of its settings, of the files it was given from outside, and of the keys of
the jobs it needs. So a changed setting makes a new folder for what depends on it, and changing it
back finds the old one. `training_settings` says which settings a training's key has.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ogdm_core.files import write_text
from run import backbones
from run.launch import Command, Engine
from run.presets import Preset

WHOLE = 1 << 26  # files up to 64 MiB are hashed whole, of longer ones 64 pieces of 1 MiB


@dataclass(frozen=True, eq=False)
class Job:
    """A command that makes one thing, `output`."""

    row: str  # as in cifar10-adm-baseline, or cifar10-adm-baseline.euler-10
    kind: str  # data | weights | train | guide | sample | score
    out: Path
    settings: Mapping[str, Any]
    build: Callable[[Path], Command | None]  # the command for a folder; None: nothing is to be done
    output_name: str  # a path in its folder, or an absolute one
    output_glob: str = ""  # glob in its folder: the newest match gets a link called `output_name`
    needs: tuple[Job, ...] = ()
    inputs: tuple[str, ...] = ()  # files from outside, or URLs
    preset: Preset | None = None  # of a training or a sampling, as it is run
    nfe: int = 0
    engine: Engine | None = None
    seed: int | None = None  # to be shown, where there are several

    @property
    def name(self) -> str:
        return f"{self.row}.{self.kind}"

    @cached_property
    def key(self) -> str:
        """sha256 over all that the result depends on."""
        settings = {name: str(value) for name, value in self.settings.items()}
        inputs, needs = [fingerprint(path) for path in self.inputs], [job.key for job in self.needs]
        content = json.dumps([self.name, settings, inputs, needs], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def folder(self) -> Path:
        return self.out / "stages" / f"{self.name}-{self.key[:10]}"

    @property
    def output(self) -> Path:
        return self.folder / self.output_name

    @property
    def marker(self) -> Path:
        return self.folder / "done.json"

    def record(self) -> dict | None:
        """What is known of a finished job; None if it is not done, or its output is gone."""
        record = read_json(self.marker) if self.output.exists() and not self.damaged() else {}
        # An output outside of the folder is not in the key: what is there may be another's. Folders
        # may be moved.
        own = not os.path.isabs(self.output_name) or record.get("output") == str(self.output)
        return record if record and own else None

    def damaged(self) -> bool:
        """Whether the job was done, and its scores cannot be read since."""
        there = self.output_name.endswith(".json") and self.marker.exists() and self.output.exists()
        return there and not read_json(self.output)

    def state(self) -> dict:
        """What the last attempt left: {"status": "running" | "failed" | "stopped", ...}, or {}."""
        return read_json(self.folder / "state.json")

    def command(self) -> Command | None:
        """What would run now: a training goes on from its own last checkpoint."""
        command = self.build(self.folder)
        if command and self.kind == "train" and self.preset:
            return backbones.get(self.preset.backbone).resumed(command, self.folder)
        return command

    def to_json(self) -> dict:
        """All that run.tables.worker needs to run it."""
        command = self.build(self.folder)
        return {
            "name": self.name, "kind": self.kind, "key": self.key, "folder": str(self.folder),
            "command": command and asdict(command), "needs": [j.folder.name for j in self.needs],
            "settings": {name: str(value) for name, value in self.settings.items()},
            "inputs": list(self.inputs), "output": str(self.output), "output_glob": self.output_glob,
            "backbone": self.preset.backbone if self.preset else "",
            "seed": "" if self.seed is None else f", seed {self.seed}",
            "engine": self.engine and asdict(self.engine),
        }  # fmt: skip


def training_settings(
    command: Command, preset: Preset, scale: str, seed: int, changed: Mapping[str, Any]
) -> dict[str, Any]:
    """Which settings make a new training: every flag of the trainer's command (data set, network, steps, rates, OGDM's
    settings), whatever --set changes, the whole batch, the scale, and the seed, also where the trainer takes none.

    Not among them: paths, numbers of processes and how often is saved (the backbone's `not_in_key`), the folder of this
    repository, and the version of the code. Another disk or more GPUs train nothing again. Weights that a training
    starts from, and config files, are in its key by their content.
    """
    flags = command.settings(backbones.get(preset.backbone).not_in_key)
    return flags | {"batch": preset.batch, "scale": scale, "seed": seed} | dict(changed)


def chain(jobs: Iterable[Job], pending: bool = False) -> list[Job]:
    """The jobs and all they need, each once, needs first; `pending` leaves out those that are done,
    and whatever only they depended on."""
    ordered: dict[str, Job] = {}

    def visit(job: Job) -> None:
        if job.key in ordered or (pending and job.record()):
            return
        for need in job.needs:
            visit(need)
        ordered[job.key] = job

    for job in jobs:
        visit(job)
    return list(ordered.values())


def fingerprint(path: str) -> str:
    """A hash of a file's content; an URL or a path where nothing is stands for itself."""
    file = Path(path)
    if not file.is_file():
        return path
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as f:
        if size <= WHOLE:
            digest.update(f.read())
        else:
            for i in range(64):
                f.seek(i * (size - (1 << 20)) // 63)
                digest.update(f.read(1 << 20))
    return digest.hexdigest()


def read_json(file: Path) -> dict:
    """What the file holds; {} where it is absent, or damaged by a disk or a machine that failed."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_plan(out: Path, name: str, pending: list[Job], resources: Callable[[Job], dict], at_a_time: int = 0) -> Path:
    """Writes what the Snakefile reads: every job that is to be done; returns the file.

    at_a_time   how many run side by side, 0 if that is not known
    Its name ends in a hash of it: jobs that wait in a cluster's queue find the plan they belong to.
    """
    jobs = {job.folder.name: job.to_json() | {"resources": resources(job)} for job in pending}
    for job in jobs.values():
        job["needs"] = [need for need in job["needs"] if need in jobs]
    plan = {"name": name, "at_a_time": at_a_time, "jobs": jobs}
    text = json.dumps(plan, indent=1, default=str) + "\n"
    path = out / "plans" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.json"
    write_text(path, text)
    return path
