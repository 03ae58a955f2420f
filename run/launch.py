"""Native commands: what is run, in which folder, by how many processes.

Settings are a mapping until `Command` writes them out, once, at the end:

    mpiexec -n N python scripts/image_train.py --flag value ...
    torchrun --nproc_per_node=N train.py --flag=value ...
    python main.py --flag value ... config.entry=value ...
"""

import os
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from run.presets import Preset
from run.provenance import ROOT


@dataclass(frozen=True)
class Command:
    """A native command: `flags` maps a flag to its value, None where it takes none.

    A tuple is several values. A name without a dash in front is an entry of a config.
    """

    launcher: tuple[str, ...]
    script: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    joined: bool = False  # --flag=value
    native: tuple[str, ...] = ()  # the user's own words; they come last, so they win

    @property
    def argv(self) -> list[str]:
        """The words of the command line."""
        return [*self.launcher, self.script, *self._words(), *self.native]

    def _words(self) -> Iterator[str]:
        for name, value in self.flags.items():
            if value is None:
                yield name
            elif self.joined or not name.startswith("-"):
                yield f"{name}={value}"
            else:
                yield name
                yield from map(str, value if isinstance(value, tuple | list) else (value,))

    def __str__(self) -> str:
        """The line as one types it in a shell, and as it is run."""
        place = f"cd {shlex.quote(self.cwd)} && " if self.cwd else ""
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in self.env.items())
        return f"{place}{variables}{shlex.join(self.argv)}"

    def run(self) -> int:
        """Runs it; the exit status."""
        return subprocess.run(self.argv, cwd=self.cwd, env=os.environ | dict(self.env)).returncode

    def settings(self, without: Collection[str] = ()) -> dict[str, str]:
        """The flags as text, but for those in `without`; this repository's path is ROOT."""
        return {n: str(v).replace(str(ROOT), "ROOT") for n, v in self.flags.items() if n not in without}


@dataclass(frozen=True)
class Engine:
    """The processes of a command: `gpus` in all, one per GPU, on `nodes` machines."""

    gpus: int = 1
    nodes: int = 1
    rendezvous: str = ""  # HOST:PORT of the first machine, for several of them without Slurm
    third_party: Path = ROOT / "third_party"
    threads: int = 0  # of each process on a CPU; 0 leaves it to torch

    @property
    def per_node(self) -> int:
        """Processes per machine."""
        return self.gpus // self.nodes

    def check(self, preset: Preset) -> list[str]:
        """What is wrong with these numbers for this preset."""
        found = []
        if preset.batch % self.gpus:
            found.append(f"--gpus: {self.gpus} does not divide {preset.name}'s batch of {preset.batch}")
        if self.gpus % self.nodes:
            found.append(f"--nodes: {self.nodes} does not divide --gpus {self.gpus}, the processes on all nodes")
        return found


def module(name: str, *words: Any, **flags: Any) -> Command:
    """`python -m NAME FLAGS WORDS`, with this repository and the user's own modules to import from."""
    return Command(
        (sys.executable, "-m"), name, flags, env={"PYTHONPATH": python_path()}, native=tuple(map(str, words))
    )


def python_path(*first: Path) -> str:
    """PYTHONPATH with these folders, this repository, and then the user's own."""
    own = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys(map(os.path.abspath, (*first, ROOT, *own))))


def is_url(path: str) -> bool:
    """Whether this is an address, not a path."""
    return path.startswith(("http://", "https://"))


def absolute(path: str) -> str:
    """The path as it holds in any folder; an URL, or nothing, stays as it is."""
    return path if is_url(path) or not path else str(Path(path).absolute())


def beside(name: str) -> str:
    """A program of this very environment, wherever PATH leads."""
    path = Path(sys.executable).with_name(name)
    return str(path) if path.exists() else name


def newest(folder: Path, pattern: str, whole: bool = False) -> Path | None:
    """The latest file that matches; with `whole`, one that torch has written to its end."""
    there = [p for p in folder.glob(pattern) if p.is_file()]
    found = [p for p in there if not whole or zipfile.is_zipfile(p)]
    return max(found, key=lambda p: (p.stat().st_mtime_ns, p.name), default=None)


def srun(engine: Engine, tasks: int) -> tuple[str, ...]:
    """What starts so many tasks on each node of the Slurm job around us; nothing on one node, or outside of a job."""
    if engine.nodes == 1 or not slurm_nodes():
        return ()
    return ("srun", "--overlap", f"--nodes={engine.nodes}", f"--ntasks-per-node={tasks}")


def slurm_nodes() -> list[str]:
    """The nodes of the Slurm job around us; empty outside of one."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return []
    # SLURM_JOB_NODELIST is not among the variables that Snakemake's plugin hands down.
    return _ask("scontrol", "show", "hostnames", *_ask("squeue", "--noheader", f"--jobs={job}", "--format=%N"))


def address(node: str) -> str:
    """Where other nodes reach a node of Slurm's; mostly its name."""
    return _ask("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%o")[0]


def _ask(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
