"""Noise schedules: x_t = a_t x_0 + b_t eps, with sigma_t = b_t / a_t.

Two kinds of time cover the paper's backbones:

    DiscreteVP   t = 1..T on a grid, t = 0 is the data; a_t^2 + b_t^2 = 1      (ADM, LDM, diffusers)
    KarrasVE     t is sigma itself, a = 1, b = sigma; "Karras time" orders it  (EDM)

A schedule answers in the shape of the time it is asked about. Times are tensors of shape [N].
Levels come in the best precision there is, since solvers take differences of neighbouring ones;
`expand` brings them to an image's shape and dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expand(v: Tensor, x: Tensor) -> Tensor:
    """Reshapes per-sample values v [N] to broadcast over x [N, ...], in x's dtype."""
    return v.to(x.dtype).reshape(-1, *[1] * (x.ndim - 1))


class Schedule:
    """What the solvers, the lookahead and the discriminator need to know of a noise schedule."""

    sigma_data: float

    def a(self, t: Tensor) -> Tensor:
        """Signal level a_t."""
        raise NotImplementedError

    def b(self, t: Tensor) -> Tensor:
        """Noise level b_t."""
        raise NotImplementedError

    def sigma(self, t: Tensor) -> Tensor:
        """Noise-to-signal ratio sigma_t = b_t / a_t."""
        return self.b(t) / self.a(t)

    def diffuse(self, x_0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """x_t = a_t x_0 + b_t eps."""
        return expand(self.a(t), x_0) * x_0 + expand(self.b(t), x_0) * eps

    def whiten(self, x_t: Tensor, t: Tensor) -> Tensor:
        """x_t over its standard deviation sqrt(a_t^2 sigma_data^2 + b_t^2): about unit variance."""
        scale = (self.a(t) ** 2 * self.sigma_data**2 + self.b(t) ** 2).sqrt()
        return x_t / expand(scale, x_t)


class DiscreteVP(Schedule):
    """Variance-preserving grid: a_t = sqrt(abar_t), b_t = sqrt(1 - abar_t), abar_0 = 1.

    Networks that count from 0 are asked at index t - 1.
    """

    def __init__(self, alphas_cumprod, sigma_data: float = 0.5):
        abar = torch.as_tensor(alphas_cumprod, dtype=torch.float64).flatten().cpu()
        if abar.numel() < 1 or not bool(((abar > 0) & (abar < 1)).all()):
            raise ValueError("alphas_cumprod must lie strictly between 0 and 1 at every t = 1..T")
        if not bool((abar.diff() < 0).all()):
            raise ValueError("alphas_cumprod must decrease with t")
        self.T = abar.numel()
        self.sigma_data = sigma_data
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
        return cls.from_betas(
            torch.linspace(scale * 1e-4, scale * 0.02, T, dtype=torch.float64), sigma_data
        )

    def _lookup(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """sqrt(abar) and sqrt(1 - abar) on t's device, in float64 wherever the device has it."""
        if t.device not in self._tables:
            dtype = torch.float32 if t.device.type == "mps" else torch.float64
            levels = (self._abar.sqrt(), (1 - self._abar).sqrt())
            self._tables[t.device] = tuple(level.to(dtype).to(t.device) for level in levels)
        return self._tables[t.device]

    def a(self, t: Tensor) -> Tensor:
        return self._lookup(t)[0][t]

    def b(self, t: Tensor) -> Tensor:
        return self._lookup(t)[1][t]

    def unit_time(self, t: Tensor) -> Tensor:
        """t / T in [0, 1]."""
        return t.float() / self.T

    def unit_lookahead(self, s: Tensor) -> Tensor:
        """s / T in [0, 1]."""
        return s.float() / self.T

    def lookahead(self, t: Tensor, s: Tensor) -> Tensor:
        """u = t - s."""
        return t - s

    def at_data(self, u: Tensor) -> Tensor:
        """True where u is the noiseless end, at which a network is never asked."""
        return u == 0

    def noisy(self, u: Tensor) -> Tensor:
        """u, or the least noisy time that a network knows where u is the data."""
        return u.clamp(min=1)

    def prior(self, noise: Tensor) -> Tensor:
        """x_T from standard normal noise."""
        return noise


class KarrasVE(Schedule):
    """Variance-exploding schedule: a = 1, b = sigma. Time t *is* sigma, a float tensor.

    Karras time tau in [0, 1] orders the noise levels between sigma_min (0) and sigma_max (1):

        sigma(tau) = (sigma_min^(1/rho) + tau (sigma_max^(1/rho) - sigma_min^(1/rho)))^rho

    and the lookahead s is a distance in tau. Levels outside the range keep their own sigma in
    every formula; only their tau is clamped.
    """

    def __init__(
        self,
        sigma_min: float = 0.002,
        sigma_max: float = 80.0,
        rho: float = 7.0,
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

    def unit_time(self, t: Tensor) -> Tensor:
        """Karras time tau in [0, 1]."""
        tau = (t ** (1 / self.rho) - self._low) / (self._high - self._low)
        return tau.clamp(0, 1)

    def unit_lookahead(self, s: Tensor) -> Tensor:
        return s

    def from_unit_time(self, tau: Tensor) -> Tensor:
        """sigma(tau)."""
        return (self._low + tau * (self._high - self._low)) ** self.rho

    def lookahead(self, t: Tensor, s: Tensor) -> Tensor:
        """u = sigma(tau(t) - s), never noisier than t."""
        return torch.minimum(self.from_unit_time((self.unit_time(t) - s).clamp(min=0)), t)

    def at_data(self, u: Tensor) -> Tensor:
        return u == 0

    def noisy(self, u: Tensor) -> Tensor:
        return torch.where(u == 0, torch.full_like(u, self.sigma_min), u)

    def prior(self, noise: Tensor) -> Tensor:
        """x_T = sigma_max * noise."""
        return noise * self.sigma_max
