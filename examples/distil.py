"""Consistency distillation (Song et al. 2023) of a diffusers U-Net: a student that samples in one or two steps.

    run/quickstart.sh --data digits --out out/quickstart-digits
    python examples/distil.py out/quickstart-digits/runs/ogdm-seed0-* --output out/distil/ogdm-0
    run/evaluate.sh digits out/distil/ogdm-0/samples-1.npz --features out/quickstart-digits/classifier-digits-*.pt

The student f(x_t, t) = c_skip x_t + c_out F(x_t, t) estimates x_0; F is the teacher's network, and
starts with its weights. It learns to give the same answer all along the teacher's path: f(x_t, t)
approaches f(x_u, u) of the student's average weights, where x_u is the teacher's Euler step from t
to the next lower time u of a fixed grid. f(x, 0) = x by construction.

Writes the student in diffusers' format, and samples-1.npz and samples-2.npz, in one and two steps.
"""

import argparse
import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ogdm_core import DiscreteVP, step
from ogdm_core.cli import errors_in_one_line
from ogdm_core.diffusers.model import load_model, schedule_of, to_eps
from ogdm_core.images import Images, batch_index, load, to_uint8
from ogdm_core.random import generator_of
from ogdm_core.schedule import expand

FLOOR = 0.5  # a_T is 0.006, and 1 / a_T would multiply the network's error
HUBER = 0.03  # c of the pseudo-Huber loss, which is about quadratic below it
BATCH, LR, EMA = 64, 1.5e-3, 0.95  # images per step; rate, which falls to 0; decay of the average


class Model:
    """A U-Net in diffusers' format and its schedule."""

    def __init__(self, path: str):
        self.unet, scheduler = load_model(path)
        self.unet.eval()
        self.schedule, self.kind = schedule_of(scheduler), scheduler.config.prediction_type
        self.classes = self.unet.config.num_class_embeds or 0

    def eps(self, x: Tensor, t: Tensor, label: Tensor | None) -> Tensor:
        """eps_theta(x [N, ...], t [N]), for labels [N] if the model has classes."""
        output = self.unet(x, t - 1, class_labels=label if self.classes else None).sample
        return to_eps(output, x, t, self.schedule, self.kind)

    def f(self, x: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        """The student's estimate of x_0 [N, ...]."""
        return consistency(lambda x, t: self.eps(x, t, label), self.schedule, x, t)


def consistency(eps_fn: Callable[[Tensor, Tensor], Tensor], schedule: DiscreteVP, x: Tensor, t: Tensor) -> Tensor:
    """f(x [N, ...], t [N]) = (a + b^2 / m) x - (b / m) eps, with m = max(a_t, FLOOR).

    Where a_t >= FLOOR this is the network's own estimate of x_0, (x - b eps) / a; f(x, 0) = x.
    """
    a, b = schedule.a(t), schedule.b(t)
    m = a.clamp(min=FLOOR)
    return expand(a + b**2 / m, x) * x - expand(b / m, x) * eps_fn(x, schedule.network_time(t))


def grid_times(schedule: DiscreteVP, grid: int) -> Tensor:
    """Times 0 < ... < T [grid + 1] of the teacher's steps, the only ones that f is trained at."""
    return torch.tensor(schedule.times(grid, "trailing")[::-1], dtype=torch.long)


def distil(teacher: Model, images: Images, steps: int, grid: int, seed: int = 0) -> Model:
    """The student after `steps` steps: the average of its weights."""
    schedule, times = teacher.schedule, grid_times(teacher.schedule, grid)
    student, average = copy.deepcopy(teacher), copy.deepcopy(teacher)
    student.unet.train()
    optimizer = torch.optim.Adam(student.unet.parameters(), lr=LR)
    rng = generator_of("distil", seed)
    for i in tqdm(range(steps), "distilling", unit=" steps"):
        index = batch_index(len(images), BATCH, i, seed)
        x_0 = images.batch(index)
        eps = torch.randn(x_0.shape, generator=rng)
        n = torch.randint(1, grid + 1, (BATCH,), generator=rng)
        t, u = times[n], times[n - 1]
        label = None if images.labels is None else images.labels[index]
        x_t = schedule.diffuse(x_0, eps, t)
        with torch.no_grad():
            x_u = step(schedule, x_t, teacher.eps(x_t, t, label), t, u)
            target = average.f(x_u, u, label)
        gap = (student.f(x_t, t, label) - target).flatten(1)
        loss = ((gap.square().sum(1) + HUBER**2).sqrt() - HUBER).mean()
        optimizer.param_groups[0]["lr"] = LR * (1 - i / steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(average.unet.parameters(), student.unet.parameters(), strict=True):
                p.lerp_(q, 1 - EMA)
    return average


@torch.no_grad()
def draw(student: Model, noise: Tensor, grid: int, steps: int) -> Tensor:
    """Samples in [-1, 1] from unit noise: f(x_T, T); with two steps, f again after noise is added up to 2 T / 3."""
    schedule, times = student.schedule, grid_times(student.schedule, grid)
    label = torch.arange(len(noise)) % student.classes if student.classes else None
    x = student.f(schedule.prior(noise), times[-1].expand(len(noise)), label).clamp(-1, 1)
    if steps == 2:
        t = times[2 * grid // 3].expand(len(noise))
        again = torch.randn(noise.shape, generator=generator_of("second step"))
        x = student.f(schedule.diffuse(x, again, t), t, label).clamp(-1, 1)
    return x


def main(argv: list[str] | None = None) -> None:
    """Distils one teacher, then samples its student."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("teacher", help="a folder in diffusers' format")
    p.add_argument("--data", default="digits", help="what it was trained on (default: %(default)s)")
    p.add_argument("--output", type=Path, default=Path("out/distil"), help="(default: %(default)s)")
    p.add_argument("--steps", type=int, default=500, help="(default: %(default)s)")
    p.add_argument("--grid", type=int, default=18, help="Euler steps of the teacher from T to 0 (default: %(default)s)")
    p.add_argument("--samples", type=int, default=1500, help="(default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of noise and data order (default: %(default)s)")
    args = p.parse_args(argv)
    torch.set_num_threads(1)  # the same result on any number of cores, and as fast
    with errors_in_one_line():
        teacher, images = Model(args.teacher), load(args.data)
    student = distil(teacher, images, args.steps, args.grid, args.seed)
    student.unet.save_pretrained(args.output / "unet")
    shutil.copytree(Path(args.teacher, "scheduler"), args.output / "scheduler", dirs_exist_ok=True)
    noise = torch.randn((args.samples, *images.shape), generator=torch.Generator().manual_seed(0))
    for steps in (1, 2):
        file = args.output / f"samples-{steps}.npz"
        np.savez(file, arr_0=to_uint8(draw(student, noise, args.grid, steps)).permute(0, 2, 3, 1).numpy())
        print(f"wrote {file}; run/evaluate.sh {args.data} {file} --features NET scores it")


if __name__ == "__main__":
    main()
