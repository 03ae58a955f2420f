"""One at a time across processes: a lock on a file, which leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(path: Path, doing: str) -> Iterator[None]:
    """Holds `path`; whoever comes second waits, and is told what the first is doing.

    The kernel drops the lock with its process, so a killed one blocks nobody.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    told = False
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    print(f"waiting: another process is {doing}", file=sys.stderr, flush=True)
                    told = True
                fcntl.flock(file, fcntl.LOCK_EX)
            # The one before has removed its file: a lock on that would keep out nobody new.
            if not _is(path, file.fileno()):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
