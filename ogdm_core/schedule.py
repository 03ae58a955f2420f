"""Noise schedules: x_t = a_t x_0 + b_t eps, with sigma_t = b_t / a_t.

    DiscreteVP      t = 1..T on a grid, t = 0 is the data; a_t^2 + b_t^2 = 1  (ADM, LDM, diffusers)
    KarrasVE        t is sigma itself; a = 1, b = sigma                       (EDM)
    RectifiedFlow   t in [0, 1]; a_t = 1 - t, b_t = t                         (flow matching, SiT)
    GVP             t in [0, 1]; a_t = cos(pi t / 2), b_t = sin(pi t / 2)     (SiT)

Times are tensors of shape [N], and so are the levels that a schedule returns for them.
Levels come in the best precision there is, since solvers take differences of neighbouring ones;
`expand` brings them to an image's shape and dtype.

A new kind of time is a subclass here and nothing elsewhere: solvers, samplers and the observer use
the methods of `Schedule` only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from .grids import fitting_times
from .nfe import DISCRETISATIONS, RHOS, check_rho

RHO = RHOS["karras"]  # Karras et al.'s spacing of noise levels
LEVELS = ("karras", "polynomial", "logsnr", "uniform")  # the discretisations that space sigma, not t
BETA_MIN, BETA_D = 0.1, 19.9  # VP's linear betas (DDPM's, in continuous time)


def expand(v: Tensor, x: Tensor) -> Tensor:
    """Reshapes per-sample values v [N] to broadcast over x [N, ...], in x's dtype."""
    return v.to(x.dtype).reshape(-1, *[1] * (x.ndim - 1))


