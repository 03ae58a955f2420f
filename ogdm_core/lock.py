"""One process at a time in a folder. Needs the standard library only."""

import contextlib
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO


class TakenError(RuntimeError):
    """Another process holds the lock; the text names it."""


@contextlib.contextmanager
def exclusive(file: Path, doing: str) -> Iterator[int]:
    """Holds the lock `file`; a second process says who holds it, and waits until that one ends.

    Yields the descriptor. A child that inherits it (`pass_fds`) holds the lock as well, so the lock
    outlives a parent that is killed.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting: {_holder(lock)} is {doing}", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        _sign(lock)
        yield lock.fileno()


def take(file: Path) -> IO[str]:
    """The lock `file`, held until what is returned is closed; TakenError, which names the holder, does not wait.

    It ends with this process, also where forked children (data workers) outlive it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = file.open("a+")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # what POSIX allows for a lock that is held
        with lock:
            raise TakenError(_holder(lock)) from None
    _sign(lock)
    return lock


def _holder(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read() or "another process"


def _sign(lock: IO[str]) -> None:
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
