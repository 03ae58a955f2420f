"""Few-step sampling in NVlabs/edm: what the patched generate.py calls."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..denoiser import SIGMA_MAX, SIGMA_MIN, make_eps_fn
from ..fewstep import Collection, click_options
from ..guidance import gradient_plan, guided, load_guide
from ..nfe import SAMPLERS
from ..samplers import sample
from ..schedule import KarrasVE

__all__ = ["Collection", "few_steps", "generate_options"]

generate_options = click_options(
    ("sampler", "nfe", "grid", "order", "npz", "guide", "guide_weight"),
    own=("num_steps", "solver", "discretization", "schedule", "scaling", "S_churn", "S_min", "S_max", "S_noise"),
    samplers=tuple(name for name in SAMPLERS if name != "stochastic"),
)


def few_steps(
    net,
    latents: Tensor,
    class_labels: Tensor | None,
    randn_like: Callable,
    *,
    sampler: str,
    nfe: int,
    grid: str | Mapping[str, Any] | None = None,
    rho: float | None = None,
    order: int | None = None,
    guide: str | None = None,
    guide_weight: float = 1.0,
    sigma_min: float = SIGMA_MIN,
    sigma_max: float = SIGMA_MAX,
    **own: Any,
) -> Tensor:
    """Images [N, C, H, W] from unit noise, over upstream's default noise levels or those of `grid`, in float64.

    Has the signature of upstream's sampling functions and stands in for them.

    guide, guide_weight   a guide's file and its weight: discriminator guidance, once per step
    """
    schedule = KarrasVE(max(sigma_min, net.sigma_min), min(sigma_max, net.sigma_max))
    x_T = schedule.prior(latents.double())
    eps_fn = make_eps_fn(net, class_labels)
    if guide is not None:
        d, plan = load_guide(guide, latents.device), gradient_plan(sampler, nfe)
        eps_fn = guided(eps_fn, d, schedule, guide_weight, class_labels, plan)
    return sample(eps_fn, x_T, schedule, sampler=sampler, nfe=nfe, discretisation=grid, rho=rho, order=order)
