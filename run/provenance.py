"""Where a result comes from: the commit and the versions; and what this machine has."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Python's version and those of the packages, "not installed" where one is absent."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str:
    """This repository's commit, with a + where files differ from it; "unknown" outside a clone.

    Submodules count by their commit only: our patches are meant to be in their files.
    """
    # An installed copy may lie inside someone else's repository, whose commit says nothing here.
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return "unknown"
    head = _git("rev-parse", "HEAD")
    if head.returncode:
        return "unknown"
    edited = _git("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
    return head.stdout.strip() + ("+" if edited.stdout.strip() else "")


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    # Without optional locks: a result must not get in the way of somebody's commit.
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True)
