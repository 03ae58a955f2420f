"""What D costs beside the denoiser, and which D `auto` takes for it."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from .config import OGDMConfig
from .discriminator import KINDS
from .random import set_torch_state, torch_state

DEAR = 2.0  # steps of the denoiser, above which D's cost is a warning


def operations(call: Callable[[], Any], device: torch.device | str = "cpu") -> float:
    """Floating-point operations of a call, as torch counts them; no gradient, no draw of random numbers is left."""
    device = torch.device(device)
    counter, rng = FlopCounterMode(display=False), torch_state(device)
    with torch.no_grad(), counter:
        call()
    set_torch_state(rng, device)
    return counter.get_total_flops()


def cost_of_d(config: OGDMConfig, kind: str, channels: int, size: int, labels: int, denoiser: float) -> float:
    """Operations of D's passes in a step, per step of a denoiser whose forward pass has so many for one image.

    A backward pass has as many operations as a forward pass for the inputs, and again for the weights: the
    denoiser's step is 3 of its passes. D scores the fakes for the emission term (2 passes), then real and fake
    images for its own (3 each); `fused`, the fakes' passes serve both (3 and 3). R1 takes about 6 more.
    """
    with torch.device("meta"):  # counts without memory or random numbers
        D = KINDS[kind](channels, size, labels, config.d_width)
        x, t = torch.empty(1, channels, size, size), torch.empty(1)
        label = torch.empty(1, labels) if labels else None
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        D(x, t, t, label)
    passes = (6 if config.fused else 8) + (6 / config.r1_every if config.r1 else 0)
    return passes * counter.get_total_flops() / (3 * denoiser)


def choose(config: OGDMConfig, channels: int, size: int, labels: int, denoiser: float | None) -> str:
    """D's kind where it is `auto`: the paper's if it costs no more than the denoiser's step, else the light one.

    denoiser   operations of its forward pass for one image; None where they are not known: the light one
    """
    if config.d_kind != "auto":
        return config.d_kind
    dear = denoiser is None or cost_of_d(config, "paper", channels, size, labels, denoiser) > 1
    return "light" if dear else "paper"
