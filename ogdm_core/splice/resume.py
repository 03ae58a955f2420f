"""Exact resume: one state file beside the trainer's own, and every random state put back.

A trainer's own files may be cut short by a kill. Ours is written last, whole or not at all, and
keeps their sizes: it seals the checkpoint. What it holds, and where the data stood, is in
`resume_adm`, `resume_edm` and `resume_ldm`.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ..checkpoints import reading
from ..files import whole
from ..random import set_global_state


def save(path: str, state: dict[str, Any]) -> None:
    """torch.save, whole or not at all. A path with "://" is a bucket's, which blobfile writes."""
    with _blob(path, "wb") if "://" in path else whole(path) as file:
        torch.save(state, file)


def load(path: str) -> dict[str, Any]:
    """What `save` wrote, on the CPU; tensors and plain values only."""
    with reading(path), _blob(path, "rb") if "://" in path else open(path, "rb") as file:
        content = io.BytesIO(file.read()) if "://" in path else file
        return torch.load(content, map_location="cpu", weights_only=True)


def size(path: str) -> int:
    """A file's size in bytes, -1 if there is none."""
    if "://" in path:
        import blobfile

        return blobfile.stat(path).size if blobfile.exists(path) else -1
    return os.path.getsize(path) if os.path.isfile(path) else -1


def seal(folder: str, names: Iterable[str]) -> dict[str, int]:
    """The sizes of a checkpoint's files, to be kept in ours."""
    return {name: size(f"{folder}/{name}") for name in names}


def faults(folder: str, names: Iterable[str], sealed: Mapping[str, int]) -> list[str]:
    """What is wrong with the files of a checkpoint, in words; [] if it is complete.

    sealed   their sizes when they were saved; {} in states of earlier versions
    """
    found = {name: size(f"{folder}/{name}") for name in names}
    return [f"{name} is missing" for name, n in found.items() if n < 0] + [
        f"{name} is damaged ({n} of {sealed[name]} bytes)"
        for name, n in found.items()
        if n >= 0 and n != sealed.get(name, n)
    ]


def _blob(path: str, mode: Literal["rb", "wb"]) -> contextlib.AbstractContextManager:
    import blobfile

    return blobfile.BlobFile(path, mode)


def set_random(state: dict[str, Any]) -> None:
    """Puts back `ogdm_core.random.global_state()`, also as ADM's first state files spelt it.

    Those named numpy's generator in front of its state and held CUDA's state itself, or None.
    """
    cuda = state["cuda"]
    cuda = [cuda] if isinstance(cuda, Tensor) else cuda or []
    cuda = cuda if torch.cuda.is_available() else []
    set_global_state(state | {"cuda": cuda, "numpy": state["numpy"][-4:]})
