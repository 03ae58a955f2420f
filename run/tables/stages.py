"""One step of an experiment: its commands, what it rests on, and a marker once it is done.

A stage's key is a hash of its settings, of the files it was given from outside and of the keys of
the stages it needs. Its folder carries the key in its name, so a changed setting makes a new folder
for it and for what rests on it, and changing it back finds the old one. Paths, numbers of ranks and
the version of the code are not in the key: moving to another disk or to more GPUs trains nothing
again. The marker records them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ogdm_core.files import write_json
from run.provenance import commit, versions

PACKAGES = ("torch", "numpy", "scipy", "pytorch-lightning", "mpi4py", "torch-fidelity")
MARKER, LOG = "done.json", "log.txt"
WHOLE = 1 << 26  # files up to 64 MiB are hashed whole, of longer ones 64 pieces of 1 MiB


@dataclass(frozen=True)
class Command:
    """A command line with the folder and the variables that it is run with."""

    argv: tuple[str, ...]
    cwd: Path | None = None
    env: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """As one types it in a shell."""
        place = f"cd {shlex.quote(str(self.cwd))} && " if self.cwd else ""
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in self.env)
        return f"{place}{variables}{shlex.join(self.argv)}"


@dataclass(frozen=True, eq=False)
class Stage:
    """Commands that make one thing, `output`.

    `build(folder)` gives the commands to run now: a training that was stopped finds its own last
    checkpoint in the folder and continues from there.
    """

    name: str  # as in cifar10-adm-baseline/train
    kind: str  # data | train | sample | evaluate
    work: Path  # folder of all stages
    settings: tuple[str, ...]
    build: Callable[[Path], list[Command]]
    product: str  # what it makes: a path in its folder, or an absolute one
    found: str = ""  # glob in its folder; the newest match gets a link called `product`
    needs: tuple[Stage, ...] = ()
    inputs: tuple[str, ...] = ()  # files from outside, or URLs
    scrap: tuple[str, ...] = ()  # globs of what is removed once it is done
    group: str = ""  # backbone: stages of a kind and a group take a time in proportion to `units`
    units: float = 1.0
    meter: tuple[str, float] | None = None  # regex for a number in the log, and its final value

    @cached_property
    def key(self) -> str:
        """sha256 over all that the result depends on."""
        content = {
            "stage": self.name,
            "settings": self.settings,
            "inputs": [fingerprint(path) for path in self.inputs],
            "needs": [stage.key for stage in self.needs],
        }
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def folder(self) -> Path:
        return self.work / f"{self.name.replace('/', '.')}-{self.key[:10]}"

    @property
    def output(self) -> Path:
        return self.folder / self.product

    @property
    def log(self) -> Path:
        return self.folder / LOG

    def record(self) -> dict | None:
        """What the marker says; None if the stage is not done."""
        marker = self.folder / MARKER
        if not marker.is_file() or not self.output.exists():
            return None
        record = json.loads(marker.read_text())
        # A product elsewhere is not in the key: one that is there may be another's, or half made.
        elsewhere = os.path.isabs(self.product) and record["output"] != str(self.output)
        return record if record["key"] == self.key and not elsewhere else None

    def finish(
        self, commands: list[Command], started: str, seconds: float, share: float = 1.0
    ) -> None:
        """Links the product, clears away the scrap, then leaves the marker.

        `share` of the work was done in these `seconds`: less than 1 after a resume.
        """
        if self.found:
            self._link()
        if not self.output.exists():
            raise FileNotFoundError(f"the commands ended well, but made no {self.output}")
        for pattern in self.scrap:
            for path in self.folder.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        record = {
            "stage": self.name, "key": self.key, "settings": list(self.settings),
            "inputs": list(self.inputs), "needs": [stage.key for stage in self.needs],
            "commands": [str(command) for command in commands], "started": started,
            "seconds": round(seconds, 2), "share": share, "kind": self.kind, "group": self.group,
            "units": self.units, "output": str(self.output), **origin(),
        }  # fmt: skip
        write_json(self.folder / MARKER, record)

    def _link(self) -> None:
        path = newest(self.folder, self.found)
        if path is None:
            raise FileNotFoundError(f"the commands ended well, but made no {self.found}")
        self.output.unlink(missing_ok=True)
        self.output.symlink_to(path.relative_to(self.folder))


def chain(stages: Iterable[Stage]) -> list[Stage]:
    """The stages and all they need, each once, needs first."""
    ordered: dict[str, Stage] = {}

    def visit(stage: Stage) -> None:
        for need in stage.needs:
            visit(need)
        ordered.setdefault(stage.key, stage)

    for stage in stages:
        visit(stage)
    return list(ordered.values())


def newest(folder: Path, pattern: str, whole: Callable[[Path], bool] | None = None) -> Path | None:
    """The latest file that matches (and is `whole`); None if there is none."""
    found = [p for p in folder.glob(pattern) if p.is_file() and (whole is None or whole(p))]
    return max(found, key=lambda p: (p.stat().st_mtime_ns, p.name), default=None)


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


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def origin() -> dict:
    """Commit and versions: where a result comes from."""
    return {"commit": commit(), "versions": versions(PACKAGES)}


def python_path(*folders: Path) -> str:
    """PYTHONPATH with these folders first, then the user's own, good in any folder."""
    own = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys(map(os.path.abspath, [*folders, *own])))
