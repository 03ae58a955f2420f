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

from ogdm_core import Observer, OGDMConfig, Schedule, training_loss
from ogdm_core.edm import compat
from ogdm_core.edm import train as splice
from ogdm_core.solvers import EpsFn

from .flags import EDM

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
    words: str = ""


class Trainer:
    """Training steps of one network, plain ones and observed ones, on the network's device."""

    def __init__(self, network: Network, batch: int):
        self.network, self.batch = network, batch
        self.net = network.module.train().requires_grad_(True)
        self.device = device = next(self.net.parameters()).device
        self.ema = copy.deepcopy(self.net).eval().requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-5)
        self.x_0, self.eps = torch.randn(2, batch, network.channels, network.size, network.size, device=device)
        self.t = network.t.to(device).expand(batch)

    def observer(self, config: OGDMConfig) -> Observer:
        """An observer of this network, with its optimiser's state in place as after a step."""
        n = self.network
        observer = Observer(config, n.schedule, n.channels, n.size, device=self.device)
        for p in observer.D.parameters():
            p.grad = torch.zeros_like(p)
        observer.optimizer.step()
        observer.optimizer.zero_grad()
        return observer

    def step(self, observer: Observer | None = None, naive: bool = False) -> None:
        """One training step, plain without an observer; `naive` as of a `Case`."""
        n, recorded = self.network, None if naive else observer
        loss, _ = training_loss(n.eps_fn, self.x_0, self.eps, self.t, n.schedule, recorded)
        if naive:
            x_t = n.schedule.diffuse(self.x_0, self.eps, self.t)
            eps_t = n.eps_fn(x_t, self.t)
            loss = loss + observer.observe(x_0=self.x_0, eps=self.eps, x_t=x_t, t=self.t, eps_t=eps_t).mean()
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


def edm(resolution: int = 32, channels: int = 128) -> Network:
    """NVlabs/edm: DDPM++ (SongUNet) with EDM's preconditioning, as for CIFAR-10."""
    sys.path.insert(0, str(EDM))
    compat.install()
    from training.networks import EDMPrecond

    net = EDMPrecond(
        resolution, 3, model_type="SongUNet", model_channels=channels, channel_mult=[2, 2, 2], num_blocks=4,
        dropout=0.13,
    )  # fmt: skip
    words = f"NVlabs/edm, DDPM++ (SongUNet) with {channels} channels"
    return Network(net, splice.make_eps_fn(net), splice.schedule_of(net), torch.tensor(1.0), 3, resolution, words)
