"""Exact resume: one state file beside the trainer's own, and every random state put back.

What a file holds, and where the data stood, is in `resume_adm`, `resume_edm` and `resume_ldm`.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any, Literal

import torch
from torch import Tensor

from ..files import whole
from ..random import set_global_state


def save(path: str, state: dict[str, Any]) -> None:
    """torch.save, whole or not at all. A path with "://" is a bucket's, which blobfile writes."""
    with _blob(path, "wb") if "://" in path else whole(path) as file:
        torch.save(state, file)


def load(path: str) -> dict[str, Any]:
    """What `save` wrote, on the CPU; tensors and plain values only."""
    with _blob(path, "rb") if "://" in path else open(path, "rb") as file:
        content = io.BytesIO(file.read()) if "://" in path else file
        return torch.load(content, map_location="cpu", weights_only=True)


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
