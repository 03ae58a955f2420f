"""The training loop behind `python -m ogdm_core.diffusers`.

diffusers and accelerate take seconds to import, so functions import them, after checking the flags.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import images as data_sets
from ..checkpoints import differences, format_differences, reading, stop_if_not_finite
from ..config import OGDMConfig
from ..discriminator import Discriminator
from ..files import atomic_write, check_writable, write_json, write_text
from ..flags import from_args
from ..observer import Observer
from ..progress import Progress
from ..random import generator_of
from ..samplers import sample
from .model import make_eps_fn, schedule_of, training_loss

CHECKPOINT = "checkpoint.pt"
EMA = 0.999
# Settings that may be changed on purpose when a run is continued.
FREE = {"lr", "seed", *(f"ogdm_{f.name}" for f in fields(OGDMConfig))} - {
    "ogdm_d_kind", "ogdm_d_width", "ogdm_d_mapping_lr",
}  # fmt: skip


def build_unet(
    images: data_sets.Images, channels: list[int], layers: int, classes: int, groups: int = 8,
    attention: int = 0, scale_shift: bool = False,
) -> Any:  # fmt: skip
    """A small UNet2DModel with attention in the middle, and at sizes of at most `attention`."""
    from diffusers import UNet2DModel

    attends = [images.size >> level <= attention for level in range(len(channels))]
    return UNet2DModel(
        sample_size=images.size,
        in_channels=images.channels,
        out_channels=images.channels,
        layers_per_block=layers,
        block_out_channels=tuple(channels),
        down_block_types=tuple("AttnDownBlock2D" if a else "DownBlock2D" for a in attends),
        up_block_types=tuple("AttnUpBlock2D" if a else "UpBlock2D" for a in attends[::-1]),
        resnet_time_scale_shift="scale_shift" if scale_shift else "default",
        norm_num_groups=groups,
        attention_head_dim=8,
        num_class_embeds=classes or None,
    )


def check_model(path: str) -> None:
    """Raises FileNotFoundError unless `path` is in diffusers' format or may be a hub name."""
    if not Path(path).exists() and path.count("/") != 1:
        raise FileNotFoundError(f"--model: no folder {path!r}, and it is not a hub name OWNER/NAME")
    if Path(path).exists() and not Path(path, "unet").is_dir():
        raise FileNotFoundError(f"--model: {path!r} has no unet/ folder; is it in diffusers' format?")


def load_model(path: str) -> tuple[Any, Any]:
    """(UNet2DModel, DDPMScheduler) from a diffusers folder or hub name."""
    check_model(path)
    from diffusers import DDPMScheduler, UNet2DModel

    return (
        UNet2DModel.from_pretrained(path, subfolder="unet"),
        DDPMScheduler.from_pretrained(path, subfolder="scheduler"),
    )


def choose_d(config: OGDMConfig, unet: torch.nn.Module, channels: int, size: int, classes: int) -> OGDMConfig:
    """The settings with D's kind in place of `auto`.

    The paper's D where the denoiser has more parameters than it, else the light one.
    """
    with torch.device("meta"):  # counts parameters without memory or random numbers
        paper = Discriminator(channels, size, classes, config.d_width)
    larger = parameters_of(unet) > parameters_of(paper)
    return replace(config, d_kind="paper" if larger else "light")


def parameters_of(module: torch.nn.Module) -> int:
    """The number of parameters."""
    return sum(p.numel() for p in module.parameters())


