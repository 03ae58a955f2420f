"""Child processes side by side. Their progress is read from the log files that they write."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm


def last_entry(log: Path | None) -> tuple[int, str]:
    """The step in the last complete line of a log.jsonl, and the line's other values as text; (0, "") without one."""
    try:
        lines = log.read_text().split("\n")[:-1] if log else []  # a line without its end is still being written
    except FileNotFoundError:
        lines = []
    entry = json.loads(lines[-1]) if lines else {"step": 0}
    step = entry.pop("step")
    values = {name: f"{value:.3f}" if isinstance(value, float) else value for name, value in entry.items()}
    return step, ", ".join(f"{name} {value}" for name, value in values.items())


class Runner:
    """Runs child processes and shows their progress; stops them all when one fails."""

    def __init__(self, lock: int) -> None:
        """`lock` is the descriptor of the folder's lock, which the children hold as well."""
        self.children: list[subprocess.Popen] = []
        self.lock = threading.Lock()
        self.stopping, self.inherited = False, (lock,)

    def run(self, name: str, module: str, words: Sequence[str], log: Path | None = None, total: int = 0) -> None:
        """Runs `python -m MODULE WORDS` to its end; RuntimeError with its last lines if it fails.

        The last "step" in `log`, of `total`, is its progress. The child computes with one thread: these
        networks gain nothing from more, and the result is the same on any number of cores. It has a
        session of its own; `__exit__` passes Ctrl-C on, once.
        """
        command = [sys.executable, "-m", module, *words]
        env = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
        with tempfile.TemporaryFile() as output:
            with self.lock:
                if self.stopping:
                    return
                pipes = {"stdout": output, "stderr": subprocess.STDOUT, "pass_fds": self.inherited}
                child = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
                self.children.append(child)
            watch(child, name, log, total)
            if child.returncode and not self.stopping:
                output.seek(0)
                said = output.read().decode(errors="replace").splitlines()
                raise RuntimeError("\n".join([f"{shlex.join(command)} failed:", *said[-20:]]))

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        """After an error or Ctrl-C, asks every child to save and stop, and waits for them."""
        with self.lock:
            self.stopping = kind is not None
        for child in self.children if self.stopping else ():
            child.terminate()  # SIGINT is ignored below a shell's background job
        for child in self.children:
            child.wait()


def watch(child: subprocess.Popen, name: str, log: Path | None, total: int) -> None:
    """Waits for the child; shows a bar on a terminal, elsewhere a line per fifth of the way."""
    done, _ = last_entry(log)
    printed, running = done, True
    with tqdm(total=total, initial=done, desc=f"{name:<22}", unit="step", disable=None) as bar:
        while running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.2)
            running = child.returncode is None  # where it has ended, the log is read once more
            step, note = last_entry(log)
            bar.set_postfix_str(note, refresh=False)
            bar.update(step - done)
            done = step
            if bar.disable and (done >= printed + total / 5 or done == total > printed):
                printed = done
                print(f"{name}: step {done}/{total}, {note}", flush=True)
