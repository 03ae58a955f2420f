"""Whole training steps: forward, backward, the optimiser, the EMA, and the observer's turn.

`EDMTrainer` does what the training loop of NVlabs/edm does at the paper's CIFAR-10 settings, on its
own network and loss and through the same splice; `DiffusersTrainer` stands in with a U-Net of like
cost where that submodule is absent. Images are noise: the time of a step does not depend on them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ogdm_core.observer import Observer
from ogdm_core.schedule import DiscreteVP, Schedule
from ogdm_core.solvers import EpsFn

from .cases import Case

ROOT = Path(__file__).resolve().parents[2]
EDM = ROOT / "third_party" / "edm"
EMA_BETA = 0.9999
Phase = Callable[[str], AbstractContextManager]


@dataclass(frozen=True)
class Size:
    """Images [batch, 3, resolution, resolution] and the network's base channels."""

    batch: int = 2
    resolution: int = 32
    channels: int = 128
    blocks: int = 4


PAPER = Size()
QUICK = Size(batch=2, resolution=8, channels=16, blocks=1)


class Trainer:
    """A denoiser with its optimiser and its EMA; subclasses know the network and the loss."""

    backbone: str
    words: str
    schedule: Schedule

    def __init__(self, net: torch.nn.Module, size: Size, device: torch.device):
        self.size, self.device = size, device
        self.net = net.to(device).train().requires_grad_(True)
        self.ema = copy.deepcopy(self.net).eval().requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-5, betas=(0.9, 0.999))
        shape = (size.batch, 3, size.resolution, size.resolution)
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(shape, generator=generator).to(device).clamp(-1, 1)

    def observer(self, case: Case, quick: bool = False) -> Observer:
        """The observer of a case, with its optimiser's state in place as after a first step."""
        config = case.config(quick)
        observer = Observer(config, self.schedule, 3, self.size.resolution, device=self.device)
        for p in observer.D.parameters():
            p.grad = torch.zeros_like(p)
        observer.optimizer.step()
        observer.optimizer.zero_grad()
        return observer

    def step(self, case: Case | None, observer: Observer | None, phase: Phase) -> None:
        """One training step; the baseline's without a case."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, again = self.loss(case, observer, phase)
        with phase("denoiser"):
            loss.backward()
        with phase("optimisers"):
            for p in self.net.parameters():
                p.grad.nan_to_num_(0.0, 1e5, -1e5)
            self.optimizer.step()
            for average, p in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                average.lerp_(p.detach(), 1 - EMA_BETA)
        if observer is None:
            return
        if case.naive:  # what D is shown costs the naive schedule one more evaluation
            with phase("denoiser"), torch.no_grad():
                again()
        self.optimizer.zero_grad(set_to_none=True)  # as the splice does: D's step needs the room
        with phase("d_step"):
            observer.step(1.0)

    def loss(
        self, case: Case | None, observer: Observer | None, phase: Phase
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        """The scalar loss, and a function that evaluates the denoiser at x_t again."""
        raise NotImplementedError

    def eps_fn(self) -> EpsFn:
        """The averaged network as eps_fn(x, t), to sample with."""
        raise NotImplementedError

    def state(self) -> list[Tensor]:
        """Every tensor that lives from step to step, but for an observer's."""
        return [self.images, *tensors(self.net), *tensors(self.ema), *tensors(self.optimizer)]


