"""Denoisers D(x; sigma) = E[y | y + sigma eps = x], such as the networks of EDM and EDM2: t = sigma, a = 1."""

from typing import Any

from torch import Tensor

from .schedule import expand
from .solvers import ConditionalEpsFn

SIGMA_MIN, SIGMA_MAX = 0.002, 80.0  # Karras et al., where a network names no range


def to_eps(denoised: Tensor, x_t: Tensor, sigma: Tensor) -> Tensor:
    """eps = (x_t - D) / sigma, in x_t's dtype."""
    return (x_t - denoised.to(x_t.dtype)) / expand(sigma, x_t)


def make_eps_fn(net, labels: Tensor | None = None) -> ConditionalEpsFn:
    """The denoiser as eps(x [N, C, H, W], sigma [N]).

    The condition, the network's further arguments by name, may be given per call.
    """
    plain = {"class_labels": labels}

    def eps_fn(x: Tensor, sigma: Tensor, cond: dict[str, Any] = plain) -> Tensor:
        return to_eps(net(x, sigma, **cond), x, sigma)

    return eps_fn
