"""Exact resume of openai/guided-diffusion, on every rank: ogdmNNNNNN.pt beside its own files.

It keeps D, the random states, the place in the data, the fp16 loss scale, the loss history of a
loss-aware schedule sampler, and the number of updates.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from .. import sealed
from ..distributed import gather
from ..folder import named
from ..random import global_state, set_global_state
from ..sealed import Checkpoint, blobfile
from .compat import refusals


class ReplayableData:
    """An endless stream of batches that reports its position and can return to it.

    A torch DataLoader fixes a whole pass over the data (order, and its workers' seeds) by draws
    from torch's global generator when the pass starts, and draws nothing afterwards. So the
    generator's state at the start of the pass and the number of batches used since are enough.
    """

    def __init__(self, batches: Iterator):
        self._batches = batches
        self._start: Tensor | None = None
        self._used = 0

    def __iter__(self) -> ReplayableData:
        return self

    def __next__(self) -> Any:
        before = torch.get_rng_state()
        batch = next(self._batches)
        if not torch.equal(before, torch.get_rng_state()):
            self._start, self._used = before, 0
        self._used += 1
        return batch

    def place(self) -> dict[str, Any]:
        """This rank's random state and its position in the data: plain values, for a checkpoint."""
        return {"random": global_state(), "data": {"start": self._start, "used": self._used}}

    def go_to(self, position: dict[str, Any]) -> None:
        """Starts the saved pass again and skips what was used of it. Moves torch's generator."""
        if position["start"] is not None:
            torch.set_rng_state(position["start"])
        for _ in range(position["used"]):
            next(self)


def checkpoint(folder: str, step: int, rates: Iterable[float]) -> Checkpoint:
    """The checkpoint of a step; upstream writes one file for each of its EMA's rates."""
    ema = [f"ema_{rate}_{step:06d}.pt" for rate in rates]
    names = [f"model{step:06d}.pt", *ema, f"opt{step:06d}.pt"]
    return Checkpoint(folder, names, f"ogdm{step:06d}.pt")


def save(loop, upstream: Callable[[], None], folder: str, logger: Any) -> None:
    """Upstream's files, then ogdmNNNNNN.pt: the observer, and what they leave out."""
    here = checkpoint(folder, loop.step + loop.resume_step, loop.ema_rate)
    if dist.get_rank() == 0:
        here.unseal()
    upstream()
    ranks = gather(loop.place)
    if dist.get_rank() == 0:
        here.save({
            "observer": loop.observer.state_dict(),
            "updates": loop.observer.steps,
            "lg_loss_scale": loop.mp_trainer.lg_loss_scale,
            "schedule_sampler": _sampler_state(loop.schedule_sampler),
            "batch_size": loop.batch_size,
            "images": loop.fingerprint,
            "log": [{name: float(value) for name, value in sums.items()} for sums in _log(logger)],
            "ranks": ranks,
        })  # fmt: skip


def newest(folder: str, rates: Iterable[float]) -> str:
    """The newest complete checkpoint in a folder, in words."""
    names = blobfile().listdir(folder) if blobfile().isdir(folder) else []
    found = (re.fullmatch(r"ogdm(\d{6,})\.pt", name) for name in names)
    steps = sorted((int(m[1]) for m in found if m), reverse=True)
    return sealed.newest((checkpoint(folder, step, rates) for step in steps), folder)


@refusals()
def check(model: str, rates: list[float]) -> dict[str, Any]:
    """The state beside the resumed model; ValueError where the checkpoint is not complete."""
    folder, name = os.path.split(model)
    folder = folder or "."
    match = re.fullmatch(r"model(\d{6,})\.pt", name)
    try:
        if not match:
            raise ValueError(f"{name} is not named modelNNNNNN.pt, so its step is not known")
        return checkpoint(folder, int(match[1]), rates).read()
    except ValueError as error:
        why = "The run was stopped while it was saved, or --ema_rate differs, or it was trained "
        raise ValueError(
            f"--resume_checkpoint: {error}. {why + 'without --ogdm; ' if match else ''}"
            f"{newest(folder, rates)}. To start from the weights alone, with a new discriminator: "
            f"--init_checkpoint {model}"
        ) from error


@refusals()
def load(loop, state: dict[str, Any], logger: Any) -> None:
    """Continues from the state beside the resumed model, as if never stopped.

    Upstream names a checkpoint by the step just done and would do that step again. From here
    on its step is counted from the run's start, so names, intervals and annealing go on. From
    model000000.pt, written after the first step, upstream would take the weights alone.
    """
    if not loop.resume_step:
        loop._load_optimizer_state()
        loop.ema_params = [loop._load_ema_parameters(rate) for rate in loop.ema_rate]
    changed = loop.observer.load_state_dict(state["observer"])
    if changed:
        logger.log(f"observation guidance continues with other settings: {changed}")
    named(state.get("images"), loop.fingerprint)
    for sums, saved in zip(_log(logger), state.get("log", ()), strict=False):
        sums.update(saved)
    loop.mp_trainer.lg_loss_scale = state["lg_loss_scale"]
    _restore_sampler(loop.schedule_sampler, state["schedule_sampler"])
    loop.step, loop.resume_step = state["updates"], 0

    here = (dist.get_world_size(), loop.batch_size)
    there = (len(state["ranks"]), state["batch_size"])
    if here != there:
        logger.warn(
            f"saved by {there[0]} ranks of batch {there[1]}, now {here[0]} of {here[1]}: "
            "the order of the data and the noise start anew"
        )
        return
    rank = state["ranks"][dist.get_rank()]
    logger.log(f"going back to batch {rank['data']['used']} of its pass over the data...")
    loop.replayed.go_to(rank["data"])
    set_global_state(rank["random"])


def _log(logger: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Upstream's means since the last line of the log, and how many values they are of."""
    return logger.get_current().name2val, logger.get_current().name2cnt


def _sampler_state(sampler) -> dict[str, Tensor]:
    """The loss history of a loss-aware schedule sampler; {} for the uniform one."""
    names = ("_loss_history", "_loss_counts")
    return {n: torch.tensor(getattr(sampler, n)) for n in names if hasattr(sampler, n)}


def _restore_sampler(sampler, state: dict[str, Tensor]) -> None:
    if sorted(state) != sorted(_sampler_state(sampler)):
        raise ValueError("--schedule_sampler: resume with the one that the run was started with")
    for name, value in state.items():
        getattr(sampler, name)[:] = value.numpy()
