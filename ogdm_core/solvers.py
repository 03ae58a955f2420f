"""One step of an ODE solver, for projecting in training and for sampling.

Every solver of the paper is the same line,

    x_u = a_u ( x_t / a_t + (sigma_u - sigma_t) eps ),

and differs only in the eps that it feeds: Euler (= DDIM) the network's at t, Heun the mean of the
network's at t and at the Euler step's end u.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .schedule import Schedule, expand

EpsFn = Callable[[Tensor, Tensor], Tensor]  # eps [N, ...] of x [N, ...] and t [N]
ConditionalEpsFn = Callable[..., Tensor]  # eps of (x, t), or of (x, t, cond) where a condition is given


def under(eps_fn: ConditionalEpsFn, cond: Any) -> EpsFn:
    """The denoiser under a condition, as a function of (x, t); without a condition, eps_fn itself."""
    return eps_fn if cond is None else lambda x, t: eps_fn(x, t, cond)


def step(schedule: Schedule, x_t: Tensor, eps: Tensor, t: Tensor, u: Tensor) -> Tensor:
    """x_u from x_t [N, ...] along eps [N, ...], from times t [N] to u [N]."""
    a_t, a_u = expand(schedule.a(t), x_t), expand(schedule.a(u), x_t)
    d_sigma = expand(schedule.sigma(u) - schedule.sigma(t), x_t)
    return a_u * (x_t / a_t + d_sigma * eps)


def project(
    projection: str,
    schedule: Schedule,
    x_t: Tensor,
    t: Tensor,
    u: Tensor,
    eps_t: Tensor,
    eps_fn: EpsFn | None = None,
) -> Tensor:
    """The projection f_theta(x_t) = Phi(x_t, t, s; theta), with u = t - s.

    `eps_t` is the network's answer at (x_t, t), which the trainer already has. Euler needs nothing
    more; Heun asks `eps_fn` once, at u, and is Euler where u is the data end.
    """
    x_u = step(schedule, x_t, eps_t, t, u)
    if projection == "euler":
        return x_u
    if projection != "heun":
        raise ValueError(f"unknown projection {projection!r}; use euler or heun")
    if eps_fn is None:
        raise ValueError("Heun's projection needs eps_fn, the denoiser as a function of (x, t), or of (x, t, cond)")
    eps_u = eps_fn(x_u, schedule.network_time(u))
    eps_u = torch.where(expand(u == 0, x_t) > 0, eps_t, eps_u)
    return step(schedule, x_t, (eps_t + eps_u) / 2, t, u)


def reach(projection: str, schedule: Schedule, t: Tensor, u: Tensor) -> Tensor:
    """|J| [N], how far the whitened projection moves per unit of the network's eps.

        Euler   J = a_u (sigma_t - sigma_u) / scale_u
        Heun    J / 2 sqrt((1 - kappa)^2 + 1),   kappa = a_u (sigma_t - sigma_u) b_u / scale_u^2

    Heun's step depends on eps_u with J / 2, and on eps_t with J (1 - kappa) / 2: directly, and through the
    point at which eps_u is asked for. kappa is that way's share for data of variance sigma_data^2, whose
    best eps_u(x) is x b_u / scale_u^2.
    """
    scale = schedule.scale(u)
    euler = schedule.a(u) * (schedule.sigma(t) - schedule.sigma(u)) / scale
    if projection == "euler":
        return euler
    kappa = euler * schedule.b(u) / scale
    return torch.where(u == 0, euler, euler / 2 * ((1 - kappa) ** 2 + 1).sqrt())
