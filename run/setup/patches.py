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

Every hunk is `@@ -N,0 +M[,K] @@` with `+` lines only. OLD and NEW are the file's full blob names
before and after, so a patch fits one upstream file and its result can be verified.
"""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

FILL_IN = "FILL IN"  # stands in the prose of a freshly exported patch until its author writes it
MIN_WORDS = 15  # two short sentences; less than this is a title, not a reason

_HEADER = re.compile(
    r"diff --git a/(?P<path>.+) b/(?P=path)\n"
    r"index (?P<old>[0-9a-f]{40})\.\.(?P<new>[0-9a-f]{40}) 100(?:644|755)\n"
    r"--- a/(?P=path)\n\+\+\+ b/(?P=path)\n"
)
_HUNK = re.compile(r"@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@")


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
                f"{self.name} is for blob {self.old[:10]} of {self.path}, but here it is "
                f"{blob(original)[:10]}.\nThe patch was made for another upstream commit; "
                "see 'Moving a pin' in CONTRIBUTING.md"
            )
        lines = io.BytesIO(original).readlines()
        for after in sorted(self.hunks, reverse=True):
            lines[after:after] = [f"{line}\n".encode() for line in self.hunks[after]]
        result = b"".join(lines)
        if blob(result) != self.new:
            raise PatchError(
                f"{self.name} should leave blob {self.new[:10]} of {self.path}, but leaves "
                f"{blob(result)[:10]}: it was edited by hand.\nApply it with "
                "`git apply --unidiff-zero` and let `run/setup.sh --export` write it anew"
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
    start = re.search(r"^(diff --git|--- |\+\+\+ |@@ )", text, re.MULTILINE)
    if not start:
        raise PatchError(f"{name}: no `diff --git` line: the patch changes nothing")
    prose, diff = text[: start.start()], text[start.start() :]
    header = _HEADER.match(diff)
    if not header:
        raise PatchError(
            f"{name}: expected `diff --git a/PATH b/PATH`, `index OLD..NEW MODE` with full blob "
            "names, `--- a/PATH` and `+++ b/PATH`, one and the same path; a patch may not create, "
            "rename or delete a file or change its mode"
        )
    at = (prose + header[0]).count("\n")
    lines = diff[header.end() :].removesuffix("\n").split("\n")
    hunks: dict[int, list[str]] = {}
    after, left = -1, 0
    for number, line in enumerate(lines, start=at + 1):
        where = f"{name}:{number}"
        if left:
            if not line.startswith("+"):
                raise PatchError(f"{where}: expected an added line (`+`), found {line[:40]!r}")
            hunks[after].append(line[1:])
            left -= 1
            continue
        hunk = _HUNK.fullmatch(line)
        if not hunk:
            raise PatchError(
                f"{where}: expected a hunk `@@ -N,0 +M,K @@` with nothing behind it, found "
                f"{line[:40]!r}. A patch adds lines to one file: no context, no removed line, no "
                "function text, no second file. `run/setup.sh --export NAME` writes it that way"
            )
        shift = sum(map(len, hunks.values()))
        previous, after, left = after, int(hunk[1]), int(hunk[3] or 1)
        if after <= previous:
            raise PatchError(f"{where}: hunks must be in the file's order")
        if int(hunk[2]) != after + shift + 1:
            raise PatchError(f"{where}: the added lines start at {after + shift + 1}")
        hunks[after] = []
    if left:
        raise PatchError(f"{name}: {left} added lines are missing at the end")
    return Patch(name, prose.strip(), diff, header["path"], header["old"], header["new"], hunks)


def offences(folder: Path) -> list[str]:
    """Everything in patches/NAME that breaks the law; needs no submodule."""
    found = []
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        where = f"{folder.name}/{file.relative_to(folder)}"
        if file.suffix != ".patch":
            found.append(f"{where} is not a patch")
            continue
        try:
            patch = read(file)
        except PatchError as error:
            found.append(str(error))
            continue
        if file != folder / file_name(patch.path):
            found.append(f"{where} is for {patch.path}; call it {file_name(patch.path)}")
        if FILL_IN in patch.prose:
            found.append(f"{where} still has the exporter's `{FILL_IN}` in its prose")
        elif len(patch.prose.split()) < MIN_WORDS:
            found.append(f"{where} does not open with its reason, at least {MIN_WORDS} words of it")
    return found
