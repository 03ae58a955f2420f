"""Operations of a training step from shapes alone: tensors without data, so nothing is computed.

What takes minutes to time at 128x128 is counted in seconds. Euler's projection, exact mode.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ogdm_core.losses import r1_penalty
from ogdm_core.observer import KINDS

from .cases import CASES
from .measure import Operations, silent
from .trainers import Trainer


def growth_of_operations(trainer: Trainer, names: tuple[str, ...], quick: bool) -> dict:
    """{case: {"flops_ratio": ...}} for a trainer on the device "meta"."""
    baseline = _count(lambda: trainer.step(None, None, silent))
    return {
        name: {"flops_ratio": 1 + _observation(trainer, name, quick) / baseline} for name in names
    }


def _observation(trainer: Trainer, name: str, quick: bool) -> float:
    """Operations that a case adds to the baseline's step, in the mean over steps."""
    config = CASES[name].config(quick)
    if config.projection != "euler" or config.fused or CASES[name].naive:
        raise ValueError(f"{name} is not counted from shapes; time it with --cases {name}")
    n, size = trainer.size.batch, trainer.size.resolution
    D = KINDS[config.d_kind](3, size, width=config.d_width).to("meta")

    def score(count: int) -> tuple[Tensor, Tensor]:
        x = torch.empty(count, 3, size, size, device="meta", requires_grad=True)
        t = torch.empty(count, device="meta")
        return D(x, t, t), x

    def emission() -> None:
        D.requires_grad_(False)
        score(n)[0].sum().backward()
        D.requires_grad_(True)

    def plain() -> None:
        t = torch.empty(2 * n, device="meta")
        D(torch.empty(2 * n, 3, size, size, device="meta"), t, t, parts=2).sum().backward()

    def penalised() -> None:
        logit, real = score(n)
        t = torch.empty(n, device="meta")
        fake = D(torch.empty(n, 3, size, size, device="meta"), t, t)
        (logit.sum() + r1_penalty(logit, real).sum() + fake.sum()).backward()

    rare = 1 / config.r1_every if config.r1 > 0 else 0.0
    return _count(emission) + (1 - rare) * _count(plain) + rare * _count(penalised)


def _count(work: Callable[[], None]) -> int:
    with Operations() as operations:
        work()
    return operations.flops
