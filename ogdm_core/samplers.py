"""Few-step samplers. OGDM changes training only; these are the standard samplers.

A sampler is a short generator over the times T = t_N > ... > t_0 = 0 that yields x after each
step; all take the step of `solvers.step` and differ in the eps that they feed it. Cost for N steps
in network evaluations (NFE): Heun and DPM-Solver-2 2N - 1, S-PNDM N + 1, F-PNDM N + 9, all others N.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Generator, Tensor

from .nfe import SAMPLERS, check_order, steps_for_nfe
from .schedule import RHO, Schedule, expand, vp_time
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


def dpm_2(eps_fn: EpsFn, x: Tensor, times: Sequence[Tensor], schedule: Schedule) -> Steps:
    """DPM-Solver-2: eps = e_m at m, halfway in log sigma and reached by Euler; the last step is Euler's."""
    for t, u in zip(times[:-1], times[1:], strict=True):
        eps = eps_fn(x, t)
        if bool((u > 0).any()):
            middle = (schedule.sigma(t[:1]) * schedule.sigma(u[:1])).sqrt()
            m = schedule.time_of(middle).to(t.dtype).expand(len(t))
            eps = eps_fn(step(schedule, x, eps, t, m), m)
        x = step(schedule, x, eps, t, u)
        yield x


def ipndm(eps_fn: EpsFn, x: Tensor, times: Sequence[Tensor], schedule: Schedule, order: int = 4) -> Steps:
    """iPNDM: eps of Adams-Bashforth for even steps, (55 e_t - 59 e_1 + 37 e_2 - 9 e_3) / 24 at order 4.

    The order rises from 1, one with each step.
    """
    known: list[Tensor] = []
    for t, u in zip(times[:-1], times[1:], strict=True):
        known = [*known[-order + 1 :], eps_fn(x, t)] if order > 1 else [eps_fn(x, t)]
        past = [float(-i) for i in range(1, len(known))]
        x = step(schedule, x, _through(known[::-1], past, [1 / (k + 1) for k in range(1, len(known))]), t, u)
        yield x


def deis(
    eps_fn: EpsFn,
    x: Tensor,
    times: Sequence[Tensor],
    schedule: Schedule,
    order: int = 3,
    clock: Callable[[Tensor], Tensor] = vp_time,
) -> Steps:
    """DEIS: eps is a polynomial in clock(sigma) through the last e, integrated exactly over sigma.

    With VP's time as the clock it is tAB. The order, one more than the polynomial's degree, rises from 1.
    """
    sigmas = torch.stack([schedule.sigma(t[0]) for t in times]).cpu().double()
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(64))
    known: list[Tensor] = []
    for i, (t, u) in enumerate(zip(times[:-1], times[1:], strict=True)):
        known = [eps_fn(x, t), *known[: order - 1]]
        # Quadrature in v = sigma^(1 / RHO), in which every step is smooth.
        v, w = sigmas[i + 1] ** (1 / RHO), sigmas[i] ** (1 / RHO)
        at = (v + w + (w - v) * nodes) / 2
        d_sigma = weights * RHO * at ** (RHO - 1)
        now, ahead = clock(sigmas[i]), clock(at**RHO) - clock(sigmas[i])
        scale = ahead.abs().max()
        moments = [float((d_sigma * (ahead / scale) ** k).sum() / d_sigma.sum()) for k in range(1, len(known))]
        past = [float((clock(sigmas[i - j]) - now) / scale) for j in range(1, len(known))]
        x = step(schedule, x, _through(known, past, moments), t, u)
        yield x


def _through(known: Sequence[Tensor], nodes: Sequence[float], moments: Sequence[float]) -> Tensor:
    """The mean over a step of the polynomial through known[0] at 0 and known[j] at nodes[j - 1].

    moments   of s^1, s^2, ... over the step, one for each node
    """
    if not nodes:
        return known[0]
    vandermonde = np.array(nodes) ** np.arange(1, len(nodes) + 1)[:, None]
    weights = np.linalg.solve(vandermonde, np.array(moments)).tolist()
    return known[0] + sum(w * (e - known[0]) for w, e in zip(weights, known[1:], strict=True))


def dpmpp(
    eps_fn: EpsFn, x: Tensor, times: Sequence[Tensor], schedule: Schedule, order: int = 2, correct: bool = False
) -> Steps:
    """DPM-Solver++(2M) and (3M): multistep in lambda_t = -log sigma_t, for D_t = x_t / a_t - sigma_t e_t.

    D_t is the data that the network predicts. A step from t to u over h = lambda_u - lambda_t goes at
    order 2 to the data

        D = D_t + h / (2 h_prev) (D_t - D_prev),

    and at order 3 to those of the parabola through three of them (`_parabola`). The order rises from 1 and
    falls to 1. With `correct` it is UniPC: what is evaluated at the step's end also corrects the step itself.
    """
    sigmas = [float(schedule.sigma(t[0])) for t in times]
    h = [math.log(now / after) for now, after in zip(sigmas[:-2], sigmas[1:-1], strict=True)]
    known: list[Tensor] = []  # D at the times so far
    start, before = x, 1  # of the step that led to x: where it began, its order
    for i, (t, u) in enumerate(zip(times[:-1], times[1:], strict=True)):
        known = [*known[-3:], x / expand(schedule.a(t), x) - sigmas[i] * eps_fn(x, t)]
        if correct and i > 0:
            x = _toward(schedule, start, _unic(known, h[:i], before), times[i - 1], t)
        d, before = known[-1], min(order, i + 1, len(h) + 1 - i)
        if before == 2:
            d = d + h[i] / (2 * h[i - 1]) * (d - known[-2])
        elif before == 3:
            d = _parabola(known, h[: i + 1], correct)
        start, x = x, _toward(schedule, x, d, t, u)
        yield x


