"""Exact resume of CompVis/latent-diffusion. Upstream's checkpoints lack, and this callback saves:

    random state    of torch, numpy and Python on every rank: a resumed run would repeat the noise
                    of the first epoch
    data order      upstream shuffles with the global random state; in the middle of an epoch the
                    loader would start over
    image logger    which steps are still to be logged, since logging draws random numbers as well
    EMA             a checkpoint written at the end of a batch (`every_n_train_steps`) comes before
                    that batch's EMA update

Gradients of an unfinished accumulation are not kept: resume is exact from optimiser steps. Upstream saves in the middle
of a step when a signal or an error comes: after a signal this callback saves at the step's end, where it is exact. A
step that a validation follows is not: it draws random numbers, too. The run then ends after the next step.
"""

import os
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities.data import _set_sampler_epoch
from pytorch_lightning.utilities import rank_zero_warn
from torch.utils.data import Dataset

from .. import folder
from ..distributed import gather
from ..random import global_state, set_global_state
from ..sealed import FORMAT, strange


def known_by(images: Any) -> str:
    """What `folder.listed` says of upstream's list of files, or of the data set below; else the number of images."""
    count, below = f"{len(images)} images", images
    while isinstance(below, Dataset):
        labels = getattr(below, "labels", None)
        if isinstance(labels, dict) and len(files := list(map(str, labels.get("file_path_", ())))):
            return folder.listed(files, os.path.commonpath(files))
        below = next((getattr(below, name) for name in ("data", "base", "dataset") if hasattr(below, name)), None)
    return count


class ExactResume(pl.Callback):
    """Saves and restores what is listed above, through Lightning's own checkpoints."""

    trainer: pl.Trainer

    def __init__(self) -> None:
        self.epoch_began: dict[str, Any] = {}  # random state before the epoch's loader started
        self.saved: dict[str, Any] = {}  # from the checkpoint; empty once restored
        self.stop = folder.Stop()
        self.data = ""  # what rank 0 knows the images by
        self.waited = False  # for one step, after a signal
        self.wanted: str | None = None  # a file that upstream asked for in the middle of a step

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Keeps the trainer at hand: `state_dict` is called without it."""
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Called on every rank, or on rank 0 alone for a checkpoint that was asked of it alone."""
        if not hasattr(self, "trainer"):  # upstream saves after an error before the set-up, too
            return {}
        loop = self.trainer.fit_loop
        progress = loop.epoch_loop.batch_progress.current
        mine = {"now": global_state(), "epoch_began": self.epoch_began}
        return {
            "format": FORMAT,
            "ranks": [mine] if getattr(self.trainer, "alone", False) else gather(mine),
            "batches": progress.processed,
            "ema_is_due": progress.processed > progress.completed,
            "epoch_is_over": progress.processed >= loop.max_batches,
            "data": self.data,
            "log_steps": [list(c.log_steps) for c in self._image_loggers()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps the state until the loops are ready for it; ends the command where it is none of this version's."""
        if wrong := strange(state, "the checkpoint"):
            raise SystemExit(f"error: {'; '.join(wrong)}; continue another one, or with the version that wrote it")
        self.saved = state

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The first epoch's loader starts soon after this hook."""
        self.epoch_began = global_state()
        sets = getattr(trainer.datamodule, "datasets", {}) if trainer.is_global_zero else {}
        self.data = ", ".join(f"{name}: {known_by(images)}" for name, images in sets.items())

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restores the middle of an epoch; the end of one waits for the next to begin."""
        self.stop.listen()  # here, since Lightning has put its own handlers in place by now
        if not self.saved:
            return
        folder.named(self.saved.get("data"), self.data)
        if len(self.saved["ranks"]) != trainer.world_size:
            rank_zero_warn(
                f"the checkpoint has the random state of {len(self.saved['ranks'])} process(es), "
                f"this run has {trainer.world_size}: it goes on with other noise"
            )
            self.saved = {}
            return
        for callback, steps in zip(self._image_loggers(), self.saved["log_steps"], strict=False):
            callback.log_steps = list(steps)
        if self.saved["ema_is_due"]:
            pl_module.on_train_batch_end(None, None, 0)
        loop = trainer.fit_loop
        if not self.saved["epoch_is_over"]:
            self._fast_forward(loop)
            self._restore_now()
        elif loop.restarted_on_epoch_end:
            # With max_steps the loop ends the finished epoch once more, and would count it twice:
            # samplers would shuffle the next epoch with the number of the one after.
            loop.epoch_progress.current.processed -= 1
            loop.epoch_progress.total.processed -= 1
            loop.epoch_loop._batches_that_stepped -= 1

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes (or restores) the random state before the epoch's loader starts."""
        loop = trainer.fit_loop
        if self.saved:
            self._restore_now()
            self.epoch_began = global_state()
            if loop.is_resuming:  # the loop has started the loader already, and will not again
                iter(loop._data_fetcher)
        elif trainer.current_epoch > 0 and not loop.is_resuming:
            self.epoch_began = global_state()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Saves, where upstream or a signal has asked for it, at the end of an optimiser step.

        A signal waits for one step more where this one ends the epoch or a validation follows.
        """
        pl_module.half_done = False
        loop = trainer.fit_loop
        if loop._should_accumulate():
            return
        if self.wanted:
            trainer.save_alone(self.wanted)
            self.wanted = None
        stop, epoch = self.stop.together(pl_module.device), loop.epoch_loop
        ends = epoch.batch_progress.is_last_batch or epoch._should_check_val_fx(loop._data_fetcher)
        if stop and ends and not self.waited:
            self.waited = True
        elif stop:
            callback = trainer.checkpoint_callback
            last = callback.format_checkpoint_name({}, callback.CHECKPOINT_NAME_LAST)
            trainer.save_checkpoint(last, False)
            self.stop.leave(f"at step {trainer.global_step}; -r {last} continues from there")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Hands signals back."""
        self.stop.forget()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """As above."""
        self.stop.forget()

    def _fast_forward(self, loop) -> None:
        """Starts the epoch's loader as it was started, and skips the batches already seen."""
        self.epoch_began = self._mine()["epoch_began"]
        set_global_state(self.epoch_began)
        for loader in loop._combined_loader.flattened:
            _set_sampler_epoch(loader, loop.epoch_progress.current.processed)
        fetcher = loop._data_fetcher
        iter(fetcher)
        for _ in range(self.saved["batches"]):
            next(fetcher)
        fetcher.fetched = 0  # the loop adds the batches it has on its own count

    def _restore_now(self) -> None:
        set_global_state(self._mine()["now"])
        self.saved = {}

    def _mine(self) -> dict[str, Any]:
        return self.saved["ranks"][self.trainer.global_rank]

    def _image_loggers(self) -> list[pl.Callback]:
        return [c for c in self.trainer.callbacks if hasattr(c, "log_steps")]
