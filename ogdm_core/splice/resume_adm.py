"""Exact resume of openai/guided-diffusion, on every rank: ogdmNNNNNN.pt beside its own files.

It keeps D, the random states, the place in the data, the fp16 loss scale, the loss history of a
loss-aware schedule sampler, and the number of updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ..distributed import gather
from ..random import global_state
from .resume import load as read
from .resume import save as write
from .resume import set_random


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


def save(loop) -> None:
    """Writes ogdmNNNNNN.pt: the observer, and what else upstream's own files leave out."""
    from guided_diffusion import logger, train_util

    ranks = gather({"random": global_state(), "data": loop.data.position()})
    if dist.get_rank() == 0:
        logger.log("saving the observer...")
        name = f"ogdm{loop.step + loop.resume_step:06d}.pt"
        write(train_util.bf.join(train_util.get_blob_logdir(), name), {
            "observer": loop.observer.state_dict(),
            "updates": loop.updates,
            "lg_loss_scale": loop.mp_trainer.lg_loss_scale,
            "schedule_sampler": _sampler_state(loop.schedule_sampler),
            "batch_size": loop.batch_size,
            "ranks": ranks,
        })  # fmt: skip


def load(loop) -> None:
    """Continues from the ogdmNNNNNN.pt beside the resumed model, as if never stopped.

    Upstream names a checkpoint by the step just done and would do that step again. From here
    on its step is counted from the run's start, so names, intervals and annealing go on.
    """
    from guided_diffusion import logger, train_util

    bf = train_util.bf
    model = train_util.find_resume_checkpoint() or loop.resume_checkpoint
    path = bf.join(bf.dirname(model), f"ogdm{loop.resume_step:06d}.pt")
    if not bf.exists(path):
        raise FileNotFoundError(
            f"--resume_checkpoint: {path} is missing. It holds the discriminator and is "
            "written beside the model when --ogdm is on; copy it there to continue. To add "
            f"observation guidance to a model trained without it: --init_checkpoint {model}"
        )
    if not bf.exists(bf.join(bf.dirname(model), f"opt{loop.resume_step:06d}.pt")):
        logger.warn("the optimizer's opt*.pt is not beside the model: its moments start anew")
    logger.log(f"loading the observer from {path}...")
    state = read(path)
    loop.observer.load_state_dict(state["observer"])
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