class Trainer:
    """One run: its model, its observer, its folder, which is not made if settings are bad.

    A run whose folder holds a checkpoint is continued from there.
    """

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
            self.unet = build_unet(self.images, channels, args.layers, classes, args.norm_groups,
                                   args.attention, args.scale_shift)  # fmt: skip
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
        if args.x0_weight > 1 and self.kind != "epsilon":
            raise ValueError(f"--x0-weight is for models that predict epsilon, not {self.kind}")
        device = self.accelerator.device
        self.unet.to(device).train()
        self.ema = EMAModel(
            self.unet.parameters(), decay=EMA if args.ema is None else args.ema,
            min_decay=args.ema or 0.0 if args.model else 0.0,  # 0: the average grows with the run
            model_cls=type(self.unet), model_config=self.unet.config, foreach=True,
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.unet.parameters(), lr=args.lr, foreach=True)
        self.ddp, self.optimizer = self.accelerator.prepare(self.unet, self.optimizer)
        self.observer = None
        if self.config:
            shape = (self.images.channels, self.images.size, self.classes)
            if self.config.d_kind == "auto":
                self.config = choose_d(self.config, self.unet, *shape)
            self.observer = Observer(self.config, self.schedule, *shape, device)
            mine, theirs = parameters_of(self.observer.D), parameters_of(self.unet)
            self.accelerator.print(f"D: {self.config.d_kind}, {mine:,} parameters; the denoiser has {theirs:,}")
        self.step = 0
        self.history: list[dict[str, float]] = []
        self.interrupted = False
        check_writable(args.output / CHECKPOINT)
        self._resume()
        self.board: Any = None
        if args.tensorboard and self.accelerator.is_main_process:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(args.output / "tensorboard", purge_step=self.step + 1)

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
            raise ValueError(f"--channels: {a.channels!r} is not allowed; give whole numbers like 24,32") from None
        if any(c < 1 or c % a.norm_groups for c in channels):
            raise ValueError(f"--norm-groups: {a.norm_groups} does not divide {channels}")
        return channels

    def train(self) -> bool:
        """Trains to the end; False if stopped before. Saves either way."""
        a, main = self.args, self.accelerator.is_main_process
        n, images = self.accelerator.num_processes, a.batch_size * a.accumulate
        self.accelerator.print(f"{n} process{'es' * (n > 1)}, {n * images} images per step")
        previous = {s: signal.signal(s, self._interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
        total, since = torch.zeros((), device=self.accelerator.device), self.step
        try:
            with Progress("step", a.steps, self.step, sys.stdout, quiet=not main) as progress:
                while self.step < a.steps and not self._stop_together():
                    total += self._one_step()
                    logged = self.step % a.log_every == 0 or self.step == a.steps
                    note = self._log(float(total) / (self.step - since)) if logged else None
                    progress.update(self.step, note, show=logged)
                    if logged:
                        total, since = total.zero_(), self.step
                        self._stop_if_not_finite()
                    if self.step % a.save_every == 0:
                        self.save()
        finally:
            for s, handler in previous.items():
                signal.signal(s, handler)
        self.save()
        return self.step >= a.steps

    def _log(self, transition: float) -> str:
        """Adds the means since the last call to the history; returns them in words."""
        means = {"transition": transition} | (self.observer.stats() if self.observer else {})
        self.history.append({"step": self.step, **means})
        for name, value in means.items() if self.board else ():
            self.board.add_scalar(name, value, self.step)
        return "  ".join(f"{name} {v:.3f}" for name, v in means.items() if name != "skipped")

    def _one_step(self) -> Tensor:
        """One optimiser step; returns L_transition. Its randomness is set by (seed, step, rank)."""
        a, device = self.args, self.accelerator.device
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        torch.manual_seed((a.seed * 1_000_003 + self.step) * 4096 + rank)
        n = a.batch_size
        index = data_sets.batch_index(len(self.images), n * a.accumulate, self.step, a.seed, rank, world)
        total = torch.zeros((), device=device)
        for i, part in enumerate(index.split(n)):
            x_0 = self.images.batch(part).to(device)
            if a.flip:
                mirrored = torch.rand(n, device=device) < 0.5
                x_0 = torch.where(mirrored[:, None, None, None], x_0.flip(3), x_0)
            label = None if self.labels is None else self.labels[part].to(device)
            cond = None if label is None else {"class_labels": label}
            t = torch.randint(1, self.schedule.T + 1, (n,), device=device)
            eps = torch.randn_like(x_0)
            last = i == a.accumulate - 1  # the one in which processes exchange their gradients
            sync = contextlib.nullcontext() if last else self.accelerator.no_sync(self.ddp)
            with sync, self.accelerator.autocast():
                loss, transition = training_loss(
                    self.ddp, x_0, eps, t, self.schedule, self.kind, cond, label, self.observer,
                    a.x0_weight,
                )  # fmt: skip
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
        with atomic_write(out / CHECKPOINT) as file:
            torch.save(state, file)
        self.ema.store(self.unet.parameters())
        self.ema.copy_to(self.unet.parameters())
        pipeline: Any = DDPMPipeline(unet=self.unet, scheduler=self.scheduler)
        pipeline.save_pretrained(out)
        if self.board:
            self.board.add_images("samples, Euler 10", self._samples(), self.step)
            self.board.flush()
        self.ema.restore(self.unet.parameters())
        command = [Path(sys.executable).name, "-m", "ogdm_core.diffusers", *sys.argv[1:]]
        write_json(out / "training.json", {
            "command": shlex.join(command), "step": self.step, "settings": self._identity(),
            "ogdm": self.config.to_dict() if self.config else None,
        })  # fmt: skip
        write_text(out / "log.jsonl", "".join(json.dumps(line) + "\n" for line in self.history))

    def _samples(self) -> Tensor:
        """16 images [16, C, H, W] in [0, 1] of the network as it is, from the same noise always."""
        device, shape = self.accelerator.device, (16, self.images.channels, *[self.images.size] * 2)
        noise = torch.randn(shape, generator=generator_of(self.args.seed, "samples")).to(device)
        cond = {"class_labels": torch.arange(16, device=device) % self.classes} if self.classes else None
        eps_fn = make_eps_fn(self.unet.eval(), self.schedule, self.kind, cond)
        x = sample(eps_fn, self.schedule.prior(noise), self.schedule, sampler="euler", nfe=10)
        self.unet.train()
        return x.clamp(-1, 1) / 2 + 0.5

    def _stop_if_not_finite(self) -> None:
        path = self.args.output / CHECKPOINT
        good = f"the last good checkpoint is {path}" if path.exists() else "there is no checkpoint"
        stop_if_not_finite(self.unet.parameters(), f"step {self.step}", lambda: good)

    def _identity(self) -> dict[str, Any]:
        """The settings of a run; those not in FREE must not change between stop and resume."""
        a = self.args
        keep = ("data", "size", "model", "batch_size", "accumulate", "lr", "ema", "seed", "flip",
                "mixed_precision", "x0_weight")  # fmt: skip
        return {name: getattr(a, name) for name in keep} | {
            "unet": None
            if a.model
            else [a.channels, a.layers, a.norm_groups, a.class_cond, a.attention, a.scale_shift],
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
        saved = {"x0_weight": 1.0} | state["run"]  # a file from before that flag lacks it
        differ = differences(_flat(saved), _flat(self._identity()))
        if fixed := set(differ) - FREE:
            raise ValueError(
                f"{path} was made with other settings ({format_differences(differ, fixed)}); repeat the first "
                "run's flags to continue it, or give another --output"
            )
        if differ:
            self.accelerator.print(f"continuing with other settings: {format_differences(differ)}")
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