def unipc(eps_fn: EpsFn, x: Tensor, times: Sequence[Tensor], schedule: Schedule, order: int = 2) -> Steps:
    """UniPC in its B_2 variant, with the data as prediction: DPM-Solver++ and a corrector."""
    return dpmpp(eps_fn, x, times, schedule, order, correct=True)


def _toward(schedule: Schedule, x: Tensor, d: Tensor, t: Tensor, u: Tensor) -> Tensor:
    """The step from t to u whose eps is (x_t / a_t - D) / sigma_t."""
    eps = (x / expand(schedule.a(t), x) - d) / expand(schedule.sigma(t), x)
    return step(schedule, x, eps, t, u)


def _exponential_moments(h: float) -> list[float]:
    """Means of s, s^2, s^3 over a step in lambda of length h, s from 0 to 1, by which a step to the data weighs D."""
    moments = [1.0]
    for k in range(1, 4):  # by parts, from the weight h e^(h s) / (e^h - 1)
        moments.append(1 / -math.expm1(-h) - k / h * moments[-1])
    return moments[1:]


def _parabola(known: Sequence[Tensor], h: Sequence[float], exact: bool) -> Tensor:
    """The data D that the step of length h[-1] goes to, from the last three D.

    UniPC takes the exact mean. DPM-Solver++(3M), as its authors wrote it, takes half of the second power's.
    """
    nodes = [-h[-2] / h[-1], -(h[-2] + h[-3]) / h[-1]]
    first, second, _ = _exponential_moments(h[-1])
    return _through(known[:-4:-1], nodes, [first, second if exact else second / 2])


def _unic(known: Sequence[Tensor], h: Sequence[float], order: int = 2) -> Tensor:
    """The data D that UniC takes the step of length h[-1] to, from D at its end and before it.

    D = D_t + rho_1 (D_prev - D_t) / r + rho_2 (D_u - D_t), r = -h_prev / h, with the weights that
    are exact for D up to the second power of lambda; order 1 has rho_2 = 1/2 alone, order 3 one D more.
    """
    d_t, d_u = known[-2:]
    if order == 1:
        return (d_t + d_u) / 2
    if order == 3:
        nodes = [-h[-2] / h[-1], -(h[-2] + h[-3]) / h[-1], 1.0]
        return _through([d_t, known[-3], known[-4], d_u], nodes, _exponential_moments(h[-1]))
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
    "euler": euler, "heun": heun, "s-pndm": s_pndm, "f-pndm": f_pndm, "dpm-2": dpm_2, "dpmpp-2m": dpmpp,
    "dpmpp-3m": dpmpp, "unipc": unipc, "unipc-3": unipc, "ipndm": ipndm, "deis": deis, "stochastic": stochastic,
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
    discretisation: str | Mapping[str, Any] | None = None,
    rho: float | None = None,
    order: int | None = None,
    eta: float = 1.0,
    generator: Generator | None = None,
    progress: bool = False,
    trajectory: bool = False,
    callback: Callable[[Tensor], Any] | None = None,
) -> Tensor | list[Tensor]:
    """x_0 from x_T [N, ...] in `nfe` evaluations of `eps_fn(x [N, ...], t [N]) -> eps`.

    x_T is noise at the schedule's own scale (`schedule.prior(torch.randn(...))`). `discretisation` is one
    of DISCRETISATIONS, or a grid's file as `grids.read_grid` reads it. `eta` and `generator` are the
    stochastic sampler's. With `trajectory`, all N + 1 states are returned, x_T first. `callback` is given
    the denoised estimate [N, ...] that each step's first evaluation makes.
    """
    steps = steps_for_nfe(sampler, nfe)
    check_order(sampler, order)
    dtype = schedule.time_dtype(x_T.dtype)
    grid = schedule.times(steps, discretisation, rho)
    times = [torch.full((len(x_T),), t, dtype=dtype, device=x_T.device) for t in grid]
    extra: dict[str, Any] = {"eta": eta, "generator": generator} if sampler == "stochastic" else {}
    if SAMPLERS[sampler].order:
        extra = {"order": order or SAMPLERS[sampler].order}
    first = True  # of a step's evaluations

    def watched(x: Tensor, t: Tensor) -> Tensor:
        nonlocal first
        eps = eps_fn(x, t)
        if first and callback is not None:
            callback(step(schedule, x, eps, t, torch.zeros_like(t)))
        first = False
        return eps

    states = FUNCTIONS[sampler](watched, x_T, times, schedule, **extra)
    if progress:
        from tqdm import tqdm  # not one of the core's packages

        states = tqdm(states, total=steps, desc=f"{sampler}, NFE {nfe}")
    path, x = [x_T], x_T
    for x in states:
        first = True
        if trajectory:
            path.append(x)
    return path if trajectory else x
