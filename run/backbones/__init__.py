"""What run/ knows of the native codebases: one module and one object each, found by their names.

A module that is put here is a backbone: `run.backbones.get("edm")` is the object `BACKBONE` of edm.py.
"""

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
    """The backbone that samples the weights in a file, by its suffix; None for anything else."""
    found = (b for b in map(get, NAMES) if b.suffix and b.suffix == path.suffix)
    return next(found, None) if path.is_file() else None
