"""The Python environment in .venv, with the versions of constraints.txt.

A stamp in the environment says which extras are in and from which declarations, so that the usual
call costs nothing. The stamp is removed before an install and written after it, so the next call
continues an interrupted install.
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
from collections import deque
from pathlib import Path

from ogdm_core.lock import exclusive
from run.provenance import ROOT

from . import Refusal, read_json_or_empty, say

STAMP = "ogdm-stamp.json"


def read_project(root: Path = ROOT) -> dict:
    """pyproject.toml as a dict."""
    return tomllib.loads((root / "pyproject.toml").read_text())


def expand(extras: list[str], project: dict) -> list[str]:
    """The extras with those that they name in turn, as `all` does."""
    declared = project["project"]["optional-dependencies"]
    if unknown := sorted(set(extras) - set(declared)):
        raise Refusal(f"there is no extra {unknown[0]!r}; known: {', '.join(declared)}")
    inner = re.findall(r"\bogdm\[(.+?)\]", " ".join(item for extra in extras for item in declared[extra]))
    return sorted({*extras, *(expand(",".join(inner).split(","), project) if inner else [])})


def given_python() -> Path | None:
    """OGDM_PYTHON, checked, or None."""
    name = os.environ.get("OGDM_PYTHON")
    if not name:
        return None
    path = shutil.which(os.path.expanduser(name))
    if not path:
        raise Refusal(f"OGDM_PYTHON={name} is not a program that can be run")
    return Path(os.path.abspath(path))


def installed_extras(root: Path = ROOT) -> list[str] | None:
    """The extras in a complete and current .venv; None where it is not."""
    stamp = read_json_or_empty(root / ".venv" / STAMP)
    current = (root / ".venv/bin/python").exists() and stamp.get("key") == _key(root)
    return stamp["extras"] if current else None


def _key(root: Path) -> str:
    """Names the declarations and the interpreter that an environment was made from."""
    project = read_project(root)
    tools = {name: project["tool"].get(name) for name in ("setuptools", "ogdm")}
    what = [project["project"], project["build-system"], tools, str(root)]
    what += [os.path.realpath(root / ".venv/bin/python"), (root / "constraints.txt").read_text()]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def describe(root: Path = ROOT) -> str:
    """One line on the environment."""
    if given := given_python():
        return f"{given} (OGDM_PYTHON, used as it is)"
    if not (root / ".venv/bin/python").exists():
        return "not made yet; would be .venv"
    extras = installed_extras(root)
    if extras is None:
        return ".venv, to be completed by the next script that runs"
    return f".venv with {', '.join(extras) or 'the core only'}"


def complete(extras: list[str], root: Path = ROOT) -> bool:
    """Whether .venv has these extras."""
    have = installed_extras(root)
    return have is not None and set(extras) <= set(have)


def ensure(extras: list[str], root: Path = ROOT) -> Path:
    """The Python of an environment with ogdm_core and these extras; installs what is missing."""
    if given := given_python():
        return given
    if not complete(extras, root):
        with exclusive(root / ".setup" / "lock", "installing the environment"):
            if not complete(extras, root):  # another script may have installed it while we waited
                started = time.monotonic()
                extras = _install(extras, root)
                stamp = {"key": _key(root), "extras": extras}
                (root / ".venv" / STAMP).write_text(json.dumps(stamp, indent=1))
                say(f"Environment ready in {time.monotonic() - started:.0f} s: .venv")
    return root / ".venv/bin/python"


def _install(extras: list[str], root: Path) -> list[str]:
    """Makes or completes .venv; returns all extras that are in it."""
    project = read_project(root)
    expand(extras, project)  # an unknown name is refused before anything is made
    folder, python = root / ".venv", root / ".venv/bin/python"
    recent = _works(python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))")
    if not recent or not (_works(python, "-m", "pip", "-V") or _works(python, "-m", "ensurepip")):
        base = getattr(sys, "_base_executable", None) or sys.executable
        say(f"Making .venv with {base} ...")
        advice = "On Debian and Ubuntu: apt install python3-venv. Or point OGDM_PYTHON at an environment of yours."
        _run([base, "-m", "venv", "--clear", folder], root, "making the environment failed", advice)
    extras = sorted({*extras, *read_json_or_empty(folder / STAMP).get("extras", [])})
    everything = expand(extras, project)
    (folder / STAMP).unlink(missing_ok=True)
    say("Installing packages; the first time this takes a few minutes, torch is the largest ...")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--retries", "2"]
    pip += ["--constraint", root / "constraints.txt"]
    failed = "installing packages failed"
    advice = (
        "Is the package index reachable? Run the same command again to go on from here.\n"
        "Behind a mirror, set PIP_INDEX_URL. To use an environment of yours, set OGDM_PYTHON."
    )
    _run([*pip, "--editable", f"{root}[{','.join(extras)}]" if extras else root], root, failed, advice)
    no_deps = project["tool"]["ogdm"]["no-deps"]
    if packages := [item for extra in everything for item in no_deps.get(extra, [])]:
        _run([*pip, "--no-deps", *packages], root, failed, advice)
    failed = "the new environment cannot import torch"
    _run([python, "-c", "import torch, ogdm_core"], root, failed, f"Remove {folder} and try again.")
    return everything


def _works(*command: str | Path) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def _run(command: list, root: Path, failed: str, advice: str) -> None:
    """Runs a long command: its last line on a terminal, all of it in a log, the tail on failure."""
    log, tail = root / ".setup" / "install.log", deque(maxlen=12)
    words = [str(word) for word in command]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with (
        log.open("a", buffering=1) as record,
        subprocess.Popen(words, cwd=root, env=environment, text=True, errors="replace", **pipes) as process,
    ):
        record.write(f"$ {' '.join(words)}\n")
        for line in process.stdout:
            record.write(line)
            tail.append(f"    {line}")
            _show(line.strip())
    _show("")
    if process.returncode:
        raise Refusal(f"{failed}:\n{''.join(tail)}The whole log is in {log.relative_to(root)}.\n{advice}")


def _show(line: str) -> None:
    if sys.stderr.isatty():
        line = line[: shutil.get_terminal_size().columns - 3]
        print(f"\r\033[K  {line}" if line else "\r\033[K", end="", file=sys.stderr, flush=True)
