"""The training loop behind `python -m ogdm_core.diffusers`."""

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import sys
import uuid
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel
from safetensors import SafetensorError
from tqdm import tqdm

from .. import folder, trust
from .. import images as data_sets
from ..checkpoints import DamagedError, Guard, all_finite, differences, format_differences, is_whole, reading
from ..config import OGDMConfig
from ..distributed import say_who_the_environment_awaits
from ..files import atomic_write, check_writable, write_json, write_text
from ..flags import from_args
from ..observer import Observer
from ..random import generator_of
from ..samplers import sample
from .model import check_model, load_model, make_eps_fn, schedule_of, training_loss

CHECKPOINT = "checkpoint.pt"
FORMAT = 1  # of that file; those of earlier versions have no number
EMA = 0.999
# Settings that may be changed on purpose when a run is continued.
FREE = {"lr", "seed", "images", *(f"ogdm_{f.name}" for f in fields(OGDMConfig))} - {
    "ogdm_d_kind", "ogdm_d_width", "ogdm_d_mapping_lr",
}  # fmt: skip


def build_unet(
    images: data_sets.Images, channels: list[int], layers: int, classes: int, groups: int = 8,
    attention: int = 0, scale_shift: bool = False,
) -> Any:  # fmt: skip
    """A small UNet2DModel with attention in the middle, and at sizes of at most `attention`."""
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


