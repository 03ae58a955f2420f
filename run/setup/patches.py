"""Patch files: one per upstream file, named after it, and the law that they obey.

patches/edm/training-training_loop.py.patch is for training/training_loop.py. It opens with its
reason, then adds lines and quotes none of upstream's:

    Why this patch exists, and why nothing gentler would do.

    diff --git a/training/training_loop.py b/training/training_loop.py
    index OLD..NEW 100644
    --- a/training/training_loop.py
    +++ b/training/training_loop.py
    @@ -12,0 +13,2 @@
    +two added
    +lines

OLD and NEW are the file's full blob names before and after, so a patch fits one upstream file and
its result can be verified.
"""

import hashlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

_HEADER = re.compile(
    r"(?P<prose>.*?)^(?P<diff>diff --git a/(?P<path>[^\n]+) b/(?P=path)\n"
    r"index (?P<old>[0-9a-f]{40})\.\.(?P<new>[0-9a-f]{40}) 100(?:644|755)\n"
    r"--- a/(?P=path)\n\+\+\+ b/(?P=path)\n(?P<hunks>@@ .*))\n\Z",
    re.MULTILINE | re.DOTALL,
)
_LAW = """\
A patch is its reason, then one `diff --git` of one upstream file with `index OLD..NEW MODE`, both
in full, then hunks `@@ -N,0 +M,K @@` with nothing behind the second @@ and `+` lines only: no
context, no removed line, no second file, no created, renamed or deleted one, no changed mode.
Leave upstream's lines as they are, and let an added line rebind or wrap what must behave differently.
See CONTRIBUTING.md; `run/setup.sh --export NAME` writes added lines that way."""


class PatchError(Exception):
    """A patch breaks the law, or does not fit; the message says where and what to do."""


@dataclass(frozen=True)
class Patch:
    """What one file under patches/ adds to one upstream file."""

    name: str  # edm/train.py.patch
    prose: str
    diff: str  # from `diff --git` on
    path: str  # of the upstream file
    old: str  # blobs before and after
    new: str
    hunks: dict[int, list[str]]  # {N: lines added after line N}

    @property
    def added(self) -> list[str]:
        """All added lines."""
        return [line for lines in self.hunks.values() for line in lines]

    def apply(self, original: bytes) -> bytes:
        """The patched file; raises PatchError if `original` is not the file it was made for."""
        if blob(original) != self.old:
            raise PatchError(
                f"{self.name} is for blob {self.old[:10]} of {self.path}, but here it is {blob(original)[:10]}.\n"
                "The patch was made for another upstream commit; see 'Moving a pin' in CONTRIBUTING.md"
            )
        lines = io.BytesIO(original).readlines()
        for after in sorted(self.hunks, reverse=True):
            lines[after:after] = [f"{line}\n".encode() for line in self.hunks[after]]
        result = b"".join(lines)
        if blob(result) != self.new:
            raise PatchError(
                f"{self.name} should leave blob {self.new[:10]} of {self.path}, but leaves {blob(result)[:10]}.\n"
                "It was edited by hand: apply it with `git apply --unidiff-zero`, then run `run/setup.sh --export`"
            )
        return result


def blob(content: bytes) -> str:
    """The name that git gives to a file's content."""
    header = b"blob %d\0" % len(content)
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()


def file_name(path: str) -> str:
    """The patch's name for an upstream file: a/b.py -> a-b.py.patch."""
    return path.replace("/", "-") + ".patch"


def load(folder: Path) -> list[Patch]:
    """Every patch of patches/NAME; raises PatchError."""
    return [read(file) for file in sorted(folder.glob("*.patch"))]


def read(file: Path) -> Patch:
    """Reads one patch; anything but its reason and added lines raises PatchError."""
    return parse(file.read_bytes().decode(), f"{file.parent.name}/{file.name}")


def parse(text: str, name: str) -> Patch:
    """Reads the text of patches/NAME strictly."""
    match = _HEADER.match(text)
    if not match:
        raise PatchError(f"{name} does not hold a patch that adds lines.\n{_LAW}")
    hunks: dict[int, list[str]] = {}
    found, expected = [], []
    for number, line in enumerate(match["hunks"].split("\n"), start=text.count("\n", 0, match.start("hunks")) + 1):
        if header := re.fullmatch(r"@@ -(\d+),0 \+\d+(?:,\d+)? @@", line):
            found.append(line)
            lines = hunks[int(header[1])] = []
        elif line.startswith("+"):
            lines.append(line[1:])
        else:
            raise PatchError(f"{name}:{number}: unexpected {line[:60]!r}.\n{_LAW}")
    for after in sorted(hunks):
        count = f",{len(hunks[after])}" if len(hunks[after]) > 1 else ""
        shift = sum(len(lines) for before, lines in hunks.items() if before < after)
        expected.append(f"@@ -{after},0 +{after + shift + 1}{count} @@")
    if found != expected:
        raise PatchError(f"{name}: the hunks' headers are {found}; with these lines they should be {expected}")
    prose, diff, path, old, new = match.group("prose", "diff", "path", "old", "new")
    return Patch(name, prose.strip(), f"{diff}\n", path, old, new, hunks)
