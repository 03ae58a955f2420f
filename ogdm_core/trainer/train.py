"""The training loop behind `python -m ogdm_core.trainer`.

diffusers and accelerate take seconds to import, so functions import them, after checking the flags.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoints import compare, listed, reading, stop_if_not_finite
from ..config import OGDMConfig
from ..files import check_writable, whole, write_json, write_text
from ..flags import from_args
from ..observer import Observer
from ..splice.diffusers import schedule_of, training_loss
from . import images as data_sets

CHECKPOINT = "checkpoint.pt"
# Settings that may be changed on purpose when a run is continued.
FREE = {"lr", "seed", *(f"ogdm_{f.name}" for f in fields(OGDMConfig))} - {
    "ogdm_d_kind", "ogdm_d_width", "ogdm_d_mapping_lr",
}  # fmt: skip


def build_unet(
    images: data_sets.Images, channels: list[int], layers: int, classes: int, groups: int = 8
) -> Any:
    """A small UNet2DModel with attention in the middle."""
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=images.size,
        in_channels=images.channels,
        out_channels=images.channels,
        layers_per_block=layers,
        block_out_channels=tuple(channels),
        down_block_types=("DownBlock2D",) * len(channels),
        up_block_types=("UpBlock2D",) * len(channels),
        norm_num_groups=groups,
        attention_head_dim=8,
        num_class_embeds=classes or None,
    )


def check_model(path: str) -> None:
    """Raises FileNotFoundError unless `path` is in diffusers' format or may be a hub name."""
    if not Path(path).exists() and path.count("/") != 1:
        raise FileNotFoundError(f"--model: no folder {path!r}, and it is not a hub name OWNER/NAME")
    if Path(path).exists() and not Path(path, "unet").is_dir():
        raise FileNotFoundError(
            f"--model: {path!r} has no unet/ folder; is it in diffusers' format?"
        )


def load_model(path: str) -> tuple[Any, Any]:
    """(UNet2DModel, DDPMScheduler) from a diffusers folder or hub name."""
    check_model(path)
    from diffusers import DDPMScheduler, UNet2DModel

    return (
        UNet2DModel.from_pretrained(path, subfolder="unet"),
        DDPMScheduler.from_pretrained(path, subfolder="scheduler"),
    )