class Schedule(ABC):
    """What solvers, samplers and the observer need to know of a noise schedule.

    T            the noisiest time
    sigma_data   standard deviation of the data
    spacing      the discretisation that `times` uses by default
    """

    T: float
    sigma_data: float
    spacing: str = "linear"

    # ---- levels -------------------------------------------------------------------------------

    @abstractmethod
    def a(self, t: Tensor) -> Tensor:
        """Signal level a_t."""

    @abstractmethod
    def b(self, t: Tensor) -> Tensor:
        """Noise level b_t."""

    def sigma(self, t: Tensor) -> Tensor:
        """Noise-to-signal ratio sigma_t = b_t / a_t."""
        return self.b(t) / self.a(t)

    def diffuse(self, x_0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """x_t = a_t x_0 + b_t eps."""
        return expand(self.a(t), x_0) * x_0 + expand(self.b(t), x_0) * eps

    def scale(self, t: Tensor) -> Tensor:
        """Standard deviation of x_t, sqrt(a_t^2 sigma_data^2 + b_t^2)."""
        return (self.a(t) ** 2 * self.sigma_data**2 + self.b(t) ** 2).sqrt()

    def whiten(self, x_t: Tensor, t: Tensor) -> Tensor:
        """x_t over its standard deviation: about unit variance."""
        return x_t / expand(self.scale(t), x_t)

    def prior(self, noise: Tensor) -> Tensor:
        """x_T from standard normal noise."""
        return noise

    def description(self) -> dict[str, str | float]:
        """What a saved discriminator keeps of its schedule: its kind, range and data."""
        ends = {"sigma_min": self.network_time(torch.zeros(1)), "sigma_max": torch.tensor([self.T])}
        levels: dict[str, str | float] = {n: float(self.sigma(t)) for n, t in ends.items()}
        return levels | {"schedule": type(self).__name__, "T": float(self.T), "sigma_data": float(self.sigma_data)}

    def outside(self, t: Tensor) -> Tensor:
        """Whether each time [N] is one that the schedule does not have; with continuous times none is."""
        return torch.zeros_like(t, dtype=torch.bool)

    # ---- the lookahead s, and u = t - s -------------------------------------------------------

    @abstractmethod
    def longest_lookahead(self, k: float) -> float:
        """The longest s: a fraction k of the range. Raises if k is too small to look ahead."""

    @abstractmethod
    def sample_lookahead(self, t: Tensor, k: float, generator: Generator | None = None) -> Tensor:
        """s [N] ~ U(1, min(t, floor(k T))), or what corresponds to it, on t's device."""

    def lookahead(self, t: Tensor, s: Tensor) -> Tensor:
        """u = t - s."""
        return t - s

    @abstractmethod
    def unit_time(self, t: Tensor) -> Tensor:
        """t as a number in [0, 1] that D is given."""

    @abstractmethod
    def unit_lookahead(self, s: Tensor) -> Tensor:
        """s as a number in [0, 1] that D is given."""

    # ---- the times of a sampler ---------------------------------------------------------------

    @abstractmethod
    def network_time(self, u: Tensor) -> Tensor:
        """u, or, where u is the data (0), the least noisy time that a network is asked at."""

    @abstractmethod
    def midpoint(self, t: Tensor, u: Tensor) -> Tensor:
        """The time halfway between t and u."""

    @abstractmethod
    def time_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of times for images of the given dtype."""

    @abstractmethod
    def levels(self) -> tuple[float, float]:
        """The lowest and the highest sigma that a network is asked at."""

    @abstractmethod
    def time_of(self, sigma: Tensor) -> Tensor:
        """The times [N] of noise levels sigma [N], or the nearest ones of a grid."""

    @abstractmethod
    def ascending_times(self, steps: int, discretisation: str) -> list[float]:
        """Times 0 = t_0 < t_1 < ... < t_N for N steps, by a discretisation that is in t, not in sigma."""

    def ascending_levels(self, levels: Tensor) -> list[float]:
        """0 and the times of noise levels that rise, t_1 < ... < t_N."""
        return [0.0, *self.time_of(levels).tolist()]

    def times(
        self, steps: int, discretisation: str | Mapping[str, Any] | None = None, rho: float | None = None
    ) -> list[float]:
        """Times t_N > ... > t_1 > t_0 = 0 for N steps, by one of DISCRETISATIONS or a grid's file (`grids.py`).

        `rho` is the power of the discretisations in RHOS.
        """
        discretisation = discretisation or self.spacing
        if steps < 1:
            raise ValueError(f"a sampler needs at least 1 step, got {steps}")
        check_rho(discretisation, rho)
        if not isinstance(discretisation, str):
            whole = isinstance(self, DiscreteVP)
            return fitting_times(discretisation, steps, type(self).__name__, self.T, whole)
        if discretisation not in DISCRETISATIONS:
            known = ", ".join(DISCRETISATIONS)
            raise ValueError(f"unknown discretisation {discretisation!r}; use one of {known}")
        if discretisation in LEVELS:
            levels = sigmas(discretisation, steps, *self.levels(), self.power(discretisation, rho))
            return self.ascending_levels(levels)[::-1]
        return self.ascending_times(steps, discretisation)[::-1]

    def power(self, discretisation: str, rho: float | None) -> float:
        """rho, or its default."""
        return rho or RHOS.get(discretisation, 1.0)


def karras_levels(low: float, high: float, tau: Tensor, rho: float = RHO) -> Tensor:
    """sigma(tau) = (low^(1/rho) + tau (high^(1/rho) - low^(1/rho)))^rho, for tau in [0, 1]."""
    first, last = low ** (1 / rho), high ** (1 / rho)
    return (first + tau * (last - first)) ** rho


def vp_time(sigma: Tensor) -> Tensor:
    """The t in [0, 1] at which VP's linear betas reach sigma: log(1 + sigma^2) = beta_d t^2 / 2 + beta_min t."""
    return ((BETA_MIN**2 + 2 * BETA_D * (sigma**2).log1p()).sqrt() - BETA_MIN) / BETA_D


def vp_sigma(t: Tensor) -> Tensor:
    """The inverse of `vp_time`."""
    return (BETA_D * t**2 / 2 + BETA_MIN * t).expm1().sqrt()


def sigmas(discretisation: str, steps: int, low: float, high: float, rho: float) -> Tensor:
    """N noise levels that rise to `high`, float64 [N]; the data follow below the first one.

    karras       even in sigma^(1/rho) from low to high
    polynomial   the same without `low`, in whose place the last step goes to the data
    logsnr       even in log sigma, likewise
    uniform      even in t^(1/rho) for the time t of VP's linear betas, likewise
    """
    if discretisation == "karras":
        even = torch.linspace(0, 1, steps, dtype=torch.float64)
        return karras_levels(low, high, even if steps > 1 else torch.ones_like(even), rho)  # one step: the noisiest
    tau = torch.arange(1, steps + 1, dtype=torch.float64) / steps
    if discretisation == "polynomial":
        return karras_levels(low, high, tau, rho)
    if discretisation == "logsnr":
        return low ** (1 - tau) * high**tau
    first, last = vp_time(torch.tensor([low, high], dtype=torch.float64)).tolist()
    return vp_sigma(karras_levels(first, last, tau, rho))


class DiscreteVP(Schedule):
    """Variance-preserving grid: a_t = sqrt(abar_t), b_t = sqrt(1 - abar_t), abar_0 = 1.

    Networks that count from 0 are asked at index t - 1. `fractional` says whether the network takes
    times between those of the grid, which F-PNDM's midpoints are; the levels a and b of such a time
    are those of the whole t below it, as in PNDM.
    """

    T: int

    def __init__(self, alphas_cumprod, sigma_data: float = 0.5, fractional: bool = True):
        abar = torch.as_tensor(alphas_cumprod, dtype=torch.float64).flatten().cpu()
        if abar.numel() < 1 or not bool(((abar > 0) & (abar < 1)).all()):
            raise ValueError("alphas_cumprod must lie strictly between 0 and 1 at every t = 1..T")
        if not bool((abar.diff() < 0).all()):
            raise ValueError("alphas_cumprod must decrease with t")
        self.T = abar.numel()
        self.sigma_data, self.fractional = sigma_data, fractional
        self._abar = torch.cat([torch.ones(1, dtype=torch.float64), abar])
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @classmethod
    def from_betas(cls, betas, sigma_data: float = 0.5) -> DiscreteVP:
        """abar_t = prod_{i <= t} (1 - beta_i)."""
        betas = torch.as_tensor(betas, dtype=torch.float64)
        return cls(torch.cumprod(1 - betas, 0), sigma_data)

    @classmethod
    def linear(cls, T: int = 1000, sigma_data: float = 0.5) -> DiscreteVP:
        """DDPM's linear betas, 1e-4 to 0.02 at T = 1000, rescaled for other T."""
        scale = 1000 / T
        betas = torch.linspace(scale * 1e-4, scale * 0.02, T, dtype=torch.float64)
        return cls.from_betas(betas, sigma_data)

    def _lookup(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """sqrt(abar) and sqrt(1 - abar) on t's device, in float64 wherever the device has it."""
        if t.device not in self._tables:
            dtype = torch.float32 if t.device.type == "mps" else torch.float64
            a, b = self._abar.sqrt().to(dtype), (1 - self._abar).sqrt().to(dtype)
            self._tables[t.device] = a.to(t.device), b.to(t.device)
        return self._tables[t.device]

    def a(self, t: Tensor) -> Tensor:
        return self._lookup(t)[0][t.long()]

    def b(self, t: Tensor) -> Tensor:
        return self._lookup(t)[1][t.long()]

    def outside(self, t: Tensor) -> Tensor:
        return ~((t >= 1) & (t <= self.T))

    def longest_lookahead(self, k: float) -> int:
        """floor(k T) steps of the grid."""
        longest = math.floor(k * self.T + 1e-9)
        if longest < 1:
            raise ValueError(
                f"k = {k:g} looks ahead floor(k T) = 0 steps of T = {self.T}; the smallest k that works is {1 / self.T}"
            )
        return longest

    def sample_lookahead(self, t: Tensor, k: float, generator: Generator | None = None) -> Tensor:
        """int64, uniform on {1, ..., min(t, floor(k T))}."""
        unit = torch.rand(t.shape, generator=generator, device=t.device)
        most = t.clamp(max=self.longest_lookahead(k))
        return torch.minimum(1 + (unit * most).long(), most)

    def unit_time(self, t: Tensor) -> Tensor:
        return t.float() / self.T

    def unit_lookahead(self, s: Tensor) -> Tensor:
        return s.float() / self.T

    def network_time(self, u: Tensor) -> Tensor:
        return u.clamp(min=1)

    def midpoint(self, t: Tensor, u: Tensor) -> Tensor:
        """(t + u) / 2, a float; on the grid, rounded down, where the network takes whole t only."""
        return (t + u) / 2 if self.fractional else (t + u) // 2

    def time_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.int64

    def levels(self) -> tuple[float, float]:
        low, high = self.sigma(torch.tensor([1, self.T])).double().log().exp().tolist()
        return low, high

    def time_of(self, sigma: Tensor) -> Tensor:
        """The whole t whose log sigma is the nearest."""
        log_sigma = self.sigma(torch.arange(1, self.T + 1, device=sigma.device)).to(sigma.dtype).log()
        return (sigma.log()[:, None] - log_sigma).abs().argmin(1) + 1

    def ascending_times(self, steps: int, discretisation: str) -> list[float]:
        """Whole t. linear and quadratic are DDIM's and PNDM's times, which the paper's tables use:

        linear      t_i = 1 + floor((i - 1) T / N)
        quadratic   t_i = 1 + floor(v_i^2), v_i = 0 ... sqrt(0.8 T) in even steps
        trailing    t_i = T i / N, rounded: the paper's appendix B, and diffusers' name for it

        A single step starts at T, since from t = 1 it would return the noise.
        """
        i = torch.arange(steps, dtype=torch.float64)
        if steps == 1:
            t = torch.tensor([self.T])
        elif discretisation == "linear":
            t = 1 + torch.arange(steps) * self.T // steps
        elif discretisation == "quadratic":
            t = 1 + (i * math.sqrt(0.8 * self.T) / (steps - 1)).square().floor()
        else:
            t = (self.T * ((i + 1) / steps)).round()
        return self._distinct(t)

    def ascending_levels(self, levels: Tensor) -> list[float]:
        return self._distinct(self.time_of(levels))

    def _distinct(self, t: Tensor) -> list[float]:
        """0 and the whole times t; one that would repeat is the next t of the grid."""
        steps = len(t)
        grid: list[float] = [0]
        if steps > self.T:
            raise ValueError(f"{steps} steps do not fit on a grid of T = {self.T}")
        for n, time in enumerate(t.long().tolist(), start=1):
            grid.append(min(max(time, grid[-1] + 1), self.T - (steps - n)))
        return grid


class Continuous(Schedule):
    """What schedules of a continuous time share: s is a float, a distance in unit time."""

    def longest_lookahead(self, k: float) -> float:
        if k <= 0:
            raise ValueError(f"k = {k:g} does not look ahead; any k in (0, 1] works")
        return k

    def sample_lookahead(self, t: Tensor, k: float, generator: Generator | None = None) -> Tensor:
        """Uniform on (0, min(unit_time(t), k)]."""
        unit = torch.rand(t.shape, generator=generator, device=t.device)
        return (1 - unit) * self.unit_time(t).clamp(max=self.longest_lookahead(k))

    @abstractmethod
    def from_unit_time(self, tau: Tensor) -> Tensor:
        """The time t whose unit time is tau."""

    def unit_lookahead(self, s: Tensor) -> Tensor:
        return s

    def midpoint(self, t: Tensor, u: Tensor) -> Tensor:
        return (t + u) / 2

    def lookahead(self, t: Tensor, s: Tensor) -> Tensor:
        """u = t - s in unit time, never noisier than t."""
        return torch.minimum(self.from_unit_time((self.unit_time(t) - s).clamp(min=0)), t)

    def time_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """At least single precision."""
        return torch.promote_types(dtype, torch.float32)

    def ascending_times(self, steps: int, discretisation: str) -> list[float]:
        """linear and trailing t_i = T i / N; quadratic t_i = T (i / N)^2."""
        fraction = torch.arange(steps + 1, dtype=torch.float64) / steps
        return (self.T * (fraction**2 if discretisation == "quadratic" else fraction)).tolist()


class KarrasVE(Continuous):
    """Variance-exploding schedule: a = 1, b = sigma. Time t *is* sigma, a float tensor.

    Its unit time is Karras time tau, which orders the noise levels between sigma_min (0) and
    sigma_max (1) by `karras_levels`. Levels outside the range keep their own sigma in every
    formula; only their tau is clamped.
    """

    spacing = "karras"

    def __init__(
        self,
        sigma_min: float = 0.002,
        sigma_max: float = 80.0,
        rho: float = RHO,
        sigma_data: float = 0.5,
    ):
        if not 0 < sigma_min < sigma_max < float("inf"):
            raise ValueError(f"need 0 < sigma_min < sigma_max, got {sigma_min} and {sigma_max}")
        if not 0 < rho < float("inf"):
            raise ValueError(f"need rho > 0, got {rho}")
        self.sigma_min, self.sigma_max, self.rho = float(sigma_min), float(sigma_max), float(rho)
        self.sigma_data = sigma_data
        self.T = self.sigma_max
        self._low, self._high = self.sigma_min ** (1 / rho), self.sigma_max ** (1 / rho)

    def a(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def b(self, t: Tensor) -> Tensor:
        return t

    def prior(self, noise: Tensor) -> Tensor:
        """x_T = sigma_max * noise."""
        return noise * self.sigma_max

    def unit_time(self, t: Tensor) -> Tensor:
        tau = (t ** (1 / self.rho) - self._low) / (self._high - self._low)
        return tau.clamp(0, 1)

    def from_unit_time(self, tau: Tensor) -> Tensor:
        return karras_levels(self.sigma_min, self.sigma_max, tau, self.rho)

    def network_time(self, u: Tensor) -> Tensor:
        return torch.where(u == 0, torch.full_like(u, self.sigma_min), u)

    def levels(self) -> tuple[float, float]:
        return self.sigma_min, self.sigma_max

    def time_of(self, sigma: Tensor) -> Tensor:
        return sigma

    def power(self, discretisation: str, rho: float | None) -> float:
        return rho or (self.rho if discretisation == "karras" else super().power(discretisation, rho))


class RectifiedFlow(Continuous):
    """Straight paths: a_t = 1 - t, b_t = t, for t in [0, 1].

    At t = 1 no signal is left and eps says nothing of x_0. There a is held at `least`, so that
    sigma and every solver step stay finite. A network that predicts the velocity v = eps - x_0
    has eps = (x_t + a_t v) / (a_t + b_t).
    """

    T = 1.0

    def __init__(self, sigma_data: float = 0.5, least: float = 1e-3):
        if not 0 < least < 1:
            raise ValueError(f"need 0 < least < 1, got {least}")
        self.sigma_data, self.least = sigma_data, least

    def a(self, t: Tensor) -> Tensor:
        return (1 - t).clamp(min=self.least)

    def b(self, t: Tensor) -> Tensor:
        return t

    def unit_time(self, t: Tensor) -> Tensor:
        return t

    def from_unit_time(self, tau: Tensor) -> Tensor:
        return tau

    def network_time(self, u: Tensor) -> Tensor:
        return u.clamp(min=self.least)

    def levels(self) -> tuple[float, float]:
        """Those of t = least and t = 1 - least."""
        high = (1 - self.least) / self.least
        return 1 / high, high

    def time_of(self, sigma: Tensor) -> Tensor:
        """t = sigma / (1 + sigma), and T from the highest level on."""
        return torch.where(sigma < self.levels()[1] * (1 - 1e-6), sigma / (1 + sigma), self.T)


class GVP(RectifiedFlow):
    """Generalised variance-preserving paths: a_t = cos(pi t / 2), b_t = sin(pi t / 2), for t in [0, 1].

    As on straight paths, a is held at `least`. A network that predicts the velocity v = dx_t / dt has
    eps = b_t x_t + (2 / pi) a_t v.
    """

    def a(self, t: Tensor) -> Tensor:
        return (t * (math.pi / 2)).cos().clamp(min=self.least)

    def b(self, t: Tensor) -> Tensor:
        return (t * (math.pi / 2)).sin()

    def levels(self) -> tuple[float, float]:
        high = 1 / math.tan(self.least * math.pi / 2)
        return 1 / high, high

    def time_of(self, sigma: Tensor) -> Tensor:
        """t = (2 / pi) atan(sigma), and T from the highest level on."""
        return torch.where(sigma < self.levels()[1] * (1 - 1e-6), sigma.atan() * (2 / math.pi), self.T)
