"""The true reverse density between its two limits (section 3.5 and appendix A.4 of the paper).

For u ~ p_u = (N(mu, 1) + N(-mu, 1)) / 2 and v | u ~ N(sqrt(1 - beta) u, beta) on the line:

    p(u | v)   = sum_{+-} w_+- N(u; sqrt(1 - beta) v +- beta mu, beta),
                 w_+- ~ exp(-(v -+ sqrt(1 - beta) mu)^2 / 2)              the true reverse density
    g(u)       = N(u; (v + beta grad log p_u(v)) / sqrt(1 - beta), beta)  its form for small beta
    p_u(u)                                                                its limit for beta -> 1
    q_xi(u)    = C_xi g(u)^(1 - xi) p_u(u)^xi                             their geometric mean
    L(xi)      = integral (q_xi(u) - p(u | v))^2 du
    xi(beta)   = argmin over [0, 1] of L

The first line is exact: a Gaussian likelihood times a Gaussian component is Gaussian. Integrals are
trapezoidal sums on an even grid. The integrands are analytic and vanish at both ends, so the error
falls exponentially with 1 / step; `Problem.refined` halves the step and lets anyone check it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SCAN = 41  # values of xi tried before minima are refined
BISECTIONS = 25  # of an interval of 2 / 40: xi to 2e-9
MOST_POINTS = 1_000_000


def log_normal(u: Array, mean: float, variance: float) -> Array:
    """log N(u; mean, variance)."""
    return -0.5 * ((u - mean) ** 2 / variance + math.log(2 * math.pi * variance))


@dataclass(frozen=True)
class Problem:
    """One (mu, v, beta), with its densities on a grid. `resolution` divides the grid's step."""

    mu: float
    v: float
    beta: float
    resolution: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.beta < 1:
            raise ValueError(f"beta={self.beta}: it must lie strictly between 0 and 1")
        if not self.mu > 0:
            raise ValueError(f"mu={self.mu}: it must be positive")
        if not math.isfinite(self.v):
            raise ValueError(f"v={self.v}: it must be finite")

    @property
    def refined(self) -> Problem:
        """The same problem on a grid twice as fine."""
        return replace(self, resolution=2 * self.resolution)

    @property
    def score(self) -> float:
        """grad log p_u at v: mu tanh(mu v) - v."""
        return self.mu * math.tanh(self.mu * self.v) - self.v

    @property
    def gaussian_mean(self) -> float:
        return (self.v + self.beta * self.score) / math.sqrt(1 - self.beta)

    @cached_property
    def u(self) -> Array:
        """Grid [M]: 10 standard deviations beyond every component, 4 points to the narrowest.

        A power of p_u has branch points where cosh(mu u) = 0, pi / (2 mu) off the real axis; 8
        points to that length keep the sum's error below exp(-16 pi).
        """
        width = math.sqrt(self.beta)
        low = min(-self.mu - 10, self.gaussian_mean - 10 * width)
        high = max(self.mu + 10, self.gaussian_mean + 10 * width)
        step = min(width / 4, math.pi / (16 * self.mu)) / self.resolution
        if (high - low) / step > MOST_POINTS:
            raise ValueError(
                f"mu={self.mu}, v={self.v}, beta={self.beta} need a grid of "
                f"{(high - low) / step:.0e} points. Keep beta between 1e-6 and 1 - 1e-6, and mu "
                "and v below 100."
            )
        return np.linspace(low, high, math.ceil((high - low) / step) + 1)

    @cached_property
    def step(self) -> float:
        return float(self.u[1] - self.u[0])

    @cached_property
    def log_prior(self) -> Array:
        """log p_u [M]."""
        modes = (log_normal(self.u, mode, 1.0) for mode in (self.mu, -self.mu))
        return np.logaddexp(*modes) - math.log(2)

    @cached_property
    def log_gaussian(self) -> Array:
        """log g [M]."""
        return log_normal(self.u, self.gaussian_mean, self.beta)

    @cached_property
    def reverse(self) -> Array:
        """p(u | v) [M]."""
        shrink = math.sqrt(1 - self.beta)
        log_odds = 2 * shrink * self.mu * self.v  # log of w_+ / w_-
        total = np.zeros_like(self.u)
        for sign in (1, -1):
            log_weight = -np.logaddexp(0.0, -sign * log_odds)
            mean = shrink * self.v + sign * self.beta * self.mu
            total += np.exp(log_weight + log_normal(self.u, mean, self.beta))
        return total

    @property
    def prior(self) -> Array:
        return np.exp(self.log_prior)

    @property
    def gaussian(self) -> Array:
        return np.exp(self.log_gaussian)

    def integrate(self, values: Array) -> Array:
        """Trapezoidal sum over the last axis [..., M]; the ends are zero to the last digit."""
        return values.sum(-1) * self.step

    def mixture(self, xi: Array | float) -> Array:
        """q_xi [..., M] for xi [...]."""
        xi = np.asarray(xi, dtype=np.float64)[..., None]
        log_q = (1 - xi) * self.log_gaussian + xi * self.log_prior
        q = np.exp(log_q - log_q.max(-1, keepdims=True))
        return q / self.integrate(q)[..., None]

    def distance(self, xi: Array | float) -> Array:
        """L(xi) [...]."""
        return self.integrate((self.mixture(xi) - self.reverse) ** 2)

    def slope(self, xi: Array | float) -> Array:
        """dL / dxi [...] from dq/dxi = q (l - E_q l), l = log p_u - log g."""
        q = self.mixture(xi)
        log_ratio = self.log_prior - self.log_gaussian
        centred = log_ratio - self.integrate(q * log_ratio)[..., None]
        return 2 * self.integrate((q - self.reverse) * q * centred)

    @cached_property
    def xi(self) -> float:
        """xi(beta): of all local minima of L that a scan of [0, 1] finds, refined, the lowest."""
        grid = np.linspace(0, 1, SCAN)
        chunks = np.array_split(grid, math.ceil(SCAN * len(self.u) / MOST_POINTS))
        scanned = np.concatenate([self.distance(chunk) for chunk in chunks])
        fenced = np.concatenate([[np.inf], scanned, [np.inf]])
        lowest = (scanned <= fenced[:-2]) & (scanned <= fenced[2:])
        minima = [self._refine(grid, int(i)) for i in np.flatnonzero(lowest)]
        return min(minima, key=self.distance)

    def _refine(self, grid: Array, index: int) -> float:
        """The zero of the slope next to grid[index], or the end of [0, 1] if L rises from it."""
        if index == 0 and self.slope(0.0) >= 0:
            return 0.0
        if index == len(grid) - 1 and self.slope(1.0) <= 0:
            return 1.0
        low, high = grid[max(index - 1, 0)], grid[min(index + 1, len(grid) - 1)]
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.slope(middle) > 0 else (middle, high)
        return float((low + high) / 2)


def total_variation(problem: Problem, other: Array) -> float:
    """Half the L1 distance of `other` [M] from the true reverse density: 0 same, 1 disjoint."""
    return float(problem.integrate(np.abs(problem.reverse - other)) / 2)


def initial_slope(mu: float, v: float) -> float:
    """d xi / d beta at beta = 0: mu^2 / cosh(mu v)^2.

    To first order in beta, p(u | v) and g have the same mean, and precisions 1 / beta - 1 + c and
    1 / beta, with c = 1 - mu^2 / cosh(mu v)^2 the curvature of -log p_u at v. The mixture's
    precision is 1 / beta + xi (c - 1 / beta), so it fits with xi = beta (1 - c).
    """
    return (mu / math.cosh(mu * v)) ** 2


def runs(values: Array, flags: NDArray[np.bool_]) -> list[tuple[float, float]]:
    """Maximal runs of true `flags` along ascending `values`, each as (first, last)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]])))
    return [(float(values[a]), float(values[b - 1])) for a, b in edges.reshape(-1, 2)]
