"""How far the projection looks ahead: s ~ U(1, min(t, floor(k T)))."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from .schedule import DiscreteVP, Schedule


def reach(schedule: Schedule, k: float) -> float:
    """The longest lookahead: floor(k T) grid steps, or k of the Karras range.

    Raises if k is too small to look ahead at all.
    """
    if isinstance(schedule, DiscreteVP):
        longest = math.floor(k * schedule.T + 1e-9)
        if longest < 1:
            raise ValueError(
                f"--ogdm-k: {k:g} looks ahead floor(k T) = 0 steps of T = {schedule.T}; "
                f"the smallest k that works is {1 / schedule.T}"
            )
        return longest
    if k <= 0:
        raise ValueError(f"--ogdm-k: {k:g} does not look ahead; any k in (0, 1] works")
    return k


def sample_lookahead(
    schedule: Schedule, t: Tensor, k: float, generator: Generator | None = None
) -> Tensor:
    """One draw of s for the batch, on t's device.

    Discrete grid: s is int64, uniform on {1, ..., min(t, floor(k T))}.
    Karras time:   s is float, uniform on (0, min(tau(t), k)].
    """
    longest = reach(schedule, k)
    unit = torch.rand(t.shape, generator=generator, device=t.device)
    if isinstance(schedule, DiscreteVP):
        most = t.clamp(max=longest)
        return torch.minimum(1 + (unit * most).long(), most)
    return (1 - unit) * schedule.unit_time(t).clamp(max=longest)
