"""How far a long loop is, and the time left: on a terminal, in a log, in a pipe."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """Lines such as `step 20/100  loss 0.1  3.2/s, 25 s left`.

    On a terminal one line is written over again. Elsewhere there is a line whenever the caller
    asks, and `every` seconds (later: a tenth of the time so far) after the last one.
    """

    def __init__(
        self,
        name: str,
        total: int,
        done: int = 0,
        file: TextIO | None = None,
        every: float = 10.0,
        quiet: bool = False,
    ):
        self.name, self.total, self.first, self.every = name, total, done, every
        self.file, self.quiet, self.note = file or sys.stderr, quiet, ""
        self.terminal = self.file.isatty()
        self.start = self.last = time.monotonic()
        self.shown = self.unfinished = False

    def update(self, done: int, note: str | None = None, show: bool = False) -> None:
        """`done` of the total; on a terminal a note stays until the next one."""
        self.note = note or (self.note if self.terminal else "")
        now = time.monotonic()
        wait = 0.1 if self.terminal else max(self.every, (now - self.start) / 10)
        last = self.shown and done == self.total
        if self.quiet or not (show or last or now - self.last >= wait):
            return
        self.last, self.shown = now, True
        speed = (done - self.first) / max(now - self.start, 1e-9)
        left = f"{speed:.3g}/s, {duration((self.total - done) / speed)} left" if speed else ""
        words = [f"{self.name} {done}/{self.total}", self.note, left if done < self.total else ""]
        line = "  ".join(word for word in words if word)
        self.unfinished = self.terminal and done < self.total
        end = "" if self.unfinished else "\n"
        self.file.write(f"\r\x1b[K{line}{end}" if self.terminal else line + end)
        self.file.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.unfinished:
            self.file.write("\n")


def duration(seconds: float) -> str:
    """In the unit that suits: 40 s, 5 min, 2.5 h, 5.1 days."""
    if seconds < 6000:
        return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 129_600 else f"{seconds / 86_400:.1f} days"
