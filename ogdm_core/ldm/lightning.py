"""Lightning 1.4's interface on Lightning 2: what latent-diffusion's `main.py` calls and 2.x lacks.

`install()` puts them where upstream looks. One reason per shim, written at the shim.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.loggers.tensorboard import _TENSORBOARD_AVAILABLE
from pytorch_lightning.trainer.states import TrainerStatus
from pytorch_lightning.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch.utils._pytree import tree_map_only

from .. import checkpoints, folder, trust
from ..distributed import print_once
from .resume import ExactResume

# Options that 1.4 called differently. `gpus` and `accelerator` need more than a name: `translate`.
RENAMED = {
    "replace_sampler_ddp": "use_distributed_sampler",
    "checkpoint_callback": "enable_checkpointing",
    "num_processes": "devices",
}
# Objects, not values: upstream builds these itself and hands them over.
OBJECTS = ("self", "logger", "callbacks", "plugins")
# Arguments that 1.4 passed to hooks and 2.x does not always.
DROPPED = {"dataloader_idx": 0, "outputs": None}


def install() -> None:
    """Puts the shims where upstream imports them from. Calling it twice changes nothing."""
    # Upstream: `from pytorch_lightning.utilities.distributed import rank_zero_only`; the module
    # was folded into `pytorch_lightning.utilities`.
    name = "pytorch_lightning.utilities.distributed"
    module = types.ModuleType(name, "Stand-in for a module that Lightning 2 folded away.")
    module.rank_zero_only = rank_zero_only
    sys.modules.setdefault(name, module)
    # Upstream: `from pytorch_lightning.trainer import Trainer`.
    pl.trainer.Trainer = Trainer
    # Upstream: `pl.loggers.TestTubeLogger`, and the same by name in its default logger config.
    pl.loggers.TestTubeLogger = TestTubeLogger


class TestTubeLogger(TensorBoardLogger):
    """Upstream's default, whose package is gone: TensorBoard's, or CSV where that is absent."""

    def __new__(cls, *args, **kwargs):
        if _TENSORBOARD_AVAILABLE:
            return super().__new__(cls)
        return CSVLogger(*args, **kwargs)


class Trainer(pl.Trainer):
    """Lightning 2's trainer with 1.4's constructor and attributes, as far as upstream uses them."""

    resume_from_checkpoint: str | None = None
    alone = False  # true while rank 0 writes a checkpoint that the other ranks do not write

    @classmethod
    def add_argparse_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """2.x builds no command line any more; upstream's is upstream's flags plus these."""
        group = parser.add_argument_group("pl.Trainer")
        group.add_argument("--gpus", default=None, help="device ids, as in 0,1 or 0, (processes "
                           "on a machine without CUDA)")  # fmt: skip
        group.add_argument("--resume_from_checkpoint", default=None, help="checkpoint to continue")
        group.add_argument("--trust", action=trust.TrustFlag)
        for name, parameter in inspect.signature(pl.Trainer.__init__).parameters.items():
            if name not in OBJECTS:
                boolean = "bool" in str(parameter.annotation)
                switch: dict[str, Any] = {"nargs": "?", "const": True} if boolean else {}
                group.add_argument(f"--{name}", type=_literal, default=parameter.default, **switch)
        return parser

    @classmethod
    def from_argparse_args(cls, args: argparse.Namespace, **kwargs) -> Trainer:
        """A trainer from 1.4's options (`args`) and ready-made objects (`kwargs`)."""
        options = dict(vars(args))
        resume = options.pop("resume_from_checkpoint", None)
        options = translate(options)
        callbacks = [OldHooks(), *kwargs.pop("callbacks", [])]
        if options["accelerator"] == "cpu":
            # Upstream adds this one whatever it runs on; all it does is ask CUDA for numbers.
            callbacks = [c for c in callbacks if type(c).__name__ != "CUDACallback"]
        trainer = cls(**options, callbacks=callbacks, **kwargs)
        trainer.resume_from_checkpoint = resume
        return trainer

    def fit(self, model: pl.LightningModule, *args, **kwargs) -> None:
        """`resume_from_checkpoint` was the trainer's; in 2.x the path goes to `fit`."""
        if "optimizer_idx" in inspect.signature(model.training_step).parameters:
            raise ValueError(
                f"{type(model).__name__} alternates several optimisers by `optimizer_idx`, which "
                "Lightning 2 dropped: diffusion models train here, first stages do not. Name a "
                "trained one in model.params.first_stage_config.params.ckpt_path"
            )
        for owner in (model, *self.callbacks):
            fill_dropped_arguments(owner)
        path = kwargs.setdefault("ckpt_path", self.resume_from_checkpoint)
        if path and os.path.isfile(path) and not checkpoints.is_whole(path):
            others = set(Path(path).parent.rglob("*.ckpt")) - {Path(path)}
            raise checkpoints.DamagedError(f"{path} is damaged; {checkpoints.newest_whole(others)}")
        super().fit(model, *args, **kwargs)

    def test(self, model: pl.LightningModule, *args, **kwargs) -> list:
        """1.4 had nothing to do for a model without `test_step`; 2.x raises."""
        if not is_overridden("test_step", model):
            rank_zero_info(f"{type(model).__name__} has no test_step: nothing to test")
            return []
        return super().test(model, *args, **kwargs)

    def save_checkpoint(self, filepath, weights_only=None, storage_options=None) -> None:
        """2.x waits for all ranks here, upstream calls it on rank 0 only (USR1, errors, ctrl-C).

        Lightning's own calls, which every rank makes, always say `weights_only`; upstream's never. Where our model
        trains, upstream's wait for the end of the step, and a step that an error ended half done is not saved.
        """
        exact = self._exact()
        if weights_only is not None:
            return self._write(filepath, weights_only, storage_options)
        if exact and self.state.status == TrainerStatus.RUNNING:
            exact.wanted = filepath
        elif exact and self.lightning_module.half_done:
            print_once(f"the step was half done: {filepath} is not written, and what was saved before stays")
        else:
            self.save_alone(filepath)

    def save_alone(self, filepath) -> None:
        """By rank 0 without the others."""
        with patch.object(self, "alone", self.world_size > 1), patch.object(self.strategy, "barrier"):
            self._write(filepath)

    def _write(self, filepath, weights_only=None, storage_options=None) -> None:
        """2.x's; where our model trains, whole or not at all, and the file that it replaces stays beside it."""
        if self._exact() is None or "://" in str(filepath):
            return super().save_checkpoint(filepath, weights_only, storage_options)
        path = Path(filepath)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        super().save_checkpoint(part, weights_only, storage_options)
        if self.is_global_zero:
            folder.keep_previous(path)
            os.replace(part, path)

    def _exact(self) -> ExactResume | None:
        """The callback of our model, which brings it."""
        return next((c for c in self.callbacks if isinstance(c, ExactResume)), None)

    @property
    def root_gpu(self) -> int | None:
        """Renamed to the strategy's root device."""
        return self.strategy.root_device.index

    @property
    def training_type_plugin(self):
        """Renamed to strategy."""
        return self.strategy


