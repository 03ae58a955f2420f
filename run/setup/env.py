"""The Python environment: conda's from environment.yml where there is a conda, else .venv.

A stamp in the environment says which extras are in and from which declarations, so that the usual
call costs nothing. It is removed before an install and written after it: an interrupted install is
taken up again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from run.provenance import ROOT

from .submodules import Refusal

STAMP = "ogdm-stamp.json"
CONDAS = ("micromamba", "mamba", "conda")
_DECLARATIONS = ("build-system", "project", "tool.setuptools", "tool.ogdm")


def say(*words: object) -> None:
    """Progress goes to stderr: stdout belongs to the path that --print-python prints."""
    print(*words, file=sys.stderr, flush=True)


def declarations(root: Path = ROOT) -> str:
    """The parts of pyproject.toml that decide what gets installed."""
    sections = re.split(r"^(?=\[)", (root / "pyproject.toml").read_text(), flags=re.MULTILINE)
    return "".join(s for s in sections if s.lstrip("[").startswith(_DECLARATIONS))


def read_project(root: Path, python: Path) -> dict:
    """pyproject.toml as a dict; Python 3.10 has no tomllib, but an environment's pip brings one."""
    try:
        import tomllib
    except ImportError:
        code = (
            "import json, sys; from pip._vendor import tomli; "
            "print(json.dumps(tomli.load(open(sys.argv[1], 'rb'))))"
        )
        command = [python, "-c", code, root / "pyproject.toml"]
        return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return tomllib.loads((root / "pyproject.toml").read_text())


def expand(extras: list[str], project: dict) -> list[str]:
    """The extras with those that they name in turn, as `all` does."""
    declared = project["project"]["optional-dependencies"]
    todo, done = list(extras), []
    while todo:
        extra = todo.pop()
        if extra not in declared:
            raise Refusal(f"there is no extra {extra!r}; known: {', '.join(declared)}")
        if extra not in done:
            done.append(extra)
            for requirement in declared[extra]:
                inner = re.fullmatch(r"ogdm\[(.+)\]", requirement)
                todo += inner[1].split(",") if inner else []
    return sorted(done)


def choose(root: Path = ROOT) -> tuple[str, Path]:
    """(kind, folder) of the environment: what OGDM_ENV says, else what exists, else what can be."""
    places = {"venv": root / ".venv", "conda": root / ".conda"}
    wanted = os.environ.get("OGDM_ENV", "")
    if wanted:
        if wanted not in places:
            raise Refusal(f"OGDM_ENV={wanted} is not known; use venv or conda, or leave it unset")
        return wanted, places[wanted]
    for kind, folder in places.items():
        if (folder / "bin" / "python").exists():
            return kind, folder
    kind = "conda" if conda() else "venv"
    return kind, places[kind]


def conda() -> str | None:
    """The conda program at hand, the fastest first."""
    return next((path for name in CONDAS if (path := shutil.which(name))), None)


def given_python() -> Path | None:
    """OGDM_PYTHON, checked, or None."""
    name = os.environ.get("OGDM_PYTHON")
    if not name:
        return None
    path = shutil.which(os.path.expanduser(name))
    if not path:
        raise Refusal(f"OGDM_PYTHON={name} is not a program that can be run")
    return Path(os.path.abspath(path))


def read_stamp(folder: Path) -> dict:
    """What the environment holds; empty if it is not complete."""
    try:
        return json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return {}


def _key(kind: str, folder: Path, root: Path) -> str:
    """Names the declarations and the interpreter that an environment was made from."""
    python = os.path.realpath(folder / "bin" / "python")
    what = declarations(root)
    if kind == "conda":
        what += (root / "environment.yml").read_text()
    return hashlib.sha256(f"{what}\n{python}\n{root}".encode()).hexdigest()


def missing(extras: list[str], root: Path = ROOT) -> list[str]:
    """The extras that an install would have to bring; empty when there is nothing to do."""
    kind, folder = choose(root)
    stamp = read_stamp(folder)
    python = folder / "bin" / "python"
    if not python.exists() or stamp.get("key") != _key(kind, folder, root):
        return sorted({*extras, "core"})
    return sorted(set(extras) - set(stamp["extras"]))


def describe(root: Path = ROOT) -> str:
    """One line on the environment."""
    given = given_python()
    if given:
        return f"{given} (OGDM_PYTHON, used as it is)"
    kind, folder = choose(root)
    held = read_stamp(folder).get("extras", [])
    if not (folder / "bin" / "python").exists():
        return f"not made yet; would be {folder.relative_to(root)} ({kind})"
    if missing([], root):
        return f"{folder.relative_to(root)} ({kind}), to be completed by the next script that runs"
    return f"{folder.relative_to(root)} ({kind}) with {', '.join(held) or 'the core only'}"


