"""One process at a time in a folder."""

import contextlib
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def exclusive(file: Path, doing: str) -> Iterator[int]:
    """Holds the lock `file`; a second process says who holds it, and waits until that one ends.

    Yields the descriptor. A child that inherits it (`pass_fds`) holds the lock as well, so the lock
    outlives a parent that is killed. Needs the standard library only.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            who = lock.read() or "another process"
            print(f"waiting: {who} is {doing}", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield lock.fileno()