def translate(options: dict[str, Any]) -> dict[str, Any]:
    """1.4's trainer options under 2.x's names.

    gpus "0,1" with accelerator "ddp" (upstream sets it) is 2.x's accelerator "gpu", devices [0, 1],
    strategy "ddp". Where there is no CUDA, or with accelerator "cpu", it is as many CPU processes
    (gloo). Without gpus, 1.4 ran on the CPU; 2.x would take whatever it finds.
    """
    options = {RENAMED.get(name, name): value for name, value in options.items()}
    known = inspect.signature(pl.Trainer.__init__).parameters
    for name in sorted(set(options) - set(known) - {"gpus"}):
        rank_zero_warn(f"lightning.trainer.{name} is no option of Lightning 2: ignored")
        del options[name]
    gpus = options.pop("gpus", None)
    ddp = options.get("accelerator") == "ddp"
    if ddp:
        del options["accelerator"]
    if gpus is not None:
        ids = _device_ids(gpus)
        on_gpu = options.get("accelerator") != "cpu" and torch.cuda.is_available()
        if not on_gpu:
            ids = max(1, len(ids)) if isinstance(ids, list) else 1
            rank_zero_info(f"--gpus {gpus}: no CUDA, so {ids} process(es) on the CPU")
        options["accelerator"], options["devices"] = "gpu" if on_gpu else "cpu", ids
    options.setdefault("accelerator", "cpu")
    if options["accelerator"] == "cpu" and options.get("devices", "auto") == "auto":
        options["devices"] = 1
    if options.get("strategy", "auto") == "auto" and options.get("devices") not in (1, "1"):
        # 1.4's "ddp" looked for unused parameters; 2.x's does not unless asked.
        options["strategy"] = "ddp_find_unused_parameters_true"
    # 1.4 validated under no_grad; tensors made in inference mode cannot be trained with later.
    options.setdefault("inference_mode", False)
    return options


