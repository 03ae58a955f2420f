"""Exact resume of NVlabs/edm: ogdm-state-*.pt beside its own training-state-*.pt."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from torch.utils.data import Sampler

from ..checkpoints import compare, is_whole, listed, reading
from ..distributed import print_once
from .resume import faults, load, seal, size

# Options that a run cannot change; among them, ones that it can; and those of the resume itself.
FIXED = ("network_kwargs.", "loss_kwargs.", "ema_halflife_kimg")
FREE = ("dropout", "use_fp16")
NEW = ("run_dir", "resume_pkl", "resume_state_dump", "resume_kimg", "total_kimg", "seed")


def _parts(training_state: str | Path) -> tuple[str, list[str], str]:
    """A checkpoint's folder, upstream's two files, and ours."""
    path = Path(training_state)
    number = path.stem.rsplit("-", 1)[-1]
    names = [path.name, f"network-snapshot-{number}.pkl"]
    return str(path.parent), names, f"ogdm-state-{number}.pt"


def sealed(run_dir: str, nimg: int) -> dict[str, int]:
    """The sizes of upstream's files of the checkpoint that ours is written to, last."""
    folder, names, _ = _parts(f"{run_dir}/training-state-{nimg // 1000:06d}.pt")
    return seal(folder, names)


def read(training_state: str | Path) -> dict[str, Any]:
    """Our state beside a training state; ValueError says what is wrong with the checkpoint."""
    folder, names, ours = _parts(training_state)
    if size(f"{folder}/{ours}") < 0:
        raise ValueError(f"{folder}/{ours} is missing, and with it the discriminator")
    state = load(f"{folder}/{ours}")
    wrong = faults(folder, names, state.get("files", {}))
    wrong = wrong or [f"{n} is damaged" for n in names if not is_whole(f"{folder}/{n}")]
    if wrong:
        raise ValueError(f"the checkpoint {training_state} is not complete: {', '.join(wrong)}")
    return state


def newest(run_dir: str) -> str:
    """The newest complete checkpoint in a run's folder, in words."""
    for path in sorted(Path(run_dir).glob("training-state-*.pt"), reverse=True):
        with contextlib.suppress(ValueError):
            read(path)
            return f"the newest complete checkpoint is {path}"
    return f"there is no complete checkpoint in {run_dir}"


def check(training_state: str, options: dict[str, Any]) -> None:
    """Ends the command where --resume cannot continue, or has nothing to do.

    options   of upstream's training loop; those of the first run stand in training_options.json
    """
    folder = os.path.dirname(training_state) or "."
    try:
        state = read(training_state)
    except ValueError as error:
        raise click.ClickException(
            f"--resume: {error}; {newest(folder)}. Or start a new discriminator with "
            "--transfer=network-snapshot-*.pkl; or resume without --ogdm."
        ) from error
    total = options.get("total_kimg")
    if total is not None and state["nimg"] >= total * 1000:
        print_once(f"{training_state} is the end of a run of {total} kimg: nothing to do. A longer "
                   "--duration continues it.")  # fmt: skip
        raise click.exceptions.Exit(0)
    saved = Path(folder, "training_options.json")
    if not saved.is_file():
        return
    with reading(saved):
        theirs = _flat(json.loads(saved.read_text()))
    ours = _flat(json.loads(json.dumps(options)))
    differ = {n: v for n, v in compare(theirs, ours).items() if not n.startswith("ogdm.")}
    fixed = [n for n in differ if n.startswith(FIXED) and not n.endswith(FREE)]
    if fixed:
        raise click.ClickException(
            f"--resume: {listed(differ, fixed)}; give the flags that the run was started with"
        )
    if other := listed(differ, set(differ) - set(NEW)):
        print_once(f"OGDM: the run continues with other settings: {other}")


def _flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= (
            _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return flat


def load_state(ogdm: dict[str, Any] | None, training_state: str | None) -> dict[str, Any] | None:
    """The state file of the run that --resume continues; None without --resume or --ogdm."""
    if ogdm is None or not training_state:
        return None
    state = read(training_state)
    print_once(f'OGDM: loaded discriminator and random state beside "{training_state}"; skipping '
               f"{state['nimg'] / 1e6:g} million images takes 4 s per million. The run's own "
               f"seed, {state['seed']}, is used")  # fmt: skip
    return state


class Continued(Sampler):
    """A sampler from its item number `start` on; the items before it are drawn and dropped."""

    def __init__(self, sampler: Sampler, start: int):
        self.sampler, self.start = sampler, start

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(iter(self.sampler), self.start, None)
