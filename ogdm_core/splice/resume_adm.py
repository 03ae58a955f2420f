"""Exact resume of openai/guided-diffusion, on every rank: ogdmNNNNNN.pt beside its own files.

It keeps D, the random states, the place in the data, the fp16 loss scale, the loss history of a
loss-aware schedule sampler, and the number of updates.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ..checkpoints import DamagedError
from ..distributed import gather
from ..random import global_state
from .resume import faults, seal, set_random, size
from .resume import load as read
from .resume import save as write


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

    def position(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {"start": self._start, "used": self._used}

    def go_to(self, position: dict[str, Any]) -> None:
        """Starts the saved pass again and skips what was used of it. Moves torch's generator."""
        if position["start"] is not None:
            torch.set_rng_state(position["start"])
        for _ in range(position["used"]):
            next(self)


def files(step: int, rates: Iterable[float]) -> list[str]:
    """The names of upstream's own files of a checkpoint."""
    ema = [f"ema_{rate}_{step:06d}.pt" for rate in rates]
    return [f"model{step:06d}.pt", *ema, f"opt{step:06d}.pt"]


def begin_save(loop) -> None:
    """Breaks the seal of a checkpoint that is about to be written again."""
    from guided_diffusion import train_util

    path = _path(train_util.get_blob_logdir(), loop.step + loop.resume_step)
    if dist.get_rank() == 0 and train_util.bf.exists(path):
        train_util.bf.remove(path)


def save(loop) -> None:
    """Writes ogdmNNNNNN.pt, after upstream's files: the observer, and what they leave out."""
    from guided_diffusion import logger, train_util

    ranks = gather({"random": global_state(), "data": loop.data.position()})
    if dist.get_rank() == 0:
        logger.log("saving the observer...")
        folder, step = train_util.get_blob_logdir(), loop.step + loop.resume_step
        write(_path(folder, step), {
            "observer": loop.observer.state_dict(),
            "updates": loop.updates,
            "lg_loss_scale": loop.mp_trainer.lg_loss_scale,
            "schedule_sampler": _sampler_state(loop.schedule_sampler),
            "batch_size": loop.batch_size,
            "ranks": ranks,
            "files": seal(folder, files(step, loop.ema_rate)),
        })  # fmt: skip


def newest(folder: str, rates: list[float], but: int = -1) -> str:
    """The newest complete checkpoint in a folder, in words, leaving out step `but`."""
    import blobfile as bf

    names = bf.listdir(folder) if bf.isdir(folder) else []
    found = (re.fullmatch(r"ogdm(\d{6,})\.pt", name) for name in names)
    for step in sorted((int(m[1]) for m in found if m), reverse=True):
        with contextlib.suppress(DamagedError):
            sealed = read(_path(folder, step)).get("files", {}) if step != but else None
            if sealed is not None and not faults(folder, files(step, rates), sealed):
                return f"the newest complete checkpoint is {folder}/model{step:06d}.pt"
    return f"there is no complete checkpoint in {folder}"


def check(model: str, rates: list[float]) -> dict[str, Any]:
    """The state beside the resumed model; ValueError where the checkpoint is not complete."""
    folder, name = os.path.split(model)
    folder = folder or "."
    match = re.fullmatch(r"model(\d{6,})\.pt", name)
    if not match:
        raise ValueError(
            f"--resume_checkpoint: {name} is not named modelNNNNNN.pt, so its step is not known; "
            f"{newest(folder, rates)}. To start from the weights alone: --init_checkpoint {model}"
        )
    step = int(match[1])
    path = _path(folder, step)
    wrong = [] if size(path) >= 0 else [f"{os.path.basename(path)} is missing"]
    state = {}
    if not wrong:
        try:
            state = read(path)
        except DamagedError as error:
            wrong = [str(error)]
    wrong = faults(folder, files(step, rates), state.get("files", {})) + wrong
    if wrong:
        raise ValueError(
            f"--resume_checkpoint: {model} is not complete: {', '.join(wrong)}. The run was "
            "stopped while it was saved, or --ema_rate differs, or it was trained without --ogdm; "
            f"{newest(folder, rates, but=step)}. To start from the weights alone, with a new "
            f"discriminator: --init_checkpoint {model}"
        )
    return state


def _path(folder: str, step: int) -> str:
    return f"{folder}/ogdm{step:06d}.pt"


def load(loop, state: dict[str, Any]) -> None:
    """Continues from the state beside the resumed model, as if never stopped.

    Upstream names a checkpoint by the step just done and would do that step again. From here
    on its step is counted from the run's start, so names, intervals and annealing go on. From
    model000000.pt, written after the first step, upstream would take the weights alone.
    """
    from guided_diffusion import logger

    if not loop.resume_step:
        loop._load_optimizer_state()
        loop.ema_params = [loop._load_ema_parameters(rate) for rate in loop.ema_rate]
    changed = loop.observer.load_state_dict(state["observer"])
    if changed:
        logger.log(f"observation guidance continues with other settings: {changed}")
    loop.mp_trainer.lg_loss_scale = state["lg_loss_scale"]
    _restore_sampler(loop.schedule_sampler, state["schedule_sampler"])
    loop.updates = loop.step = state["updates"]
    loop.resume_step = 0

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
    loop.data.go_to(rank["data"])
    set_random(rank["random"])


def _sampler_state(sampler) -> dict[str, Tensor]:
    """The loss history of a loss-aware schedule sampler; {} for the uniform one."""
    names = ("_loss_history", "_loss_counts")
    return {n: torch.tensor(getattr(sampler, n)) for n in names if hasattr(sampler, n)}


def _restore_sampler(sampler, state: dict[str, Tensor]) -> None:
    if sorted(state) != sorted(_sampler_state(sampler)):
        raise ValueError("--schedule_sampler: resume with the one that the run was started with")
    for name, value in state.items():
        getattr(sampler, name)[:] = value.numpy()
