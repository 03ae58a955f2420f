"""Consistency distillation (Song et al. 2023) for diffusers' U-Nets.

A student f(x_t, t) = c_skip x_t + c_out F(x_t, t) estimates x_0; F is the teacher's network, and
starts with its weights. It learns to give the same answer all along the teacher's path: f(x_t, t)
approaches f(x_u, u) of the student's average weights, where x_u is the teacher's Euler step from t
to the next lower time u of a fixed grid. f(x, 0) = x by construction.
"""

import copy

import torch
from torch import Tensor

from ogdm_core.images import Images, batch_index
from ogdm_core.progress import Progress
from ogdm_core.random import generator_of
from ogdm_core.schedule import DiscreteVP, expand
from ogdm_core.solvers import EpsFn, step
from run.sampling import Model

FLOOR = 0.5  # a_T is 0.006, and 1 / a_T would multiply the network's error
HUBER = 0.03  # c of the pseudo-Huber loss, which is about quadratic below it
BATCH, LR, EMA = 64, 1.5e-3, 0.95  # images per step; rate, which falls to 0; decay of the average


def consistency(eps_fn: EpsFn, schedule: DiscreteVP) -> EpsFn:
    """f(x [N, ...], t [N]) = (a + b^2 / m) x - (b / m) eps, with m = max(a_t, FLOOR).

    Where a_t >= FLOOR this is the network's own estimate of x_0, (x - b eps) / a; f(x, 0) = x.
    """

    def f(x: Tensor, t: Tensor) -> Tensor:
        a, b = schedule.a(t), schedule.b(t)
        m = a.clamp(min=FLOOR)
        return expand(a + b**2 / m, x) * x - expand(b / m, x) * eps_fn(x, schedule.network_time(t))

    return f


def grid_times(schedule: DiscreteVP, grid: int) -> Tensor:
    """Times 0 < ... < T [grid + 1] of the teacher's steps, the only ones that f is trained at."""
    return torch.tensor(schedule.times(grid, "trailing")[::-1], dtype=torch.long)


def distil(teacher: Model, images: Images, steps: int, grid: int, seed: int = 0, name: str = "step") -> Model:
    """The student after `steps` steps: the average of its weights."""
    schedule, device = teacher.schedule, teacher.device
    student, average = copy.deepcopy(teacher), copy.deepcopy(teacher)
    student.unet.train()
    optimizer = torch.optim.Adam(student.unet.parameters(), lr=LR)
    times, rng = grid_times(schedule, grid), generator_of("distil", seed)
    with Progress(name, steps) as progress:
        for i in range(steps):
            index = batch_index(len(images), BATCH, i, seed)
            x_0 = images.batch(index).to(device)
            eps = torch.randn(x_0.shape, generator=rng).to(device)
            n = torch.randint(1, grid + 1, (BATCH,), generator=rng)
            t, u = times[n].to(device), times[n - 1].to(device)
            classes = teacher.unet.config.num_class_embeds and images.labels is not None
            label = images.labels[index].to(device) if classes else None
            x_t = schedule.diffuse(x_0, eps, t)
            with torch.no_grad():
                x_u = step(schedule, x_t, teacher.eps_fn(label)(x_t, t), t, u)
                target = consistency(average.eps_fn(label), schedule)(x_u, u)
            gap = (consistency(student.eps_fn(label), schedule)(x_t, t) - target).flatten(1)
            loss = ((gap.square().sum(1) + HUBER**2).sqrt() - HUBER).mean()
            optimizer.param_groups[0]["lr"] = LR * (1 - i / steps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for p, q in zip(average.unet.parameters(), student.unet.parameters(), strict=True):
                    p.lerp_(q, 1 - EMA)
            progress.update(i + 1, f"loss {float(loss.detach()):.3f}", show=(i + 1) % 500 == 0)
    return average


@torch.no_grad()
def draw(student: Model, noise: Tensor, grid: int, steps: int) -> Tensor:
    """Samples in [-1, 1], on the CPU, from unit noise.

    They are f(x_T, T); with two steps, f again after noise is added to that, up to 2 T / 3.
    """
    noise, schedule = noise.to(student.device), student.schedule
    f = consistency(student.eps_fn(student.labels(len(noise))), schedule)
    times = grid_times(schedule, grid).to(noise.device)
    x = f(schedule.prior(noise), times[-1].expand(len(noise))).clamp(-1, 1)
    if steps == 2:
        t = times[2 * grid // 3].expand(len(noise))
        again = torch.randn(noise.shape, generator=generator_of("second step")).to(noise)
        x = f(schedule.diffuse(x, again, t), t).clamp(-1, 1)
    return x.cpu()