def ensure(extras: list[str], root: Path = ROOT) -> Path:
    """The Python of an environment with ogdm_core and these extras; installs what is missing."""
    given = given_python()
    if given:
        return given
    kind, folder = choose(root)
    python = folder / "bin" / "python"
    if not missing(extras, root):
        return python
    with _alone(root):
        if not missing(extras, root):  # another script installed it while we waited
            return python
        started = time.monotonic()
        if kind == "conda":
            installed = _install_conda(folder, root)
        else:
            installed = _install_venv(folder, extras, root)
        stamp = {"key": _key(kind, folder, root), "extras": installed}
        (folder / STAMP).write_text(json.dumps(stamp, indent=1))
        say(f"Environment ready in {time.monotonic() - started:.0f} s: {folder.relative_to(root)}")
    return python


@contextlib.contextmanager
def _alone(root: Path):
    """One install at a time; a second script waits for the first."""
    place = root / ".setup"
    place.mkdir(exist_ok=True)
    with (place / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("Another script is installing the environment; waiting for it ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _install_venv(folder: Path, extras: list[str], root: Path) -> list[str]:
    python = folder / "bin" / "python"
    _make_venv(folder, root)
    project = read_project(root, python)
    extras = sorted({*extras, *read_stamp(folder).get("extras", [])})
    everything = expand(extras, project)
    (folder / STAMP).unlink(missing_ok=True)
    say("Installing packages; the first time this takes a few minutes, torch is the largest ...")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--retries", "2"]
    failed = "installing packages failed"
    advice = (
        "Is the package index reachable? Run the same command again to go on from here.\n"
        "Behind a mirror, set PIP_INDEX_URL. To use an environment of yours, set OGDM_PYTHON."
    )
    target = f"{root}[{','.join(extras)}]" if extras else str(root)
    _run([*pip, "--editable", target], root, failed, advice)
    alone = project["tool"]["ogdm"]["no-deps"]
    loners = [item for extra in everything for item in alone.get(extra, [])]
    if loners:
        _run([*pip, "--no-deps", *loners], root, failed, advice)
    _run([python, "-c", "import torch, ogdm_core"], root, "the new environment cannot import torch",
         f"Remove {folder} and try again.")  # fmt: skip
    return everything


def _make_venv(folder: Path, root: Path) -> None:
    """A virtual environment with pip, made if need be; one whose Python is gone is made anew."""
    python = folder / "bin" / "python"
    if _works(python, "-m", "pip", "--version"):
        return
    if _works(python, "-m", "ensurepip"):
        return
    base = getattr(sys, "_base_executable", None) or sys.executable
    say(f"Making {folder.relative_to(root)} with {base} ...")
    clear = ["--clear"] if python.is_symlink() and not _works(python, "--version") else []
    _run([base, "-m", "venv", *clear, folder], root, "making the environment failed",
         "On Debian and Ubuntu: apt install python3-venv. "
         "Or point OGDM_PYTHON at an environment of yours.")  # fmt: skip


def _install_conda(folder: Path, root: Path) -> list[str]:
    program = conda()
    if not program:
        raise Refusal("OGDM_ENV=conda, but there is no conda, mamba or micromamba on PATH")
    say(f"Making {folder.relative_to(root)} with {program} from environment.yml; minutes ...")
    (folder / STAMP).unlink(missing_ok=True)
    exists = (folder / "conda-meta").is_dir()
    verb = ["update", "--prune"] if exists else ["create"]
    file = ["--file", root / "environment.yml", "--prefix", folder]
    if Path(program).name == "micromamba":
        command = [program, verb[0], "--yes", *file]
    else:
        command = [program, "env", *verb, *file]
    _run(command, root, "conda could not make the environment",
         "To do without conda: OGDM_ENV=venv run/setup.sh")  # fmt: skip
    python = folder / "bin" / "python"
    _run([python, "-m", "pip", "install", "--no-deps", "--editable", root], root,
         "installing ogdm_core failed", "Run the same command again to go on.")  # fmt: skip
    return sorted(read_project(root, python)["project"]["optional-dependencies"])


def _works(*command: str | Path) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def _run(command: list, root: Path, failed: str, advice: str) -> None:
    """Runs a long command: its last line on a terminal, all of it in a log, the tail on failure."""
    log = root / ".setup" / "install.log"
    words = [str(word) for word in command]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    lines = []
    with log.open("a", buffering=1) as record:
        record.write(f"$ {' '.join(words)}\n")
        process = subprocess.Popen(
            words, cwd=root, env=environment, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        for line in process.stdout:
            record.write(line)
            lines.append(line.rstrip())
            _show(line.strip())
        code = process.wait()
    _show("")
    if code:
        tail = "\n".join(f"    {line}" for line in lines[-12:])
        raise Refusal(f"{failed}:\n{tail}\nThe whole log is in {log.relative_to(root)}.\n{advice}")


def _show(line: str) -> None:
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 3
        sys.stderr.write(f"\r\033[K  {line[:width]}" if line else "\r\033[K")
        sys.stderr.flush()
