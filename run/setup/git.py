"""git as a subprocess: no question at a prompt, a time limit, no process left behind."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

_INHERITED = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")  # a hook's, not ours
_NEVER_ASK = {"GIT_TERMINAL_PROMPT": "0", "GCM_INTERACTIVE": "never", "LC_ALL": "C"}


class GitError(Exception):
    """git failed; the message is what it said."""


def run(*words: str | Path, cwd: Path, seconds: float = 60) -> bytes:
    """stdout of `git WORDS` in `cwd`; raises GitError, also when git takes longer than `seconds`."""
    env = {name: value for name, value in os.environ.items() if name not in _INHERITED} | _NEVER_ASK
    env["GIT_SSH_COMMAND"] = f"{env.get('GIT_SSH_COMMAND', 'ssh')} -oBatchMode=yes -oConnectTimeout=10"
    slow = ("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=20")  # a download that stands still is given up
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        process = subprocess.Popen(["git", *slow, *map(str, words)], cwd=cwd, env=env, process_group=0, **pipes)
    except FileNotFoundError:
        raise GitError("git is not installed, or not on PATH") from None
    try:
        out, said = process.communicate(timeout=seconds)
    except BaseException as error:  # out of time, or Ctrl-C: git's helpers have to end, too
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.communicate(timeout=2)
                break
        if isinstance(error, subprocess.TimeoutExpired):
            raise GitError(f"no answer within {seconds:g} seconds") from None
        raise
    if process.returncode:
        message = said.decode(errors="replace").strip()
        raise GitError(message or f"git {words[0]} failed with code {process.returncode}")
    return out


def text(*words: str | Path, cwd: Path) -> str:
    """As `run`, decoded and stripped."""
    return run(*words, cwd=cwd).decode(errors="replace").strip()
