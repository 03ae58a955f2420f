"""Exact resume: one state file beside the trainer's own.

A trainer's own files may be cut short by a kill. Ours is written last, whole or not at all, and
keeps their sizes: it seals the checkpoint. What it holds, and where the data stood, is in each
backbone's own `resume`.
"""

import contextlib
import io
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from . import trust
from .checkpoints import DamagedError, is_whole, reading
from .files import atomic_write

FORMAT = 1  # of our file; those of earlier versions have no number
COUNTS = ("updates", "nimg", "tick", "batches")  # in it, of what has been done


class Checkpoint(NamedTuple):
    """One checkpoint: upstream's files in a folder, and ours, which seals them."""

    folder: str
    names: list[str]  # the first is the one that a user names
    ours: str

    def __str__(self) -> str:
        return f"{self.folder}/{self.names[0]}"

    def sizes(self) -> dict[str, int]:
        """The size of each of upstream's files."""
        return {name: size(f"{self.folder}/{name}") for name in self.names}

    def save(self, state: dict[str, Any]) -> None:
        """Writes ours, when upstream's files are there."""
        save(f"{self.folder}/{self.ours}", state | {"files": self.sizes(), "format": FORMAT})

    def read(self) -> dict[str, Any]:
        """Our state; ValueError names every file that is missing or damaged."""
        path, state, wrong = f"{self.folder}/{self.ours}", {}, []
        if size(path) < 0:
            wrong = [f"{self.ours} is missing, and with it the discriminator"]
        else:
            try:
                state = load(path)
            except DamagedError as error:
                wrong = [str(error)]
        wrong += strange(state, self.ours)
        sealed = state.get("files", {})  # absent in states of earlier versions
        for name, n in self.sizes().items():
            if n < 0:
                wrong += [f"{name} is missing"]
            elif n != sealed.get(name, n):
                wrong += [f"{name} is damaged ({n} of {sealed[name]} bytes)"]
            elif "://" not in path and not is_whole(f"{self.folder}/{name}"):
                wrong += [f"{name} is damaged"]
        if wrong:
            raise ValueError(f"{self} is not complete: {', '.join(wrong)}")
        return state

    def unseal(self) -> None:
        """Removes ours, where upstream's files are about to be written again."""
        path = f"{self.folder}/{self.ours}"
        if size(path) >= 0:
            blobfile().remove(path) if "://" in path else os.remove(path)


def strange(state: Mapping[str, Any], name: str) -> list[str]:
    """Why the state in the file `name` is none of this version's, in words."""
    newer = state.get("format", 0) > FORMAT
    wrong = [f"{name} has format {state['format']}, and this version reads up to {FORMAT}"] if newer else []
    return wrong + [f"{name} is at {n} {value}" for n, value in state.items() if n in COUNTS and value < 0]


def newest(checkpoints: Iterable[Checkpoint], folder: str) -> str:
    """The first complete one, in words."""
    for checkpoint in checkpoints:
        with contextlib.suppress(ValueError):
            checkpoint.read()
            return f"the newest complete checkpoint is {checkpoint}"
    return f"there is no complete checkpoint in {folder}"


def save(path: str, state: dict[str, Any]) -> None:
    """torch.save, whole or not at all. A path with "://" is a bucket's, which blobfile writes."""
    with blobfile().BlobFile(path, "wb") if "://" in path else atomic_write(path) as file:
        torch.save(state, file)


def load(path: str) -> dict[str, Any]:
    """What `save` wrote, on the CPU; tensors and plain values only."""
    source: Any = path
    with reading(path):
        if "://" in path:
            source = io.BytesIO(blobfile().BlobFile(path, "rb").read())
        return trust.load(source, map_location="cpu", weights_only=True)


def size(path: str) -> int:
    """A file's size in bytes, -1 if there is none."""
    if "://" in path:
        return blobfile().stat(path).size if blobfile().exists(path) else -1
    return os.path.getsize(path) if os.path.isfile(path) else -1


def blobfile() -> Any:
    """The package by which guided-diffusion reads and writes files; its extra alone brings it."""
    import blobfile

    return blobfile
