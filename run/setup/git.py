"""git as a subprocess, with nothing of the caller's repository leaking in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

PROBE_SECONDS = 10
_NEVER_ASK = {"GIT_TERMINAL_PROMPT": "0", "GCM_INTERACTIVE": "never", "LC_ALL": "C"}
_PATIENCE = ("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=20")


class GitError(Exception):
    """git failed; the message is what it said."""


def environment() -> dict[str, str]:
    """The caller's environment without a hook's GIT_DIR, and without questions at a prompt."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
    }
    ssh = inherited.get("GIT_SSH_COMMAND", "ssh")
    patient = {"GIT_SSH_COMMAND": f"{ssh} -oBatchMode=yes -oConnectTimeout={PROBE_SECONDS}"}
    return inherited | _NEVER_ASK | patient


def run(*args: str | Path, cwd: Path, timeout: float | None = None, **extra: str) -> bytes:
    """`git ARGS` in `cwd`; returns stdout or raises GitError. `extra` goes to the environment."""
    command = ["git", *_PATIENCE, *map(str, args)]
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment() | extra, capture_output=True, timeout=timeout
        )
    except FileNotFoundError:
        raise GitError("git is not installed, or not on PATH") from None
    except subprocess.TimeoutExpired:
        raise GitError(f"no answer within {timeout:g} seconds") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise GitError(said or f"git {args[0]} failed with code {done.returncode}")
    return done.stdout


def text(*args: str | Path, cwd: Path, **extra: str) -> str:
    """stdout of `git ARGS`, stripped."""
    return run(*args, cwd=cwd, **extra).decode(errors="replace").strip()


def attempt(*args: str | Path, cwd: Path) -> str | None:
    """As `text`, but None where git fails: for questions whose answer may be "there is none"."""
    try:
        return text(*args, cwd=cwd)
    except GitError:
        return None
