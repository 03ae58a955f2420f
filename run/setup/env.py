"""The Python environment: .venv by default, .conda from environment.yml with OGDM_ENV=conda.

Versions come from constraints.txt. A stamp in the environment says which extras are in and from
which declarations, so that the usual call costs nothing. It is removed before an install and
written after it, so an interrupted install is taken up again.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from run.lock import exclusive
from run.provenance import ROOT

from .submodules import Refusal, kept

STAMP = "ogdm-stamp.json"
CONDAS = ("micromamba", "mamba", "conda")  # the fastest first


def say(*words: object, sep: str = " ") -> None:
    """Prints to stderr: stdout belongs to the path that --print-python prints."""
    print(*words, file=sys.stderr, flush=True, sep=sep)


def read_project(root: Path = ROOT) -> dict:
    """pyproject.toml as a dict."""
    return tomllib.loads((root / "pyproject.toml").read_text())


def expand(extras: list[str], project: dict) -> list[str]:
    """The extras with those that they name in turn, as `all` does."""
    declared = project["project"]["optional-dependencies"]
    todo, done = list(extras), set()
    while todo:
        extra = todo.pop()
        if extra not in declared:
            raise Refusal(f"there is no extra {extra!r}; known: {', '.join(declared)}")
        if extra not in done:
            done.add(extra)
            for requirement in declared[extra]:
                inner = re.fullmatch(r"ogdm\[(.+)\]", requirement)
                todo += inner[1].split(",") if inner else []
    return sorted(done)


def choose(root: Path = ROOT) -> tuple[str, Path]:
    """(kind, folder) of the environment: what OGDM_ENV says, else what exists, else a venv."""
    places = {"venv": root / ".venv", "conda": root / ".conda"}
    wanted = os.environ.get("OGDM_ENV", "")
    if wanted and wanted not in places:
        raise Refusal(f"OGDM_ENV={wanted} is not known; use venv or conda, or leave it unset")
    made = [kind for kind, folder in places.items() if (folder / "bin" / "python").exists()]
    kind = wanted or (made or ["venv"])[0]
    return kind, places[kind]


def given_python() -> Path | None:
    """OGDM_PYTHON, checked, or None."""
    name = os.environ.get("OGDM_PYTHON")
    if not name:
        return None
    path = shutil.which(os.path.expanduser(name))
    if not path:
        raise Refusal(f"OGDM_PYTHON={name} is not a program that can be run")
    return Path(os.path.abspath(path))


def held(kind: str, folder: Path, root: Path = ROOT) -> list[str] | None:
    """The extras in a complete and current environment; None if it is not."""
    stamp = kept(folder / STAMP)
    current = (folder / "bin" / "python").exists() and stamp.get("key") == _key(kind, folder, root)
    return stamp["extras"] if current else None


def _key(kind: str, folder: Path, root: Path) -> str:
    """Names the declarations and the interpreter that an environment was made from."""
    project = read_project(root)
    tools = {name: project["tool"].get(name) for name in ("setuptools", "ogdm")}
    what = [project["project"], project["build-system"], tools, str(root)]
    what += [os.path.realpath(folder / "bin" / "python"), (root / "constraints.txt").read_text()]
    if kind == "conda":
        what.append((root / "environment.yml").read_text())
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def describe(root: Path = ROOT) -> str:
    """One line on the environment."""
    if given := given_python():
        return f"{given} (OGDM_PYTHON, used as it is)"
    kind, folder = choose(root)
    name = f"{folder.relative_to(root)} ({kind})"
    if not (folder / "bin" / "python").exists():
        return f"not made yet; would be {name}"
    extras = held(kind, folder, root)
    if extras is None:
        return f"{name}, to be completed by the next script that runs"
    return f"{name} with {', '.join(extras) or 'the core only'}"


def ensure(extras: list[str], root: Path = ROOT) -> Path:
    """The Python of an environment with ogdm_core and these extras; installs what is missing."""
    if given := given_python():
        return given
    kind, folder = choose(root)

    def complete() -> bool:
        have = held(kind, folder, root)
        return have is not None and set(extras) <= set(have)

    if not complete():
        with exclusive(root / ".setup" / "lock", "installing the environment"):
            if not complete():  # another script may have installed it while we waited
                started = time.monotonic()
                install = _install_conda if kind == "conda" else _install_venv
                installed = install(folder, extras, root)
                stamp = {"key": _key(kind, folder, root), "extras": installed}
                (folder / STAMP).write_text(json.dumps(stamp, indent=1))
                seconds = time.monotonic() - started
                say(f"Environment ready in {seconds:.0f} s: {folder.relative_to(root)}")
    return folder / "bin" / "python"


def _install_venv(folder: Path, extras: list[str], root: Path) -> list[str]:
    project = read_project(root)
    expand(extras, project)  # an unknown name is refused before anything is made
    python = folder / "bin" / "python"
    recent = _works(python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))")
    if not recent or not any(_works(python, "-m", *w) for w in (["pip", "-V"], ["ensurepip"])):
        base = getattr(sys, "_base_executable", None) or sys.executable
        say(f"Making {folder.relative_to(root)} with {base} ...")
        _run([base, "-m", "venv", "--clear", folder], root, "making the environment failed",
             "On Debian and Ubuntu: apt install python3-venv. "
             "Or point OGDM_PYTHON at an environment of yours.")  # fmt: skip
    extras = sorted({*extras, *kept(folder / STAMP).get("extras", [])})
    everything = expand(extras, project)
    (folder / STAMP).unlink(missing_ok=True)
    say("Installing packages; the first time this takes a few minutes, torch is the largest ...")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--retries", "2",
           "--constraint", root / "constraints.txt"]  # fmt: skip
    failed = "installing packages failed"
    advice = (
        "Is the package index reachable? Run the same command again to go on from here.\n"
        "Behind a mirror, set PIP_INDEX_URL. To use an environment of yours, set OGDM_PYTHON."
    )
    target = f"{root}[{','.join(extras)}]" if extras else str(root)
    _run([*pip, "--editable", target], root, failed, advice)
    alone = project["tool"]["ogdm"]["no-deps"]
    if loners := [item for extra in everything for item in alone.get(extra, [])]:
        _run([*pip, "--no-deps", *loners], root, failed, advice)
    _run([python, "-c", "import torch, ogdm_core"], root, "the new environment cannot import torch",
         f"Remove {folder} and try again.")  # fmt: skip
    return everything


def _install_conda(folder: Path, extras: list[str], root: Path) -> list[str]:
    program = next((path for name in CONDAS if (path := shutil.which(name))), None)
    if not program:
        raise Refusal("OGDM_ENV=conda, but there is no conda, mamba or micromamba on PATH")
    say(f"Making {folder.relative_to(root)} with {program} from environment.yml; minutes ...")
    (folder / STAMP).unlink(missing_ok=True)
    words = ["update", "--prune"] if (folder / "conda-meta").is_dir() else ["create"]
    words = [words[0], "--yes"] if Path(program).name == "micromamba" else ["env", *words]
    file = ["--file", root / "environment.yml", "--prefix", folder]
    _run([program, *words, *file], root, "conda could not make the environment",
         "To do without conda: OGDM_ENV=venv run/setup.sh")  # fmt: skip
    return sorted(read_project(root)["project"]["optional-dependencies"])


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
