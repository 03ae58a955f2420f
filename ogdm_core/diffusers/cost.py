"""`d_kind auto`: the largest D whose passes cost no more than the denoiser's own step.

Cost is counted in floating-point operations on tensors without content, so that it takes no time,
no memory and no random numbers, and is the same on every machine and rank.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ..config import OGDMConfig
from ..discriminator import KINDS

# A light D of full width gains more than the paper's at a sixteenth (docs/quickstart.md).
CANDIDATES = [(kind, width) for kind in ("paper", "light") for width in (1.0, 0.75, 0.5, 0.25)]


def choose_d(config: OGDMConfig, unet: Any, classes: int) -> tuple[OGDMConfig, str]:
    """The settings with D's kind and width in place of `auto`, and the choice in words.

    The widths are multiples of d_width. Where no D is cheap enough, the last one is taken.
    """
    shape = (unet.config.in_channels, unet.config.sample_size)
    step = denoiser_cost(unet, classes)
    for kind, width in CANDIDATES:
        chosen = replace(config, d_kind=kind, d_width=width * config.d_width)
        cost = observation_cost(chosen, *shape, classes)
        if cost <= step:
            break
    return chosen, (
        f"D: {chosen.d_kind}, width {chosen.d_width:g}; its passes cost {cost / step:.2g} times "
        f"the denoiser's ({cost / 1e6:.3g} of {step / 1e6:.3g} MFLOP per image and step)"
    )


def denoiser_cost(unet: Any, classes: int) -> int:
    """Forward and backward pass on one image."""
    with torch.device("meta"):
        net = type(unet).from_config(unet.config)
        x = torch.zeros(1, unet.config.in_channels, *[unet.config.sample_size] * 2)
        t = torch.zeros(1, dtype=torch.long)
        label = t if classes else None
        return _flops(lambda: net(x, t, class_labels=label).sample)


def observation_cost(config: OGDMConfig, channels: int, size: int, classes: int) -> int:
    """D's passes over one image: for the emission loss, over the fake and over the real one.

    When fused, one pass over the fake serves both. R1, once per r1_every steps, is left out.
    """
    with torch.device("meta"):
        D = KINDS[config.d_kind](channels, size, classes, config.d_width)
        x = torch.zeros(1, channels, size, size, requires_grad=True)
        t = torch.zeros(1)
        label = torch.zeros(1, classes) if classes else None
        learning = _flops(lambda: D(x, t, t, label))
        if config.fused:
            return 2 * learning
        D.requires_grad_(False)
        return 2 * learning + _flops(lambda: D(x, t, t, label))


def _flops(forward: Callable[[], Tensor]) -> int:
    with FlopCounterMode(display=False) as counter:
        forward().sum().backward()
    return counter.get_total_flops()
