"""Discriminator guidance (Kim et al. 2023): a fixed model's score, corrected when it samples.

A guide d = sigmoid(logit) tells diffused data q_t from diffused samples p_t of the model. The best
one has logit = log q_t / p_t, so its gradient is the model's error in the score. As eps = -b score,

    score' = score + w grad_x logit(x_t, t)        eps' = eps - w b_t grad_x logit(x_t, t)

and with w = 1 eps' is the data's own. With y = x_t / a_t, the last term is w sigma_t grad_y logit:
y and sigma determine the input, so a guide does not depend on the schedule, and the same file serves
a VP and a VE model.
"""

import os
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoints import read_safetensors, reading
from .discriminator import KINDS
from .files import atomic_write
from .nfe import SAMPLERS, steps_for_nfe
from .schedule import KarrasVE, Schedule, expand
from .solvers import EpsFn

FORMAT = "ogdm-guide-1"


def guided_evaluations(nfe: int) -> int:
    """How often `nfe` network evaluations evaluate a denoiser that another one guides: each takes two.

    For classifier-free guidance and autoguidance, which the backbones' own scripts offer.
    """
    if nfe % 2:
        raise ValueError(f"with guidance each evaluation takes two networks' and counts two, so {nfe} is not even; "
                         f"give {nfe - 1} or {nfe + 1}")  # fmt: skip
    return nfe // 2


class Guide(nn.Module):
    """The logit of d(y, sigma[, label]), for y = x_t / a_t = x_0 + sigma eps.

    channels, size, labels, width   as those of a discriminator
    kind                            light or paper: which discriminator
    sigma_data                      standard deviation of the data, which inputs are scaled by
    """

    def __init__(
        self, channels: int, size: int, labels: int = 0, width: float = 1.0, kind: str = "light",
        sigma_data: float = 0.5,
    ):  # fmt: skip
        super().__init__()
        self.settings = {"channels": channels, "size": size, "labels": labels, "width": width, "kind": kind,
                         "sigma_data": sigma_data}  # fmt: skip
        self.levels = KarrasVE(sigma_data=sigma_data)  # orders the noise levels in [0, 1]
        self.d = KINDS[kind](channels, size, labels, width)

    def forward(self, y: Tensor, sigma: Tensor, label: Tensor | None = None) -> Tensor:
        """Logits [N] of y [N, C, H, W] at noise levels sigma [N]; each from its own image alone."""
        tau = self.levels.unit_time(sigma).float()
        x = self.levels.whiten(y, sigma).float()
        label = label if self.settings["labels"] else None
        return self.d(x, tau, torch.zeros_like(tau), label, parts=len(x))


def correction(guide: Guide, x: Tensor, t: Tensor, schedule: Schedule, label: Tensor | None = None) -> Tensor:
    """-b_t grad_x logit(x_t, t), [N, ...] in x's dtype: what eps lacks, by the guide."""
    sigma = schedule.sigma(t)
    with torch.enable_grad():
        y = (x / expand(schedule.a(t), x)).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(guide(y, sigma, label).sum(), y)
    return -expand(sigma, x) * gradient


def guided(
    eps_fn: EpsFn,
    guide: Guide,
    schedule: Schedule,
    weight: float = 1.0,
    label: Tensor | None = None,
    plan: Iterable[str] | None = None,
) -> EpsFn:
    """eps' = eps + w * correction, as a function of (x, t) like eps_fn.

    plan   what the guide does at each evaluation of one run of a sampler, such as `gradient_plan`:
           "compute" its gradient, "reuse" the last one, or "skip". Absent, every evaluation computes it
    """
    plan, term = repeat("compute") if plan is None else iter(plan), torch.zeros(())

    def eps_guided(x: Tensor, t: Tensor) -> Tensor:
        nonlocal term
        eps, action = eps_fn(x, t), next(plan)
        if action == "skip":
            return eps
        if action == "compute":
            term = weight * correction(guide, x, t, schedule, label)
        return eps + term

    return eps_guided


def gradient_plan(sampler: str, nfe: int) -> list[str]:
    """The plan by which Table 7 counts: one gradient per step, none in the last step."""
    steps = steps_for_nfe(sampler, nfe)
    *before, last = SAMPLERS[sampler].evaluations(steps)
    return [action for n in before for action in ("compute", *["reuse"] * (n - 1))] + ["skip"] * last


def guided_nfe(sampler: str, nfe: int) -> int:
    """The cost with a guide, a gradient counted as one evaluation: 3N - 2 for N steps of Heun."""
    return nfe + gradient_plan(sampler, nfe).count("compute")


def save_guide(path: str | os.PathLike, guide: Guide, **notes: Any) -> None:
    """Writes weights, settings and notes as one safetensors file, whole or not at all."""
    from safetensors.torch import save

    about = {k: str(v) for k, v in {"format": FORMAT, **guide.settings, **notes}.items()}
    weights = {name: value.contiguous().cpu() for name, value in guide.state_dict().items()}
    with atomic_write(path) as file:
        file.write(save(weights, about))


def load_guide(path: str | os.PathLike, device: torch.device | str = "cpu") -> Guide:
    """The guide that `save_guide` wrote, ready to sample with."""
    weights, about = read_safetensors(path, device)
    if about.get("format") != FORMAT:
        raise ValueError(f"{path} is not a guide; `run/guidance.sh train` makes one")
    with reading(path, "`run/guidance.sh train` makes another"):
        whole_numbers = {name: int(about[name]) for name in ("channels", "size", "labels")}
        width, sigma_data = float(about["width"]), float(about["sigma_data"])
        guide = Guide(**whole_numbers, width=width, kind=about["kind"], sigma_data=sigma_data)
        guide.load_state_dict(weights)
    return guide.to(device).eval().requires_grad_(False)
