"""Few-step samplers. OGDM changes training only; these are the standard samplers.

A sampler is a short generator over the times T = t_N > ... > t_0 = 0 that yields x after each
step; all take the step of `solvers.step` and differ in the eps that they feed it. Cost for N steps
in network evaluations (NFE): Heun 2N - 1, S-PNDM N + 1, F-PNDM N + 9, all others N.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

import torch
from torch import Generator, Tensor

from .nfe import steps_for_nfe
from .schedule import Schedule, expand
from .solvers import EpsFn, project, step

Steps = Iterator[Tensor]


def euler(eps_fn: EpsFn, x: Tensor, times: Sequence[Tensor], schedule: Schedule) -> Steps:
    """Euler's method, which is DDIM: eps = e_t."""
    for t, u in zip(times[:-1], times[1:], strict=True):
        x = step(schedule, x, eps_fn(x, t), t, u)
        yield x


def heun(eps_fn: EpsFn, x: Tensor, times: Sequence[Tensor], schedule: Schedule) -> Steps:
    """Heun's method: eps = (e_t + e_u) / 2; the last step, to the data, is Euler's."""
    for t, u in zip(times[:-1], times[1:], strict=True):
        solver = "euler" if bool((u == 0).all()) else "heun"
        x = project(solver, schedule, x, t, u, eps_fn(x, t), eps_fn)
        yield x


def s_pndm(eps_fn: EpsFn, x: Tensor, times: Sequence[Tensor], schedule: Schedule) -> Steps:
    """S-PNDM: one Heun start, then eps = (3 e_t - e_prev) / 2."""
    previous = None
    for t, u in zip(times[:-1], times[1:], strict=True):
        e_t = eps_fn(x, t)
        if previous is None:
            x = project("heun", schedule, x, t, u, e_t, eps_fn)
        else:
            x = step(schedule, x, (3 * e_t - previous) / 2, t, u)
        previous = e_t
        yield x


def f_pndm(eps_fn: EpsFn, x: Tensor, times: Sequence[Tensor], schedule: Schedule) -> Steps:
    """F-PNDM: three pseudo Runge-Kutta starts, then 4th-order Adams-Bashforth."""
    history: list[Tensor] = []
    for t, u in zip(times[:-1], times[1:], strict=True):
        e_t = eps_fn(x, t)
        history = [e_t, *history[:3]]
        if len(history) < 4:
            mid = schedule.midpoint(t, u)
            e_2 = eps_fn(step(schedule, x, e_t, t, mid), mid)
            e_3 = eps_fn(step(schedule, x, e_2, t, mid), mid)
            e_4 = eps_fn(step(schedule, x, e_3, t, u), u)
            eps = (e_t + 2 * e_2 + 2 * e_3 + e_4) / 6
        else:
            e_1, e_2, e_3 = history[1:]
            eps = (55 * e_t - 59 * e_1 + 37 * e_2 - 9 * e_3) / 24
        x = step(schedule, x, eps, t, u)
        yield x


def dpmpp_2m(eps_fn: EpsFn, x: Tensor, times: Sequence[Tensor], schedule: Schedule, correct: bool = False) -> Steps:
    """DPM-Solver++(2M): order 2 in lambda_t = -log sigma_t, for D_t = x_t / a_t - sigma_t e_t.

    D_t is the data that the network predicts. A step from t to u over
    h = lambda_u - lambda_t goes to the data

        D = D_t + h / (2 h_prev) (D_t - D_prev),

    the first and the last one to D_t. With `correct` it is UniPC: what is evaluated at the step's
    end also corrects the step itself.
    """
    sigmas = [float(schedule.sigma(t[0])) for t in times]
    h = [math.log(now / after) for now, after in zip(sigmas[:-2], sigmas[1:-1], strict=True)]
    known: list[Tensor] = []  # D at the times so far
    start = x  # of the step that led to x
    for i, (t, u) in enumerate(zip(times[:-1], times[1:], strict=True)):
        known = [*known[-2:], x / expand(schedule.a(t), x) - sigmas[i] * eps_fn(x, t)]
        if correct and i > 0:
            x = _toward(schedule, start, _unic(known, h[:i]), times[i - 1], t)
        d = known[-1]
        if 0 < i < len(h):
            d = d + h[i] / (2 * h[i - 1]) * (d - known[-2])
        start, x = x, _toward(schedule, x, d, t, u)
        yield x


def unipc(eps_fn: EpsFn, x: Tensor, times: Sequence[Tensor], schedule: Schedule) -> Steps:
    """UniPC-2 in its B_2 variant, with the data as prediction: DPM-Solver++(2M) and a corrector."""
    return dpmpp_2m(eps_fn, x, times, schedule, correct=True)