def _device_ids(gpus: Any) -> list[int] | int:
    """ "0,1" or "0," or [0, 1] to ids; -1 stays -1, which means all."""
    if isinstance(gpus, str):
        gpus = [int(part) for part in gpus.split(",") if part.strip()]
    elif isinstance(gpus, int):
        gpus = [gpus] if gpus == -1 else range(gpus)
    return -1 if list(gpus) == [-1] else list(gpus)


def _literal(text: str) -> Any:
    """A command-line value as a truth value, a number, None or text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def fill_dropped_arguments(owner: Any) -> None:
    """Lets hooks that still ask for `dataloader_idx` or `outputs` be called without them."""
    for name in dir(type(owner)):
        if name in vars(owner) or not name.endswith(("_batch_start", "_batch_end", "_epoch_end")):
            continue
        hook = getattr(owner, name)
        for last in [*inspect.signature(hook).parameters.values()][-1:]:
            if last.name in DROPPED and last.default is last.empty:
                setattr(owner, name, _filled(hook, DROPPED[last.name]))


def _filled(hook, value: Any):
    wanted = len(inspect.signature(hook).parameters)
    return functools.wraps(hook)(lambda *args: hook(*args, *[value][: wanted - len(args)]))


def _save_last_always(callback: ModelCheckpoint) -> None:
    """Has `last.ckpt` written whenever a checkpoint may be, as 1.4 did.

    2.6 leaves the file alone unless the model is among the best, so that a run's last model would
    be lost, and a resumed run would start from an earlier one.
    """

    def then_last(hook: Callable, epoch_end: bool) -> Callable:
        def both(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            hook(trainer, pl_module)
            its_moment = callback._should_save_on_train_epoch_end(trainer) == epoch_end
            saved = callback._should_skip_saving_checkpoint(trainer)
            if callback.save_last and its_moment and not saved:
                callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))

        return both

    for name in ("on_train_epoch_end", "on_validation_end"):
        setattr(callback, name, then_last(getattr(callback, name), name == "on_train_epoch_end"))


class OldHooks(pl.Callback):
    """Calls what 2.x no longer calls, and mends what torch has become stricter about."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """`on_pretrain_routine_start` is gone: upstream writes its configs there.

        On rank 0 only. On the others upstream moves its log folder out of the way, which 1.4 gave
        each rank; in 2.x they share rank 0's.
        """
        for callback in trainer.callbacks:
            hook = getattr(callback, "on_pretrain_routine_start", None)
            if hook is not None and trainer.global_rank == 0:
                hook(trainer, pl_module)
        # 1.4 wrote `last.ckpt` over whatever was there; 2.x, unless the file is its own, writes
        # `last-v1.ckpt` beside it, which `-r RUN` then misses.
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                last = callback.CHECKPOINT_NAME_LAST
                callback.last_model_path = callback.format_checkpoint_name({}, last)
                _save_last_always(callback)
        # Plain tensors stay on the CPU when a module moves, and torch no longer lets an index on
        # another device look into them.
        for name in ("logvar", "cond_ids"):
            table = getattr(pl_module, name, None)
            if isinstance(table, torch.Tensor) and not isinstance(table, torch.nn.Parameter):
                setattr(pl_module, name, table.to(pl_module.device))

    def on_exception(self, trainer, pl_module, exception: BaseException) -> None:
        """`on_keyboard_interrupt` is gone: upstream saves `last.ckpt` there."""
        if isinstance(exception, KeyboardInterrupt):
            for callback in trainer.callbacks:
                hook = getattr(callback, "on_keyboard_interrupt", None)
                if hook is not None:
                    hook(trainer, pl_module)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint: dict) -> None:
        """Upstream's scheduler computes in numpy, and torch.load refuses numpy's numbers."""
        for key in ("optimizer_states", "lr_schedulers", "callbacks"):
            checkpoint[key] = tree_map_only(np.generic, np.generic.item, checkpoint.get(key))
