"""Trains or fine-tunes a diffusers `UNet2DModel`, with or without OGDM.

    python -m ogdm_core.trainer --data digits --model PATH --output OUT --ogdm
    accelerate launch -m ogdm_core.trainer ...        (several GPUs or processes)

Writes to OUT a folder that plain diffusers loads (`DDPMPipeline.from_pretrained(OUT)`), with the
EMA weights. `OUT/checkpoint.pt` holds the rest; Ctrl-C saves it, and the same command continues.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import torch

from .. import flags
from ..files import write_json
from ..observer import Observer
from ..splice.diffusers import schedule_of, training_loss
from . import images as data_sets

CHECKPOINT = "checkpoint.pt"


def parser() -> argparse.ArgumentParser:
    """Every flag of a run."""
    p = argparse.ArgumentParser(
        prog="python -m ogdm_core.trainer", description=__doc__.split("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = p.add_argument
    add("--data", default="digits", help="digits, mnist, an .npz or a folder (default: digits)")
    add("--size", type=int, help="image size, where the data can be resized")
    add("--output", required=True, type=Path, help="folder to write")
    add("--model", help="folder in diffusers' format, or a hub name; absent: from scratch")
    add("--channels", default="24,32", help="U-Net width per level, from scratch (default: 24,32)")
    add(
        "--layers", type=int, default=1, help="residual blocks per level, from scratch (default: 1)"
    )
    add("--norm-groups", type=int, default=8, help="groups of its norms, from scratch (default: 8)")
    add("--class-cond", action="store_true", help="train on the data's labels, from scratch")
    add("--steps", type=int, default=2000, help="optimiser steps in all (default: 2000)")
    add("--batch-size", type=int, default=64, help="images per process and step (default: 64)")
    add("--accumulate", type=int, default=1, help="microbatches per step (default: 1)")
    add("--lr", type=float, default=1e-4, help="learning rate (default: 1e-4)")
    add("--anneal", action="store_true", help="let both learning rates fall linearly to 0")
    add("--ema", type=float, default=0.999, help="decay of the weights' average (default: 0.999)")
    add("--flip", action="store_true", help="mirror images at random")
    add("--mixed-precision", choices=("no", "fp16", "bf16"), default="no")
    add("--seed", type=int, default=0, help="seed of data order and noise (default: 0)")
    add("--save-every", type=int, default=500, help="steps between checkpoints (default: 500)")
    add("--log-every", type=int, default=50, help="steps between lines of log.jsonl (default: 50)")
    flags.add_arguments(p)
    return p


def build_unet(
    images: data_sets.Images, channels: list[int], layers: int, classes: int, groups: int = 8
):
    """A small U-Net with attention in the middle."""
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


def load_model(path: str):
    """(unet, scheduler) from a diffusers folder or hub name."""
    from diffusers import DDPMScheduler, UNet2DModel

    if not Path(path).exists() and path.count("/") != 1:
        raise FileNotFoundError(f"--model: no folder {path!r}, and it is not a hub name OWNER/NAME")
    if Path(path).exists() and not (Path(path) / "unet").is_dir():
        raise FileNotFoundError(
            f"--model: {path!r} has no unet/ folder; is it in diffusers' format?"
        )
    return (
        UNet2DModel.from_pretrained(path, subfolder="unet"),
        DDPMScheduler.from_pretrained(path, subfolder="scheduler"),
    )


class Trainer:
    """One run: its model, its observer, its place on disk."""

    def __init__(self, args: argparse.Namespace):
        from accelerate import Accelerator
        from diffusers import DDPMScheduler
        from diffusers.training_utils import EMAModel

        self.args = args
        for name in (
            "steps", "batch_size", "accumulate", "save_every", "log_every", "norm_groups"
        ):  # fmt: skip
            if getattr(args, name) < 1:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag}: {getattr(args, name)} is not allowed; give 1 or more")
        self.config = flags.from_args(args)
        self.images = data_sets.load(args.data, args.size)
        self.accelerator = Accelerator(mixed_precision=args.mixed_precision)
        torch.manual_seed(args.seed)
        if args.model:
            self.unet, self.scheduler = load_model(args.model)
        else:
            channels = [int(c) for c in args.channels.split(",")]
            classes = self.images.classes if args.class_cond else 0
            if args.class_cond and not classes:
                raise ValueError(f"--class-cond: {args.data} has no labels")
            if any(c % args.norm_groups for c in channels):
                raise ValueError(f"--norm-groups: {args.norm_groups} does not divide {channels}")
            self.unet = build_unet(self.images, channels, args.layers, classes, args.norm_groups)
            self.scheduler = DDPMScheduler(clip_sample=False)
        have = (self.unet.config.in_channels, self.unet.config.sample_size)
        if have != (self.images.channels, self.images.size):
            raise ValueError(
                f"the model wants {have[0]} channels at {have[1]}x{have[1]}, the data has "
                f"{self.images.channels} at {self.images.size}x{self.images.size}; see --size"
            )
        self.classes = self.unet.config.num_class_embeds or 0
        if self.classes and self.images.labels is None:
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
        self.observer = self.config and Observer(
            self.config, self.schedule, self.images.channels, self.images.size, self.classes, device
        )
        self.step = 0
        self.history: list[dict] = []
        self.interrupted = False

    def train(self) -> bool:
        """Trains to the end; False if stopped before. Saves either way."""
        self._resume()
        previous = {s: signal.signal(s, self._interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            with Progress(self) as progress:
                while self.step < self.args.steps and not self._stop_together():
                    transition = self._one_step()
                    progress.update(transition)
                    if self.step % self.args.save_every == 0:
                        self.save()
        finally:
            for s, handler in previous.items():
                signal.signal(s, handler)
        self.save()
        return self.step >= self.args.steps

    def _one_step(self) -> torch.Tensor:
        """One optimiser step. Its randomness is a function of (seed, step, rank)."""
        a, device = self.args, self.accelerator.device
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        torch.manual_seed((a.seed * 1_000_003 + self.step) * 4096 + rank)
        n = a.batch_size
        index = data_sets.batch_index(
            len(self.images), n * a.accumulate, self.step, a.seed, rank, world
        )
        total = 0.0
        for i in range(a.accumulate):
            part = index[i * n : (i + 1) * n]
            x_0 = self.images.batch(part).to(device)
            if a.flip:
                mirrored = torch.rand(n, device=device) < 0.5
                x_0 = torch.where(mirrored[:, None, None, None], x_0.flip(3), x_0)
            label = self.images.labels[part].to(device) if self.classes else None
            t = torch.randint(1, self.schedule.T + 1, (n,), device=device)
            eps = torch.randn_like(x_0)
            last = i == a.accumulate - 1
            with contextual_sync(self.accelerator, self.ddp, last), self.accelerator.autocast():
                loss, transition = training_loss(
                    self.ddp, x_0, eps, t, self.schedule, self.kind, label, self.observer
                )
                self.accelerator.backward(loss / a.accumulate)
            total = total + transition / a.accumulate
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
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return
        out = self.args.output
        out.mkdir(parents=True, exist_ok=True)
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
        partial = out / (CHECKPOINT + ".part")
        torch.save(state, partial)
        os.replace(partial, out / CHECKPOINT)
        self._export(out)
        with open(out / "log.jsonl", "w") as log:
            log.writelines(json.dumps(line) + "\n" for line in self.history)

    def _export(self, out: Path) -> None:
        from diffusers import DDPMPipeline

        self.ema.store(self.unet.parameters())
        self.ema.copy_to(self.unet.parameters())
        DDPMPipeline(unet=self.unet, scheduler=self.scheduler).save_pretrained(out)
        self.ema.restore(self.unet.parameters())
        write_json(out / "training.json", {
            "command": shlex.join([Path(sys.executable).name, "-m", "ogdm_core.trainer",
                                   *sys.argv[1:]]),
            "step": self.step, "settings": self._identity(),
            "ogdm": self.config.to_dict() if self.config else None,
        })  # fmt: skip

    def _identity(self) -> dict:
        """The settings that must not change between stop and resume."""
        keep = ("data", "size", "model", "batch_size", "accumulate", "lr", "ema", "seed", "flip",
                "mixed_precision")  # fmt: skip
        a = self.args
        built = [a.channels, a.layers, a.norm_groups, a.class_cond]
        return {name: getattr(self.args, name) for name in keep} | {
            "unet": None if a.model else built,
            # the slope of annealing depends on the length
            "anneal": self.args.steps if self.args.anneal else None,
            "ogdm": self.config.to_dict() if self.config else None,
            "processes": self.accelerator.num_processes,
        }

    def _resume(self) -> None:
        path = self.args.output / CHECKPOINT
        if not path.exists():
            return
        state = torch.load(path, map_location=self.accelerator.device, weights_only=True)
        theirs, ours = state["run"], self._identity()
        for name, value in ours.items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"{path} was made with {name} = {theirs.get(name)!r}, this run has {value!r}; "
                    "repeat the first run's flags to continue it, or give another --output"
                )
        self.unet.load_state_dict(state["unet"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.ema.shadow_params = [p.to(self.accelerator.device) for p in state["ema"]]
        self.ema.optimization_step = state["ema_steps"]
        if self.observer:
            self.observer.load_state_dict(state["observer"])
        if self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.step, self.history = state["step"], state["history"]
        if self.accelerator.is_main_process:
            print(f"continuing {path} at step {self.step} of {self.args.steps}")

    def _stop_together(self) -> bool:
        """True on every process once one of them was interrupted, at the same step."""
        if self.accelerator.num_processes == 1:
            return self.interrupted
        flag = torch.tensor(float(self.interrupted), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum") > 0)

    def _interrupt(self, number, frame) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True


def contextual_sync(accelerator, model, last: bool):
    """Gradients are exchanged between processes in the last microbatch only."""
    import contextlib

    return contextlib.nullcontext() if last else accelerator.no_sync(model)


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
        self.total, self.count, self.start = 0.0, 0, time.perf_counter()

    def __enter__(self):
        t = self.trainer
        name = "OGDM" if t.config else "plain"
        self.bar.start()
        self.task = self.bar.add_task(name, total=t.args.steps, completed=t.step, note="")
        return self

    def __exit__(self, *exc):
        self.bar.stop()

    def update(self, transition: torch.Tensor) -> None:
        """Counts one step; reads the losses back from the device every `log_every` steps."""
        t = self.trainer
        self.total, self.count = self.total + transition, self.count + 1
        note = {}
        if t.step % t.args.log_every == 0 or t.step == t.args.steps:
            speed = self.count / (time.perf_counter() - self.start)
            line = {"step": t.step, "transition": float(self.total) / self.count}
            line |= t.observer.stats() if t.observer else {}
            t.history.append(line)
            text = "  ".join(
                f"{k} {v:.3f}" for k, v in line.items() if k not in ("step", "skipped")
            )
            note = {"note": f"{text}  {speed:.1f} step/s"}
            if not self.console.is_terminal:
                self.console.print(f"step {t.step}/{t.args.steps}  {note['note']}", soft_wrap=True)
            self.total, self.count, self.start = 0.0, 0, time.perf_counter()
        self.bar.update(self.task, completed=t.step, **note)


def main(argv: list[str] | None = None) -> int:
    """Trains; returns the exit code: 0 when done, 130 when stopped before."""
    p = parser()
    args = p.parse_args(argv)
    try:
        trainer = Trainer(args)
        finished = trainer.train()
    except (ValueError, FileNotFoundError, ImportError) as error:
        p.error(str(error))
    if not finished:
        if trainer.accelerator.is_main_process:
            print(f"stopped at step {trainer.step}; the same command continues from there")
        return 130
    return 0
