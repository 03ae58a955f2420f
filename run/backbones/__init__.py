"""What run/ knows of the native codebases: one module and one object each, found by their names.

A module that is put here is a backbone: `run.backbones.get("edm")` is the object `BACKBONE` of edm.py.
"""

import zipfile
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

from .base import Backbone

NAMES = tuple(sorted(file.stem for file in Path(__file__).parent.glob("[a-z]*.py") if file.stem != "base"))


@cache
def get(name: str) -> Backbone:
    """The backbone of that name."""
    return import_module(f"{__name__}.{name}").BACKBONE


def reader_of(path: Path) -> Backbone | None:
    """The backbone that samples the weights in a file, by its suffix and its mark; None for anything else."""
    found = [b for b in map(get, NAMES) if b.suffix and b.suffix == path.suffix]
    if not found or not path.is_file():
        return None
    content = _pickle_of(path)
    return max((b for b in found if b.mark in content), key=lambda b: len(b.mark), default=None)


def _pickle_of(path: Path) -> bytes:
    """The beginning of the pickle in a file, which may be torch's archive."""
    with suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith("data.pkl"):
                with archive.open(name) as file:
                    return file.read(1 << 20)
    with path.open("rb") as file:
        return file.read(1 << 20)
