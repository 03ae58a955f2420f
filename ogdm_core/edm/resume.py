"""Exact resume of NVlabs/edm: ogdm-state-*.pt beside its own training-state-*.pt."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from torch.utils.data import Sampler

from .. import sealed
from ..checkpoints import differences, format_differences, reading
from ..distributed import print_once
from ..sealed import Checkpoint

# FIXED: prefixes of options that must not change. FREE: exceptions to FIXED. NEW: options that always differ on resume.
FIXED = ("network_kwargs.", "loss_kwargs.", "ema_halflife_kimg")
FREE = ("dropout", "use_fp16")
NEW = ("run_dir", "resume_pkl", "resume_state_dump", "resume_kimg", "total_kimg", "seed")


def checkpoint(folder: str, nimg: int) -> Checkpoint:
    """The checkpoint that upstream writes after `nimg` images."""
    return _of(f"{folder}/training-state-{nimg // 1000:06d}.pt")


def _of(training_state: str | Path) -> Checkpoint:
    """The checkpoint that a training-state-*.pt belongs to."""
    path = Path(training_state)
    number = path.stem.rsplit("-", 1)[-1]
    names = [path.name, f"network-snapshot-{number}.pkl"]
    return Checkpoint(str(path.parent), names, f"ogdm-state-{number}.pt")


def newest(run_dir: str) -> str:
    """The newest complete checkpoint in a run's folder, in words."""
    states = sorted(Path(run_dir).glob("training-state-*.pt"), reverse=True)
    return sealed.newest(map(_of, states), run_dir)


def check(training_state: str, options: dict[str, Any]) -> None:
    """Ends the command where --resume cannot continue, or has nothing to do.

    options   of upstream's training loop; those of the first run stand in training_options.json
    """
    folder = os.path.dirname(training_state) or "."
    try:
        state = _of(training_state).read()
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
        theirs = flat(json.loads(saved.read_text()))
    ours = flat(json.loads(json.dumps(options)))
    differ = {n: v for n, v in differences(theirs, ours).items() if not n.startswith("ogdm.")}
    fixed = [n for n in differ if n.startswith(FIXED) and not n.endswith(FREE)]
    if fixed:
        raise click.ClickException(
            f"--resume: {format_differences(differ, fixed)}; give the flags that the run was started with"
        )
    if other := format_differences(differ, set(differ) - set(NEW)):
        print_once(f"OGDM: the run continues with other settings: {other}")


def flat(options: dict[str, Any]) -> dict[str, Any]:
    """Options by name, those of a group as GROUP.NAME."""
    groups = {n: v if isinstance(v, dict) else {"": v} for n, v in options.items()}
    return {f"{n}.{k}".rstrip("."): v for n, group in groups.items() for k, v in group.items()}


def load_state(ogdm: dict[str, Any] | None, training_state: str | None) -> dict[str, Any] | None:
    """The state file of the run that --resume continues; None without --resume or --ogdm."""
    if ogdm is None or not training_state:
        return None
    state = _of(training_state).read()
    print_once(f'OGDM: loaded discriminator and random state beside "{training_state}"; skipping '
               f"{state['nimg'] / 1e6:g} million images takes 4 s per million. The run's own "
               f"seed, {state['seed']}, is used")  # fmt: skip
    return state


class SkipFirst(Sampler):
    """A sampler from its item number `start` on; the items before it are drawn and dropped."""

    def __init__(self, sampler: Sampler, start: int):
        self.sampler, self.start = sampler, start

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(iter(self.sampler), self.start, None)