class Trainer:
    """One run: its model, its observer, its folder, which is not made if settings are bad."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.config = from_args(args, "diffusers")
        channels = self._check_flags()
        self.images = data_sets.load(args.data, args.size)
        if args.class_cond and not args.model and not self.images.classes:
            raise ValueError(f"--class-cond: {args.data} has no labels")

        from accelerate import Accelerator
        from diffusers import DDPMScheduler
        from diffusers.training_utils import EMAModel

        self.accelerator = Accelerator(mixed_precision=args.mixed_precision)
        torch.manual_seed(args.seed)
        if args.model:
            self.unet, self.scheduler = load_model(args.model)
        else:
            if self.images.size % 2 ** (len(channels) - 1):
                raise ValueError(
                    f"--channels: {len(channels)} levels halve {self.images.size}x"
                    f"{self.images.size} images {len(channels) - 1} times, which does not come out "
                    "even; give fewer, or another --size"
                )
            classes = self.images.classes if args.class_cond else 0
            self.unet = build_unet(self.images, channels, args.layers, classes, args.norm_groups)
            self.scheduler = DDPMScheduler(clip_sample=False)
        have = (self.unet.config.in_channels, self.unet.config.sample_size)
        if have != (self.images.channels, self.images.size):
            raise ValueError(
                f"the model wants {have[0]} channels at {have[1]}x{have[1]}, the data has "
                f"{self.images.channels} at {self.images.size}x{self.images.size}; see --size"
            )
        self.classes = self.unet.config.num_class_embeds or 0
        self.labels = self.images.labels if self.classes else None
        if self.classes and self.labels is None:
            raise ValueError(f"the model is class-conditional and {args.data} has no labels")
        self.schedule = schedule_of(self.scheduler)
        self.kind = self.scheduler.config.prediction_type
        device = self.accelerator.device
        self.unet.to(device).train()
        self.ema = EMAModel(
            self.unet.parameters(), decay=args.ema,
            min_decay=args.ema if args.model else 0.0,  # a good start needs no warm-up
            model_cls=type(self.unet), model_config=self.unet.config, foreach=True,
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.unet.parameters(), lr=args.lr, foreach=True)
        self.ddp, self.optimizer = self.accelerator.prepare(self.unet, self.optimizer)
        shape = (self.images.channels, self.images.size, self.classes)
        self.observer = (
            Observer(self.config, self.schedule, *shape, device) if self.config else None
        )
        self.step = 0
        self.history: list[dict[str, float]] = []
        self.interrupted = False
        check_writable(args.output / CHECKPOINT)

    def _check_flags(self) -> list[int]:
        """Raises for what the flags alone can get wrong; returns the U-Net's widths."""
        a = self.args
        there = next(p for p in (a.output, *a.output.absolute().parents) if p.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise ValueError(f"--output: cannot write {a.output}; {there} is no writable folder")
        if a.model:
            check_model(a.model)
            return []
        try:
            channels = [int(c) for c in a.channels.split(",")]
        except ValueError:
            raise ValueError(
                f"--channels: {a.channels!r} is not allowed; give whole numbers like 24,32"
            ) from None
        if any(c < 1 or c % a.norm_groups for c in channels):
            raise ValueError(f"--norm-groups: {a.norm_groups} does not divide {channels}")
        return channels

    def train(self) -> bool:
        """Trains to the end; False if stopped before. Saves either way."""
        self._resume()
        n, images = self.accelerator.num_processes, self.args.batch_size * self.args.accumulate
        self.accelerator.print(f"{n} process{'es' * (n > 1)}, {n * images} images per step")
        previous = {s: signal.signal(s, self._interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            with Progress(self) as progress:
                while self.step < self.args.steps and not self._stop_together():
                    transition = self._one_step()
                    if progress.update(transition):
                        self._stop_if_not_finite()
                    if self.step % self.args.save_every == 0:
                        self.save()
        finally:
            for s, handler in previous.items():
                signal.signal(s, handler)
        self.save()
        return self.step >= self.args.steps

    def _one_step(self) -> Tensor:
        """One optimiser step; returns L_transition. Its randomness is set by (seed, step, rank)."""
        a, device = self.args, self.accelerator.device
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        torch.manual_seed((a.seed * 1_000_003 + self.step) * 4096 + rank)
        n = a.batch_size
        index = data_sets.batch_index(
            len(self.images), n * a.accumulate, self.step, a.seed, rank, world
        )
        total = torch.zeros((), device=device)
        for i, part in enumerate(index.split(n)):
            x_0 = self.images.batch(part).to(device)
            if a.flip:
                mirrored = torch.rand(n, device=device) < 0.5
                x_0 = torch.where(mirrored[:, None, None, None], x_0.flip(3), x_0)
            label = None if self.labels is None else self.labels[part].to(device)
            t = torch.randint(1, self.schedule.T + 1, (n,), device=device)
            eps = torch.randn_like(x_0)
            last = i == a.accumulate - 1  # the one in which processes exchange their gradients
            sync = contextlib.nullcontext() if last else self.accelerator.no_sync(self.ddp)
            with sync, self.accelerator.autocast():
                loss, transition = training_loss(
                    self.ddp, x_0, eps, t, self.schedule, self.kind, label, self.observer
                )
                self.accelerator.backward(loss / a.accumulate)
            total += transition / a.accumulate
        scale = 1 - self.step / a.steps if a.anneal else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = a.lr * scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.step(self.unet.parameters())
        if self.observer:
            self.observer.step(scale)
        self.step += 1
        return total

    # ---- on disk ------------------------------------------------------------------------------

    def save(self) -> None:
        """checkpoint.pt (to continue) and the EMA model in diffusers' format (to use)."""
        from diffusers import DDPMPipeline

        self.accelerator.wait_for_everyone()
        self._stop_if_not_finite()
        if not self.accelerator.is_main_process:
            return
        out = self.args.output
        state = {
            "step": self.step,
            "unet": self.unet.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ema": self.ema.state_dict()["shadow_params"],
            "ema_steps": self.ema.optimization_step,
            "observer": self.observer.state_dict() if self.observer else None,
            "scaler": self.accelerator.scaler.state_dict() if self.accelerator.scaler else None,
            "history": self.history,
            "run": self._identity(),
        }
        with whole(out / CHECKPOINT) as file:
            torch.save(state, file)
        self.ema.store(self.unet.parameters())
        self.ema.copy_to(self.unet.parameters())
        pipeline: Any = DDPMPipeline(unet=self.unet, scheduler=self.scheduler)
        pipeline.save_pretrained(out)
        self.ema.restore(self.unet.parameters())
        command = [Path(sys.executable).name, "-m", "ogdm_core.trainer", *sys.argv[1:]]
        write_json(out / "training.json", {
            "command": shlex.join(command), "step": self.step, "settings": self._identity(),
            "ogdm": self.config.to_dict() if self.config else None,
        })  # fmt: skip
        write_text(out / "log.jsonl", "".join(json.dumps(line) + "\n" for line in self.history))

    def _stop_if_not_finite(self) -> None:
        path = self.args.output / CHECKPOINT
        good = f"the last good checkpoint is {path}" if path.exists() else "there is no checkpoint"
        stop_if_not_finite(self.unet.parameters(), f"step {self.step}", lambda: good)

    def _identity(self) -> dict[str, Any]:
        """The settings of a run; those not in FREE must not change between stop and resume."""
        a = self.args
        keep = ("data", "size", "model", "batch_size", "accumulate", "lr", "ema", "seed", "flip",
                "mixed_precision")  # fmt: skip
        return {name: getattr(a, name) for name in keep} | {
            "unet": None if a.model else [a.channels, a.layers, a.norm_groups, a.class_cond],
            "anneal": a.steps if a.anneal else None,  # the slope depends on the length
            "ogdm": self.config.to_dict() if self.config else None,
            "processes": self.accelerator.num_processes,
        }

    def _resume(self) -> None:
        path = self.args.output / CHECKPOINT
        if not path.exists():
            return
        again = f"delete it to start over, or go on from the last model: --model {path.parent}"
        with reading(path, again):
            state = torch.load(path, map_location=self.accelerator.device, weights_only=True)
        differ = compare(_flat(state["run"]), _flat(self._identity()))
        if fixed := set(differ) - FREE:
            raise ValueError(
                f"{path} was made with other settings ({listed(differ, fixed)}); repeat the first "
                "run's flags to continue it, or give another --output"
            )
        if differ:
            self.accelerator.print(f"continuing with other settings: {listed(differ)}")
        self.unet.load_state_dict(state["unet"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.ema.shadow_params = [p.to(self.accelerator.device) for p in state["ema"]]
        self.ema.optimization_step = state["ema_steps"]
        if self.observer:
            self.observer.load_state_dict(state["observer"])
        if self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.step, self.history = state["step"], state["history"]
        self.accelerator.print(f"continuing {path} at step {self.step} of {self.args.steps}")

    # ---- Ctrl-C -------------------------------------------------------------------------------

    def _stop_together(self) -> bool:
        """True on every process once one of them was interrupted, at the same step."""
        if self.accelerator.num_processes == 1:
            return self.interrupted
        flag = torch.tensor(float(self.interrupted), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum") > 0)

    def _interrupt(self, number: int, frame: Any) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True


def _flat(run: dict[str, Any]) -> dict[str, Any]:
    """A run's settings with those of OGDM among them."""
    ogdm = run["ogdm"] or {}
    return run | {"ogdm": bool(ogdm)} | {f"ogdm_{name}": value for name, value in ogdm.items()}


class Progress:
    """A progress bar with losses, D's accuracy and speed; plain lines without a terminal."""

    def __init__(self, trainer: Trainer):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.trainer = trainer
        self.console = Console(quiet=not trainer.accelerator.is_main_process)
        self.bar = Bar(
            TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
            console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip
        name = "OGDM" if trainer.config else "plain"
        self.task = self.bar.add_task(
            name, total=trainer.args.steps, completed=trainer.step, note=""
        )
        self._begin()

    def _begin(self) -> None:
        self.total, self.count, self.start = torch.zeros(()), 0, time.perf_counter()

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bar.stop()

    def update(self, transition: Tensor) -> bool:
        """Counts one step; reads the losses back every `log_every` steps, and then returns True."""
        t = self.trainer
        self.total, self.count = self.total + transition, self.count + 1
        logged = t.step % t.args.log_every == 0 or t.step == t.args.steps
        if logged:
            speed = self.count / (time.perf_counter() - self.start)
            line = {"step": t.step, "transition": float(self.total) / self.count}
            line |= t.observer.stats() if t.observer else {}
            t.history.append(line)
            shown = [f"{k} {v:.3f}" for k, v in line.items() if k not in ("step", "skipped")]
            note = "  ".join([*shown, f"{speed:.1f} step/s"])
            self.bar.update(self.task, note=note)
            if not self.console.is_terminal:
                self.console.print(f"step {t.step}/{t.args.steps}  {note}", soft_wrap=True)
            self._begin()
        self.bar.update(self.task, completed=t.step)
        return logged
