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

import hashlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

FILL_IN = "FILL IN"  # stands in the prose of a freshly exported patch until its author writes it
MIN_WORDS = 15  # two short sentences; less than this is a title, not a reason

_PATCH = re.compile(
    r"(?P<prose>.*?)^(?P<diff>diff --git a/(?P<path>.+) b/(?P=path)\n"
    r"index (?P<old>[0-9a-f]{40})\.\.(?P<new>[0-9a-f]{40}) 100(?:644|755)\n"
    r"--- a/(?P=path)\n\+\+\+ b/(?P=path)\n"
    r"(?P<hunks>(?:@@ -[0-9]+,0 \+[0-9,]+ @@\n(?:\+[^\n]*\n)+)+))",
    re.MULTILINE | re.DOTALL,
)
_LAW = """\
A patch is its reason, then one `diff --git` of one upstream file with `index OLD..NEW MODE`, both
in full, then hunks `@@ -N,0 +M,K @@` with nothing behind the second @@ and `+` lines only: no
context, no removed line, no second file, no created, renamed or deleted one, no changed mode.
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
    match = _PATCH.match(text)
    if not match:
        raise PatchError(f"{name} does not hold a patch that adds lines.\n{_LAW}")
    if rest := text[match.end() :]:
        line = text.count("\n", 0, match.end()) + 1
        raise PatchError(f"{name}:{line}: unexpected {rest.splitlines()[0][:40]!r}.\n{_LAW}")
    hunks: dict[int, list[str]] = {}
    shift = 0
    for hunk in re.split(r"^(?=@@)", match["hunks"], flags=re.MULTILINE)[1:]:
        header, *lines = hunk.removesuffix("\n").split("\n")
        after = int(re.match(r"@@ -(\d+)", header)[1])
        count = f",{len(lines)}" if len(lines) > 1 else ""
        expected = f"@@ -{after},0 +{after + shift + 1}{count} @@"
        if header != expected:
            raise PatchError(f"{name}: {header!r} should be {expected!r}")
        if after <= max(hunks, default=-1):
            raise PatchError(f"{name}: {header!r}: hunks must be in the file's order")
        hunks[after] = [line[1:] for line in lines]
        shift += len(lines)
    prose, diff, path, old, new = match.group("prose", "diff", "path", "old", "new")
    return Patch(name, prose.strip(), diff, path, old, new, hunks)


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