class Trainer:
    """One run: its model, its observer, its folder, which is not made if settings are bad.

    A run whose folder holds a checkpoint is continued from there.
    """

    def __init__(self, args: argparse.Namespace):
        folder.outlive_output()
        self.args = args
        self.config = from_args(args, "diffusers")
        self.step, self.saved = 0, -1
        self.whole = True  # whether nothing of the next step has been done
        self.history: list[dict[str, float]] = []
        channels = self._check_flags()
        self.images = data_sets.load(args.data, args.size)
        self._fingerprint = folder.fingerprint(args.data)
        self._build(channels)
        folder.agree(self._identity() | {n: getattr(args, n) for n in ("steps", "save_every", "log_every")})
        check_writable(args.output / CHECKPOINT)
        folder.claim(args.output)
        self.total, self.since = torch.zeros((), device=self.accelerator.device), 0  # of the losses since that step
        self._resume()
        self.guard = Guard(self.unet.parameters, lambda: self.ema.shadow_params, self._good)
        self._report()

    def _report(self) -> None:
        """Starts or continues --report-to's tracker."""
        to, out = self.args.report_to, self.args.output
        if to == "none":
            return
        if to == "wandb" and self.accelerator.is_main_process:
            file = out / "wandb-id"  # by which a resumed run finds its own
            if not file.exists():
                write_text(file, uuid.uuid4().hex)
            own = {"id": file.read_text(), "resume": "allow", "name": out.name, "dir": str(out)}
        else:
            own = {"purge_step": self.step + 1} if to == "tensorboard" else {}
        project = "tensorboard" if to == "tensorboard" else "ogdm"  # the folder, or wandb's project
        self.accelerator.init_trackers(project, init_kwargs={to: own})

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

    def _build(self, channels: list[int]) -> None:
        """The network with its average and its optimiser, the noise schedule, the observer."""
        a, images = self.args, self.images
        say_who_the_environment_awaits()
        alone = not torch.accelerator.is_available()  # else torchrun's processes on CPUs would not meet
        if a.report_to != "none" and importlib.util.find_spec(a.report_to) is None:
            raise ModuleNotFoundError(f"No module named {a.report_to!r}", name=a.report_to)
        to = None if a.report_to == "none" else a.report_to
        self.accelerator = Accelerator(
            cpu=alone, mixed_precision=a.mixed_precision, log_with=to, project_dir=a.output if to else None
        )
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world != self.accelerator.num_processes:
            raise ValueError(
                f"WORLD_SIZE says {world} processes, accelerate sees {self.accelerator.num_processes}: each would "
                "train a model of its own into one folder; start them by torchrun or accelerate launch"
            )
        torch.manual_seed(a.seed)
        if a.model:
            self.unet, self.scheduler = load_model(a.model)
        else:
            self._check_data(channels)
            classes = images.classes if a.class_cond else 0
            self.unet = build_unet(images, channels, a.layers, classes, a.norm_groups, a.attention, a.scale_shift)
            self.scheduler = DDPMScheduler(clip_sample=False)
        self.classes = self.unet.config.num_class_embeds or 0
        self.labels = images.labels if self.classes else None
        self.schedule, self.kind = schedule_of(self.scheduler), self.scheduler.config.prediction_type
        self._check_model()
        self.unet.to(self.accelerator.device).train()
        self.ema = EMAModel(
            self.unet.parameters(), decay=EMA if a.ema is None else a.ema,
            min_decay=a.ema or 0.0 if a.model else 0.0,  # 0: the average grows with the run
            model_cls=type(self.unet), model_config=self.unet.config, foreach=True,
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.unet.parameters(), lr=a.lr, foreach=True)
        self.ddp, self.optimizer = self.accelerator.prepare(self.unet, self.optimizer)
        self.observer = None
        if self.config:
            shape = (images.channels, images.size, self.classes)
            device = self.accelerator.device
            one = {"class_labels": torch.zeros(1, dtype=torch.long, device=device)} if self.classes else None
            denoiser = make_eps_fn(self.unet, self.schedule, self.kind, one)
            self.observer = Observer(self.config, self.schedule, *shape, device, steps=a.steps, denoiser=denoiser)
            self.config = self.observer.config
            self.accelerator.print(self.observer.about_d())

    def _check_data(self, channels: list[int]) -> None:
        """Raises where a network cannot be built for the data."""
        size, halvings = self.images.size, len(channels) - 1
        if self.args.class_cond and not self.images.classes:
            raise ValueError(f"--class-cond: {self.args.data} has no labels")
        if size % 2**halvings:
            raise ValueError(
                f"--channels: {len(channels)} levels halve {size}x{size} images {halvings} times, "
                "which does not come out even; give fewer, or another --size"
            )

    def _check_model(self) -> None:
        """Raises where the network does not fit the data or the flags."""
        images, have = self.images, (self.unet.config.in_channels, self.unet.config.sample_size)
        if have != (images.channels, images.size):
            raise ValueError(
                f"the model wants {have[0]} channels at {have[1]}x{have[1]}, the data has "
                f"{images.channels} at {images.size}x{images.size}; see --size"
            )
        if self.classes and self.labels is None:
            raise ValueError(f"the model is class-conditional and {self.args.data} has no labels")
        if self.args.x0_weight > 1 and self.kind != "epsilon":
            raise ValueError(f"--x0-weight is for models that predict epsilon, not {self.kind}")

    def train(self) -> bool:
        """Trains to the end; False if stopped before. Saves either way."""
        a, n, device = self.args, self.args.batch_size, self.accelerator.device
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        self.accelerator.print(f"{world} process{'es' * (world > 1)}, {world * n * a.accumulate} images per step")
        bar = tqdm(total=a.steps, initial=self.step, unit="step", disable=True if rank else None)  # None: no terminal
        with bar, self._saving_before_an_error(), self._stop_by_signals() as stop:
            while self.step < a.steps and not stop.together(device):
                # The step's images and noise are set by (seed, step, rank).
                torch.manual_seed((a.seed * 1_000_003 + self.step) * 4096 + rank)
                index = data_sets.batch_index(len(self.images), n * a.accumulate, self.step, a.seed, rank, world)

                # Gradients, microbatch by microbatch.
                transition = torch.zeros((), device=device)
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
                        loss, plain = training_loss(
                            self.ddp, x_0, eps, t, self.schedule, self.kind, cond, label, self.observer, a.x0_weight
                        )
                        self.accelerator.backward(loss / a.accumulate)
                    transition += plain / a.accumulate
                    self.guard.count(plain)

                # The denoiser's step, its average, D's step.
                scale = 1 - self.step / a.steps if a.anneal else 1.0
                for group in self.optimizer.param_groups:
                    group["lr"] = a.lr * scale
                self.whole = False
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.ema.step(self.unet.parameters())
                if self.observer:
                    self.observer.step(scale)

                # Log and checkpoint.
                self.step, self.total, self.whole = self.step + 1, self.total + transition, True
                bar.update()
                if self.step % a.log_every == 0 or self.step == a.steps:
                    self._log(float(self.total) / (self.step - self.since))
                    self.total, self.since = torch.zeros_like(self.total), self.step
                    self.guard.look(f"step {self.step}")
                    self.guard.check(f"step {self.step}")
                    self._write_log()
                if self.step % a.save_every == 0:
                    self.save()
                if a.keep_every and self.step % a.keep_every == 0:
                    self._keep()
        self.save()
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self.accelerator.wait_for_everyone()  # a launcher ends the others when the first one ends
        return self.step >= a.steps

    @contextlib.contextmanager
    def _saving_before_an_error(self) -> Iterator[None]:
        """What ends the run between two steps (a bad image, an error of another process) costs no step."""
        try:
            yield
        except Exception:
            if self.whole and self.step > self.saved and self.accelerator.is_main_process:
                with contextlib.suppress(OSError):
                    self._write_checkpoint()
            raise

    @contextlib.contextmanager
    def _stop_by_signals(self) -> Iterator[folder.Stop]:
        stop = folder.Stop().listen()
        try:
            yield stop
        finally:
            stop.forget()

    def _log(self, transition: float) -> None:
        """Adds the means since the last call to the history, and shows them."""
        means = {"transition": transition} | (self.observer.stats() if self.observer else {})
        self.history.append({"step": self.step, **means})
        self.accelerator.log(means, step=self.step)
        words = "  ".join(f"{name} {v:.3f}" for name, v in means.items() if name != "skipped")
        with tqdm.external_write_mode():
            self.accelerator.print(f"step {self.step}/{self.args.steps}  {words}", flush=True)

    def _write_log(self) -> None:
        """log.jsonl: the history, one line per entry."""
        if self.accelerator.is_main_process:
            with atomic_write(self.args.output / "log.jsonl", "w", sync=False) as file:
                file.writelines(json.dumps(line) + "\n" for line in self.history)

    def save(self) -> None:
        """checkpoint.pt (to continue) and the EMA model in diffusers' format (to use)."""
        self.accelerator.wait_for_everyone()
        self.guard.check(f"step {self.step}")
        if not self.accelerator.is_main_process:
            return
        out, trackers = self.args.output, []
        if self.step > self.saved:
            self._write_checkpoint()
            trackers = self.accelerator.trackers
        with self._averaged():
            self._export(out)
            for tracker in trackers:  # wandb keeps a step to itself until the next one, unless told to commit it
                form = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {"commit": True}
                tracker.log_images({"samples, Euler 10": self._samples()}, step=self.step, **form)
        command = [Path(sys.executable).name, "-m", "ogdm_core.diffusers", *sys.argv[1:]]
        write_json(out / "training.json", {
            "command": shlex.join(command), "step": self.step, "settings": self._identity(),
            "ogdm": self.config.to_dict() if self.config else None,
        })  # fmt: skip
        self._write_log()

    def _write_checkpoint(self) -> None:
        """checkpoint.pt; the one before it stays beside it."""
        state = {
            "format": FORMAT,
            "step": self.step,
            "unet": self.unet.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ema": self.ema.state_dict()["shadow_params"],
            "ema_steps": self.ema.optimization_step,
            "observer": self.observer.state_dict() if self.observer else None,
            "scaler": self.accelerator.scaler.state_dict() if self.accelerator.scaler else None,
            "history": self.history,
            "log": (float(self.total), self.since),
            "run": self._identity(),
        }
        with atomic_write(self.args.output / CHECKPOINT) as file:
            torch.save(state, file)
            folder.keep_previous(self.args.output / CHECKPOINT)
        self.saved = self.step

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """The average's weights in the network."""
        self.ema.store(self.unet.parameters())
        self.ema.copy_to(self.unet.parameters())
        try:
            yield
        finally:
            self.ema.restore(self.unet.parameters())

    def _export(self, out: Path) -> None:
        """Writes the network as it is, in diffusers' format."""
        pipeline: Any = DDPMPipeline(unet=self.unet, scheduler=self.scheduler)
        try:
            pipeline.save_pretrained(out)
        except (SafetensorError, OSError) as error:
            raise OSError(
                f"the model could not be written to {out} ({error}); {self.args.output / CHECKPOINT} is whole: make "
                "room, and the same command continues from there"
            ) from error
        for weights in out.glob("unet/*.safetensors"):  # safetensors makes them the owner's alone
            shutil.copymode(out / "unet" / "config.json", weights)

    def _keep(self) -> None:
        """A snapshot of the average, for a curve of FID."""
        self.guard.check(f"step {self.step}")
        if self.accelerator.is_main_process:
            with self._averaged():
                self._export(self.args.output / f"snapshot-{self.step:06d}")

    def _samples(self) -> np.ndarray:
        """uint8 [16, H, W, C], of the network as it is, from the same noise always."""
        device, shape = self.accelerator.device, (16, self.images.channels, *[self.images.size] * 2)
        noise = torch.randn(shape, generator=generator_of(self.args.seed, "samples")).to(device)
        cond = {"class_labels": torch.arange(16, device=device) % self.classes} if self.classes else None
        eps_fn = make_eps_fn(self.unet.eval(), self.schedule, self.kind, cond)
        x = sample(eps_fn, self.schedule.prior(noise), self.schedule, sampler="euler", nfe=10)
        self.unet.train()
        return data_sets.to_uint8(x).permute(0, 2, 3, 1).numpy()

    def _good(self) -> str:
        path = self.args.output / CHECKPOINT
        if not path.exists():
            return "there is no checkpoint"
        before = folder.previous(path)
        return f"the last good checkpoint is {path}" + f", the one before it {before}" * before.exists()

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
            "images": self._fingerprint,
        }

    def _resume(self) -> None:
        path = self.args.output / CHECKPOINT
        if not path.exists():
            return
        again = f"delete it to start over, or go on from the last model: --model {path.parent}"
        if is_whole(folder.previous(path)):
            again += f"; the checkpoint before it is {folder.previous(path)}, which can take its place"
        with reading(path, again):
            state = trust.load(path, map_location=self.accelerator.device, weights_only=True)
            if state.get("format", 0) > FORMAT:
                raise DamagedError(
                    f"{path} has format {state['format']}, and this version reads up to {FORMAT}; continue it with "
                    "the version that wrote it, or give another --output"
                )
            saved = {"x0_weight": 1.0} | state["run"]  # a file from before that flag lacks it
            if self.config and self.observer and self.observer.auto and saved["ogdm"]:
                self.config = replace(self.config, d_kind=saved["ogdm"]["d_kind"])  # a run keeps its D
            differ = differences(_flat(saved), _flat(self._identity()))
        if fixed := set(differ) - FREE:
            raise ValueError(
                f"{path} was made with other settings ({format_differences(differ, fixed)}); repeat the first "
                "run's flags to continue it, or give another --output"
            )
        if differ:
            self.accelerator.print(f"continuing with other settings: {format_differences(differ)}")
        with reading(path, again):
            self.unet.load_state_dict(state["unet"])
            self.optimizer.load_state_dict(state["optimizer"])
            weights, average = list(self.unet.parameters()), [p.to(self.accelerator.device) for p in state["ema"]]
            if [p.shape for p in average] != [p.shape for p in weights] or not all_finite([*weights, *average]):
                raise ValueError("its weights or their average do not fit the network, or are not finite")
            self.ema.shadow_params, self.ema.optimization_step = average, state["ema_steps"]
            if self.accelerator.scaler:
                self.accelerator.scaler.load_state_dict(state["scaler"])
            self.step, self.history, observer = state["step"], state["history"], state["observer"]
            total, self.since = state.get("log", (0.0, self.step))  # absent in files of earlier versions
            self.total += total
            if self.step < 0:
                raise ValueError(f"it is at step {self.step}")
            self.saved = self.step
        if self.observer:
            self.observer.load_state_dict(observer)
        self.accelerator.print(f"continuing {path} at step {self.step} of {self.args.steps}")


def _flat(run: dict[str, Any]) -> dict[str, Any]:
    """A run's settings with those of OGDM among them."""
    ogdm = run["ogdm"] or {}
    return run | {"ogdm": bool(ogdm)} | {f"ogdm_{name}": value for name, value in ogdm.items()}
