"""Random numbers that can be repeated: seeds made from a key, and the state of every generator."""

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch


def seed_of(*key: object) -> int:
    """A seed in [0, 2^56), a function of the whole key, as in seed_of(seed, rank, step)."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def generator_of(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A new generator, seeded with `seed_of(*key)`."""
    return torch.Generator(device).manual_seed(seed_of(*key))


def torch_state(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators that a forward pass on `device` may draw from."""
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *cuda]


def set_torch_state(states: list[torch.Tensor], device: torch.device) -> None:
    """Puts back what `torch_state` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


@contextlib.contextmanager
def replayed(states: list[torch.Tensor] | None, device: torch.device) -> Iterator[None]:
    """Draws as from `states`, or as they come if None; afterwards the state is as it was."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if states is not None:
            set_torch_state(states, device)
        yield


def global_state() -> dict[str, Any]:
    """The global random state of torch, CUDA, numpy and Python: tensors and plain values only."""
    _, keys, *numbers = cast(tuple, np.random.get_state())
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],
        "numpy": [torch.from_numpy(keys.astype(np.int64)), *numbers],
        "python": [version, list(internal), gauss],
    }


def set_global_state(state: dict[str, Any]) -> None:
    """Puts back what `global_state` returned, also as ADM's first state files spelt it.

    Those named numpy's generator in front of its state and held CUDA's state itself, or None.
    """
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"] is not None:
        cuda = state["cuda"]
        for saved in [cuda] if isinstance(cuda, torch.Tensor) else cuda:
            torch.cuda.set_rng_state(saved)
    keys, *numbers = state["numpy"][-4:]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *numbers))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
