"""Whole training steps: forward, backward, Adam, the EMA and, with observation, D's step.

Images are noise and the time is one in the middle: the cost of a step depends on neither.
"""

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.benchmark import timer

from ogdm_core import DiscreteVP, Observer, OGDMConfig, Schedule, training_loss
from ogdm_core.solvers import EpsFn
from run.provenance import ROOT

from .cases import Size

EMA_BETA = 0.9999


@dataclass
class Network:
    """A denoiser eps_fn(x [N, channels, size, size], t [N]) that goes through `module`."""

    module: nn.Module
    eps_fn: EpsFn
    schedule: Schedule
    t: Tensor  # a time in the middle of the schedule, a scalar
    channels: int
    size: int
    labels: int = 0  # number of classes that D is given, 0 for none
    words: str = ""


class Trainer:
    """Training steps of one network, plain ones and observed ones, on the network's device."""

    def __init__(self, network: Network, batch: int):
        self.network, self.batch = network, batch
        self.net = network.module.train().requires_grad_(True)
        self.device = device = next(self.net.parameters()).device
        self.ema = copy.deepcopy(self.net).eval().requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-5)
        shape = (2, batch, network.channels, network.size, network.size)
        self.x_0, self.eps = torch.randn(shape, device=device)
        self.t = network.t.to(device).expand(batch)
        self.label = torch.zeros(batch, network.labels, device=device) if network.labels else None

    def observer(self, config: OGDMConfig) -> Observer:
        """An observer of this network, with its optimiser's state in place as after a step."""
        n = self.network
        observer = Observer(config, n.schedule, n.channels, n.size, n.labels, self.device)
        for p in observer.D.parameters():
            p.grad = torch.zeros_like(p)
        observer.optimizer.step()
        observer.optimizer.zero_grad()
        return observer

    def step(self, observer: Observer | None = None, naive: bool = False) -> None:
        """One training step, plain without an observer; `naive` as of a `Case`."""
        n, recorded = self.network, None if naive else observer
        loss, _ = training_loss(n.eps_fn, self.x_0, self.eps, self.t, n.schedule, recorded, self.label)
        if naive:
            x_t = n.schedule.diffuse(self.x_0, self.eps, self.t)
            loss = loss + observer.observe(
                x_0=self.x_0, eps=self.eps, x_t=x_t, t=self.t, eps_t=n.eps_fn(x_t, self.t),
                eps_fn=n.eps_fn, label=self.label,
            ).mean()  # fmt: skip
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.ema.parameters()), list(self.net.parameters()), 1 - EMA_BETA)
            if naive:
                n.eps_fn(x_t, self.t)
        self.optimizer.zero_grad(set_to_none=True)  # D's step needs the room
        if observer is not None:
            observer.step(1.0)


def clock(device: torch.device) -> Callable[[], float]:
    """Seconds on `device`, after all work given to it is done.

    On a CPU these are processor seconds over the number of threads, so that other programs on the
    machine do not count.
    """
    if device.type == "cpu":
        return lambda: time.process_time() / torch.get_num_threads()
    return timer


# ---- two networks of the paper's CIFAR-10 size --------------------------------------------------


def edm(size: Size) -> Network:
    """NVlabs/edm: DDPM++ (SongUNet) with EDM's preconditioning, as for CIFAR-10."""
    from ogdm_core.edm import compat
    from ogdm_core.edm import train as splice

    sys.path.insert(0, str(ROOT / "third_party" / "edm"))
    compat.install()
    from training.networks import EDMPrecond

    net = EDMPrecond(
        size.resolution, 3, model_type="SongUNet", model_channels=size.channels,
        channel_mult=[2, 2, 2], num_blocks=size.blocks, dropout=0.13,
    )  # fmt: skip
    words = f"NVlabs/edm, DDPM++ (SongUNet) with {size.channels} channels"
    return Network(net, splice.make_eps_fn(net), splice.schedule_of(net), torch.tensor(1.0), 3,
                   size.resolution, words=words)  # fmt: skip


def diffusers(size: Size) -> Network:
    """A `UNet2DModel` with about the parameters and operations of EDM's network."""
    from diffusers import UNet2DModel

    width = 2 * size.channels
    net = UNet2DModel(
        sample_size=size.resolution, block_out_channels=(width,) * 3,
        layers_per_block=size.blocks, attention_head_dim=width, dropout=0.13,
        norm_num_groups=min(32, width // 4),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    words = f"diffusers UNet2DModel, three levels of {width} channels"
    return Network(net, lambda x, t: net(x, t - 1).sample, DiscreteVP.linear(), torch.tensor(500),
                   3, size.resolution, words=words)  # fmt: skip


BACKBONES = {"edm": edm, "diffusers": diffusers}