def _toward(schedule: Schedule, x: Tensor, d: Tensor, t: Tensor, u: Tensor) -> Tensor:
    """The step from t to u whose eps is (x_t / a_t - D) / sigma_t."""
    eps = (x / expand(schedule.a(t), x) - d) / expand(schedule.sigma(t), x)
    return step(schedule, x, eps, t, u)


def _unic(known: Sequence[Tensor], h: Sequence[float]) -> Tensor:
    """The data D that UniC takes the step of length h[-1] to, from D at its end and before it.

    D = D_t + rho_1 (D_prev - D_t) / r + rho_2 (D_u - D_t), r = -h_prev / h, with the weights that
    are exact for D up to the second power of lambda; the first step has rho_2 = 1/2 alone.
    """
    d_t, d_u = known[-2:]
    if len(h) == 1:
        return (d_t + d_u) / 2
    r, b = -h[-2] / h[-1], math.expm1(-h[-1])
    phi_1 = -b / h[-1] - 1
    b_1, b_2 = phi_1 / b, 2 * (-phi_1 / h[-1] - 0.5) / b
    rho_1 = (b_1 - b_2) / (1 - r)
    return d_t + rho_1 / r * (known[-3] - d_t) + (b_1 - rho_1) * (d_u - d_t)


def stochastic(
    eps_fn: EpsFn,
    x: Tensor,
    times: Sequence[Tensor],
    schedule: Schedule,
    eta: float = 1.0,
    generator: Generator | None = None,
) -> Steps:
    """Ancestral sampling: DDIM's eta, 0 is Euler and 1 is DDPM's posterior.

    In x / a coordinates, sigma_up^2 = eta^2 sigma_u^2 (sigma_t^2 - sigma_u^2) / sigma_t^2 of fresh
    noise follows an Euler step down to sqrt(sigma_u^2 - sigma_up^2).
    """
    for t, u in zip(times[:-1], times[1:], strict=True):
        e_t = eps_fn(x, t)
        a_u, sigma_u = float(schedule.a(u[0])), float(schedule.sigma(u[0]))
        a_t, sigma_t = float(schedule.a(t[0])), float(schedule.sigma(t[0]))
        sigma_up = eta * sigma_u * math.sqrt(max(sigma_t**2 - sigma_u**2, 0.0)) / sigma_t
        sigma_down = math.sqrt(max(sigma_u**2 - sigma_up**2, 0.0))
        x = a_u * (x / a_t + (sigma_down - sigma_t) * e_t)
        if sigma_up > 0:
            z = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
            x = x + a_u * sigma_up * z
        yield x


FUNCTIONS: dict[str, Callable[..., Steps]] = {
    "euler": euler, "heun": heun, "s-pndm": s_pndm, "f-pndm": f_pndm, "dpmpp-2m": dpmpp_2m,
    "unipc": unipc, "stochastic": stochastic,
}  # fmt: skip


@overload
def sample(*args: Any, trajectory: Literal[False] = ..., **kwargs: Any) -> Tensor: ...
@overload
def sample(*args: Any, trajectory: Literal[True], **kwargs: Any) -> list[Tensor]: ...
@torch.no_grad()  # type: ignore[misc]  # the overloads leave out the other options
def sample(
    eps_fn: EpsFn,
    x_T: Tensor,
    schedule: Schedule,
    *,
    sampler: str = "euler",
    nfe: int = 10,
    discretisation: str | None = None,
    eta: float = 1.0,
    generator: Generator | None = None,
    progress: bool = False,
    trajectory: bool = False,
) -> Tensor | list[Tensor]:
    """x_0 from x_T [N, ...] in `nfe` evaluations of `eps_fn(x [N, ...], t [N]) -> eps`.

    x_T is noise at the schedule's own scale (`schedule.prior(torch.randn(...))`). `eta` and
    `generator` are the stochastic sampler's. With `trajectory`, all N + 1 states are returned,
    x_T first.
    """
    steps = steps_for_nfe(sampler, nfe)
    dtype = schedule.time_dtype(x_T.dtype)
    times = [torch.full((len(x_T),), t, dtype=dtype, device=x_T.device) for t in schedule.times(steps, discretisation)]
    extra: dict[str, Any] = {"eta": eta, "generator": generator} if sampler == "stochastic" else {}
    states = FUNCTIONS[sampler](eps_fn, x_T, times, schedule, **extra)
    if progress:
        from tqdm import tqdm  # not one of the core's packages

        states = tqdm(states, total=steps, desc=f"{sampler}, NFE {nfe}")
    path, x = [x_T], x_T
    for x in states:
        if trajectory:
            path.append(x)
    return path if trajectory else x
