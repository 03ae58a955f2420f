"""Where a result comes from: the commit, the versions, and a file written whole or not at all."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


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


def write_json(path: Path, value: Any) -> None:
    """Writes the file, and its folder if need be, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(part, path)
