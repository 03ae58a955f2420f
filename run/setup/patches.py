"""Patch files: how they are read, and the law they obey.

A patch opens with prose, then adds lines to upstream files and quotes none of them:

    Why this patch exists, and why nothing gentler would do.

    diff --git a/train.py b/train.py
    index 3f5f3ee..9a1b2c3 100644
    --- a/train.py
    +++ b/train.py
    @@ -12,0 +13,2 @@
    +two added
    +lines

Every hunk is `@@ -N,0 +M[,K] @@` with `+` lines only. The `index` line names the file's blob before
and after, so a patch knows exactly which upstream it is for. `patches/NAME/series` gives the order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SERIES = "series"
FILL_IN = "FILL IN"  # stands in the prose of a freshly exported patch until its author writes it
MIN_WORDS = 15  # two short sentences; less than this is a title, not a reason

_HUNK = re.compile(r"@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@")
_INDEX = re.compile(r"index ([0-9a-f]{7,64})\.\.([0-9a-f]{7,64})( 100(?:644|755))?")
_NEW_FILE = re.compile(r"new file mode 100(?:644|755)")


class PatchError(Exception):
    """A patch file breaks the law; the message says where and what to do."""


@dataclass(frozen=True)
class Hunk:
    """Lines added after line `after` of the old file."""

    after: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """What one patch does to one upstream file; blobs may be abbreviated, as in the patch."""

    path: str
    old: str
    new: str
    creates: bool
    hunks: tuple[Hunk, ...]
    text: str  # this file's part of the patch, from `diff --git` on

    @property
    def added(self) -> list[str]:
        """All added lines, without their `+`."""
        return [line for hunk in self.hunks for line in hunk.lines]


@dataclass(frozen=True)
class Patch:
    """One patch file."""

    file: Path
    prose: str
    changes: tuple[Change, ...]

    @property
    def name(self) -> str:
        """The file name, as it stands in the series."""
        return self.file.name


def same_blob(a: str, b: str) -> bool:
    """Whether two blob names, either of them possibly abbreviated, agree."""
    return a.startswith(b) or b.startswith(a)


def read_series(folder: Path) -> list[str]:
    """The patch files of a submodule in their order; comments and blank lines are skipped."""
    series = folder / SERIES
    if not series.is_file():
        return []
    lines = (line.split("#")[0].strip() for line in series.read_text().splitlines())
    return [line for line in lines if line]


def load_series(folder: Path) -> list[Patch]:
    """Parses every patch of the series; raises PatchError."""
    loaded = []
    for name in read_series(folder):
        file = folder / name
        if not file.is_file():
            raise PatchError(f"{folder / SERIES} lists {name}, which is not there")
        loaded.append(load(file))
    return loaded


def load(file: Path) -> Patch:
    """Reads one patch file, its line ends as they are."""
    return parse(file.read_bytes().decode(), file)


def parse(text: str, file: Path) -> Patch:
    """Reads one patch strictly; anything but added lines raises PatchError."""
    return _Reader(text, file).patch()


class _Reader:
    """A cursor over the lines of one patch file."""

    def __init__(self, text: str, file: Path):
        self.file, self.lines, self.at = file, text.removesuffix("\n").split("\n"), 0

    def peek(self) -> str | None:
        return self.lines[self.at] if self.at < len(self.lines) else None

    def take(self) -> str:
        line = self.peek()
        if line is None:
            raise self.error("the patch ends in the middle of a file")
        self.at += 1
        return line

    def error(self, why: str) -> PatchError:
        return PatchError(f"{self.file.parent.name}/{self.file.name}:{self.at}: {why}")

    def patch(self) -> Patch:
        prose = []
        while (line := self.peek()) is not None and not line.startswith("diff --git "):
            if line.startswith(("--- ", "+++ ", "@@ ")):
                self.at += 1
                raise self.error("a diff starts without its `diff --git` line")
            prose.append(self.take())
        changes = []
        while self.peek() is not None:
            changes.append(self.change())
        if not changes:
            raise self.error("no `diff --git` line: the patch changes nothing")
        return Patch(self.file, "\n".join(prose).strip(), tuple(changes))

    def change(self) -> Change:
        start = self.at
        header = re.fullmatch(r"diff --git a/(.+) b/\1", self.take())
        if not header:
            raise self.error("expected `diff --git a/PATH b/PATH` with one and the same path")
        path = header[1]
        creates = bool(_NEW_FILE.fullmatch(self.peek() or ""))
        if creates:
            self.take()
        index = _INDEX.fullmatch(self.take())
        if not index:
            raise self.error(
                f"expected `index OLD..NEW` for {path}; "
                "a patch may not rename, delete or change modes"
            )
        before = "--- /dev/null" if creates else f"--- a/{path}"
        for expected in (before, f"+++ b/{path}"):
            if self.take() != expected:
                raise self.error(f"expected `{expected}`")
        hunks, shift = [], 0
        while (self.peek() or "").startswith("@@"):
            hunks.append(self.hunk(shift, hunks[-1].after if hunks else -1))
            shift += len(hunks[-1].lines)
        if not hunks:
            raise self.error(f"no hunk for {path}")
        text = "\n".join(self.lines[start : self.at]) + "\n"
        return Change(path, index[1], index[2], creates, tuple(hunks), text)

    def hunk(self, shift: int, previous: int) -> Hunk:
        line = self.take()
        match = _HUNK.fullmatch(line)
        if not match:
            raise self.error(
                f"hunk header {line!r}: expected `@@ -N,0 +M,K @@` with nothing behind it. "
                "A patch only adds lines: no context, no removed line, no function text. "
                "`run/setup.sh --export NAME` writes it that way"
            )
        after, first, count = int(match[1]), int(match[2]), int(match[3] or 1)
        if after <= previous:
            raise self.error("hunks must be in the file's order")
        if first != after + shift + 1:
            raise self.error(f"the added lines start at {after + shift + 1}, not at {first}")
        added = []
        for _ in range(count):
            line = self.take()
            if not line.startswith("+"):
                raise self.error(f"expected an added line (`+`), found {line[:40]!r}")
            added.append(line[1:])
        following = self.peek()
        if following is not None and not following.startswith(("@@ ", "diff --git ")):
            self.at += 1
            raise self.error(f"a line too many after the hunk: {following[:40]!r}")
        return Hunk(after, tuple(added))


def offences(folder: Path) -> list[str]:
    """Everything in patches/NAME that breaks the law; needs no submodule."""
    found = []
    names = read_series(folder)
    if not (folder / SERIES).is_file():
        found.append(f"{folder.name}: there is no `{SERIES}` file")
    for name in sorted({name for name in names if names.count(name) > 1}):
        found.append(f"{folder.name}/{SERIES} lists {name} twice")
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file != folder / SERIES and file.name not in names:
            found.append(f"{folder.name}/{file.name} is not in {folder.name}/{SERIES}")
    blobs: dict[str, Change] = {}
    for name in dict.fromkeys(names):
        file = folder / name
        if not file.is_file():
            found.append(f"{folder.name}/{SERIES} lists {name}, which is not there")
            continue
        try:
            patch = load(file)
        except PatchError as error:
            found.append(str(error))
            continue
        where = f"{folder.name}/{name}"
        if FILL_IN in patch.prose:
            found.append(f"{where} still has the exporter's `{FILL_IN}` in its prose")
        elif len(patch.prose.split()) < MIN_WORDS:
            found.append(f"{where} does not open with its reason, at least {MIN_WORDS} words of it")
        for change in patch.changes:
            earlier = blobs.get(change.path)
            if earlier and not same_blob(earlier.new, change.old):
                found.append(
                    f"{where} expects blob {change.old} of {change.path}, "
                    f"but the patch before it leaves {earlier.new}"
                )
            blobs[change.path] = change
    return found
