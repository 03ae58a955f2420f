"""What a backbone reads off its trainer: the forward pass, and where its learning rate stands."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .random import torch_state


class Recorder:
    """Calls `network` and keeps the last call, so that no pass has to be repeated.

    x              its first argument, the noisy images [N, C, H, W]
    args, kwargs   its further arguments
    output         what it returned
    rng            torch's random state before the pass; dropout's masks follow from it
    """

    def __init__(self, network: Callable[..., Any]):
        self.network = network

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.rng = torch_state(x.device)
        self.output = self.network(x, *args, **kwargs)
        self.x, self.args, self.kwargs = x, args, kwargs
        return self.output


def lr_scale(optimizer: torch.optim.Optimizer) -> float:
    """The optimiser's present learning rate over the one it was built with; D's follows it."""
    group = optimizer.param_groups[0]
    base = float(group.get("initial_lr", optimizer.defaults["lr"]))  # initial_lr: a scheduler's
    return float(group["lr"]) / base if base else 1.0
