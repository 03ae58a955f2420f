"""Exact resume of NVlabs/edm: ogdm-state-*.pt beside its own training-state-*.pt."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import Sampler

from ..distributed import print_once
from .resume import load


def state_beside(training_state: str) -> Path:
    """The path of our state file, beside upstream's."""
    path = Path(training_state)
    return path.with_name(path.name.replace("training-state-", "ogdm-state-"))


def load_state(ogdm: dict[str, Any] | None, training_state: str | None) -> dict[str, Any] | None:
    """The state file of the run that --resume continues; None without --resume or --ogdm."""
    if ogdm is None or not training_state:
        return None
    path = state_beside(training_state)
    state = load(str(path))
    print_once(f'OGDM: loaded discriminator and random state from "{path}"; skipping '
               f"{state['nimg'] / 1e6:g} million images takes 4 s per million")  # fmt: skip
    return state


class Continued(Sampler):
    """A sampler from its item number `start` on; the items before it are drawn and dropped."""

    def __init__(self, sampler: Sampler, start: int):
        self.sampler, self.start = sampler, start

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(iter(self.sampler), self.start, None)