class EDMTrainer(Trainer):
    """NVlabs/edm: DDPM++ (SongUNet) with EDM's preconditioning and loss, as for CIFAR-10."""

    backbone = "edm"

    def __init__(self, size: Size, device: torch.device):
        from ogdm_core.splice import edm as splice

        if str(EDM) not in sys.path:
            sys.path.insert(0, str(EDM))
        splice.install()
        from training.loss import EDMLoss
        from training.networks import EDMPrecond

        net = EDMPrecond(
            size.resolution, 3, model_type="SongUNet", model_channels=size.channels,
            channel_mult=[2, 2, 2], num_blocks=size.blocks, dropout=0.13,
        )  # fmt: skip
        super().__init__(net, size, device)
        self.words = f"NVlabs/edm, DDPM++ (SongUNet) with {size.channels} channels"
        self.schedule = splice.training_schedule(net)
        self.loss_fn = splice.Recorded(EDMLoss(), device)
        self.splice = splice
        self.labels = torch.zeros(size.batch, 0, device=device)

    def loss(self, case, observer, phase):
        with phase("denoiser"):
            loss = self.loss_fn(self.net, self.images, self.labels)
        seen = self.loss_fn.seen

        def again() -> Tensor:
            return self.net(seen.x_t, seen.sigma, seen.labels)

        if observer is None:
            self.loss_fn.seen = None
        else:
            if case.naive:
                with phase("denoiser"):
                    self.loss_fn.seen = seen._replace(denoised=again())
            session = self.splice.Observed(case.config(), 0, self.device, None, False)
            session.net, session.observer, session.recorded = self.net, observer, self.loss_fn
            with phase("observe"):
                loss = session.add_emission(loss)
        return loss.sum().mul(1 / self.size.batch), again

    def eps_fn(self) -> EpsFn:
        def eps_fn(x: Tensor, t: Tensor) -> Tensor:
            return (x - self.ema(x, t, self.labels)) / t.reshape(-1, 1, 1, 1)

        return eps_fn


class DiffusersTrainer(Trainer):
    """A `UNet2DModel` with about the parameters and operations of EDM's network."""

    backbone = "diffusers"

    def __init__(self, size: Size, device: torch.device):
        from diffusers import UNet2DModel

        from ogdm_core.splice import diffusers as splice

        width = 2 * size.channels
        net = UNet2DModel(
            sample_size=size.resolution, block_out_channels=(width,) * 3,
            layers_per_block=size.blocks, attention_head_dim=width, dropout=0.13,
            norm_num_groups=min(32, width // 4),
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip
        super().__init__(net, size, device)
        self.words = f"diffusers UNet2DModel, three levels of {width} channels"
        self.schedule = DiscreteVP.linear()
        self.splice = splice

    def loss(self, case, observer, phase):
        t = torch.randint(1, self.schedule.T + 1, (self.size.batch,), device=self.device)
        eps = torch.randn_like(self.images)
        x_t = self.schedule.diffuse(self.images, eps, t)
        answer = self.splice.eps_fn_of(self.net, self.schedule)
        with phase("denoiser"):
            eps_t = answer(x_t, t)
            loss = (eps_t - eps).square().mean()
            if observer is not None and case.naive:
                eps_t = answer(x_t, t)
        if observer is not None:
            with phase("observe"):
                loss = loss + observer.observe(
                    x_0=self.images, eps=eps, x_t=x_t, t=t, eps_t=eps_t, eps_fn=answer
                ).mean()  # fmt: skip
        return loss, lambda: answer(x_t, t)

    def eps_fn(self) -> EpsFn:
        return self.splice.eps_fn_of(self.ema, self.schedule)


TRAINERS = {"edm": EDMTrainer, "diffusers": DiffusersTrainer}


def find_backbone(wanted: str) -> str:
    """`edm` where its submodule is here, else `diffusers`; or what was asked for, if it is here."""
    here = (EDM / "training" / "networks.py").is_file()
    if wanted == "edm" and not here:
        raise ValueError("--backbone: third_party/edm is not here; run/setup.sh edm fetches it")
    return ("edm" if here else "diffusers") if wanted == "auto" else wanted


def build(backbone: str, size: Size, device: torch.device) -> Trainer:
    """A trainer with the same weights in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TRAINERS[backbone](size, device)


def tensors(owner: torch.nn.Module | torch.optim.Optimizer | Observer) -> list[Tensor]:
    """The tensors that a module, an optimiser or an observer keeps between steps."""
    if isinstance(owner, Observer):
        return tensors(owner.D) + tensors(owner.optimizer)
    if isinstance(owner, torch.optim.Optimizer):
        return [v for s in owner.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [*owner.parameters(), *owner.buffers()]
