"""What the core's tests share: data whose score is known, denoisers that count, small observers."""

import math

import torch
from torch import nn

from ogdm_core import GVP, DiscreteVP, KarrasVE, Observer, OGDMConfig, RectifiedFlow
from ogdm_core.schedule import expand


class Mixture:
    """Gaussian mixture sum_i w_i N(m_i, c_i^2 I), diffused by a schedule: eps is known exactly.

    q_t = sum_i w_i N(a_t m_i, (a_t^2 c_i^2 + b_t^2) I) and eps(x, t) = -b_t grad log q_t(x).
    """

    def __init__(self, schedule, dtype=torch.float64):
        self.schedule = schedule
        self.means = torch.tensor([[-1.0, 0.3], [0.8, -0.5], [0.4, 1.2]], dtype=dtype)
        self.stds = torch.tensor([0.5, 0.7, 0.4], dtype=dtype)
        self.weights = torch.tensor([0.5, 0.2, 0.3], dtype=dtype)
        self.calls = 0
        self.times = []

    def __call__(self, x, t):
        """eps [N, 2] at x [N, 2], t [N]."""
        self.calls += 1
        self.times.append(t)
        return self.eps(x, expand(self.schedule.a(t), x), expand(self.schedule.b(t), x))

    def eps(self, x, a, b):
        """eps at signal level a and noise level b, [N, 1] or numbers."""
        variance = a**2 * self.stds**2 + b**2  # [N, 3]
        mean = self.means if isinstance(a, float) else a[..., None] * self.means
        offset = x[:, None] - mean  # [N, 3, 2]
        logit = self.weights.log() - variance.log() - offset.square().sum(2) / variance / 2
        score = -(logit.softmax(1) / variance)[..., None] * offset
        return -b * score.sum(1)

    def solution(self, y, sigma, steps=400):
        """x_0 from y = x_t / a_t [N, 2] at sigma_t: classical Runge-Kutta on dy / dsigma = eps.

        sigma = tan(theta) with even steps in theta; knows nothing of schedules and samplers.
        """
        theta = torch.linspace(math.atan(sigma), 0, steps + 1, dtype=torch.float64).tolist()

        def slope(y, theta):
            return self.eps(y, 1.0, math.tan(theta)) / math.cos(theta) ** 2

        for now, after in zip(theta[:-1], theta[1:], strict=True):
            h = after - now
            k_1 = slope(y, now)
            k_2 = slope(y + h / 2 * k_1, now + h / 2)
            k_3 = slope(y + h / 2 * k_2, now + h / 2)
            k_4 = slope(y + h * k_3, after)
            y = y + h / 6 * (k_1 + 2 * k_2 + 2 * k_3 + k_4)
        return y


def cosine_vp(T):
    """sigma_t = tan(1.4 t / T): the simplest smooth grid with an end at the data."""
    angle = 1.4 * torch.arange(1, T + 1, dtype=torch.float64) / T
    return DiscreteVP(angle.cos().square())


class TinyNet(nn.Module):
    """A denoiser eps_theta(x, t) that counts its evaluations."""

    def __init__(self, channels=3, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(channels, channels, 3, 3, generator=generator) / 5)
        self.calls = 0
        self.times = []

    def forward(self, x, t):
        self.calls += 1
        self.times.append(t.detach().clone())
        y = torch.nn.functional.conv2d(x, self.weight.to(x.dtype), padding=1)
        return y + expand(torch.sin(t.double()), x)


SCHEDULES = {"vp": DiscreteVP.linear, "ve": KarrasVE, "flow": RectifiedFlow, "gvp": GVP}
SMALL = {"d_kind": "paper", "d_width": 0.02, "r1_every": 4, "k": 0.3, "gamma": 0.5}


def make_observer(kind="vp", size=8, channels=3, labels=0, **settings):
    """An observer whose D has 8 channels everywhere."""
    config = OGDMConfig(**SMALL | settings)
    return Observer(config, SCHEDULES[kind](), channels, size, labels)


def make_batch(schedule, n=8, size=8, channels=3, seed=0):
    """x_0, eps, x_t, t of one microbatch, and a lookahead s that fits t."""
    generator = torch.Generator().manual_seed(seed)
    x_0 = torch.randn(n, channels, size, size, generator=generator) / 2
    eps = torch.randn(n, channels, size, size, generator=generator)
    if isinstance(schedule, DiscreteVP):
        t = torch.randint(2, schedule.T + 1, (n,), generator=generator)
        s = (t + 1) // 2
    else:
        tau = 0.1 + 0.8 * torch.rand(n, generator=generator)
        t, s = schedule.from_unit_time(tau), tau / 2
    x_t = schedule.diffuse(x_0, eps, t)
    return {"x_0": x_0, "eps": eps, "x_t": x_t, "t": t}, s


def observe(observer, batch, net, **kwargs):
    """One microbatch as a trainer would hand it over."""
    eps_t = net(batch["x_t"], batch["t"])
    return observer.observe(**batch, eps_t=eps_t, eps_fn=net, **kwargs)


def loss_weights(observer):
    """Collects (t, w) of every observation: w is how the trainer's loss weights an error of eps at t."""
    found, plain = [], observer._weight

    def spy(t, u, eps_t, eps, transition):
        weight = plain(t, u, eps_t, eps, transition)
        found.append((t, weight / plain(t, u, eps_t, eps, None)))
        return weight

    observer._weight = spy
    return found


def gradients(module):
    """Copies of a module's gradients, in order."""
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def weights(module):
    """Copies of a module's parameters, in order."""
    return [p.detach().clone() for p in module.parameters()]


def halves(batch):
    """The batch as two microbatches."""
    n = len(batch["t"]) // 2
    return [{k: v[:n] for k, v in batch.items()}, {k: v[n:] for k, v in batch.items()}]


def inputs(n=4, size=8, channels=3, seed=0):
    """Images and (t, s) in [0, 1] for D."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, channels, size, size, generator=generator)
    t = torch.rand(n, generator=generator)
    return x, t, t / 3


def differences(a, b, name=""):
    """The names of what is not bit for bit the same in nested dicts and lists."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [d for key in a for d in differences(a[key], b[key], f"{name}/{key}")]
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [d for i, pair in pairs for d in differences(*pair, f"{name}/{i}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [name]
    return [] if type(a) is type(b) and a == b else [name]
