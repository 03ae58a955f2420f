"""Few-step sampling in NVlabs/edm2: what the patched generate_images.py calls."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import click
import torch
from torch import Tensor

from .. import fewstep
from ..denoiser import SIGMA_MAX, SIGMA_MIN, make_eps_fn
from ..guidance import guided_evaluations
from ..nfe import SAMPLERS
from ..samplers import sample
from ..schedule import KarrasVE

__all__ = ["generate_options", "prepare"]  # the patch's


def generate_options(main: Callable) -> Callable:
    """Adds `--sampler`, `--nfe`, their kind and `--npz` to upstream's command.

    With guidance, its function gets in `nfe` the evaluations of the guided denoiser, each of which takes two networks'.
    """
    checked = fewstep.click_options(
        ("sampler", "nfe", "grid", "order", "npz"), own=("num_steps", "S_churn", "S_min", "S_max", "S_noise"),
        samplers=tuple(name for name in SAMPLERS if name != "stochastic"),
    )(main)  # fmt: skip

    @functools.wraps(checked)
    def counted(**kwargs: Any) -> Any:
        presets = main.__globals__.get("config_presets", {})
        guidance = kwargs["guidance"]
        if guidance is None:
            guidance = presets.get(kwargs["preset"], {}).get("guidance", 1)
        if guidance != 1 and (kwargs["sampler"] or kwargs["nfe"]):
            try:
                kwargs["nfe"] = guided_evaluations(fewstep.NFE if kwargs["nfe"] is None else kwargs["nfe"])
            except ValueError as error:
                raise click.UsageError(f"--nfe: {error}") from error
        return checked(**kwargs)

    return counted


def prepare(opts: dict[str, Any]) -> "Collection":
    """Takes our flags out of upstream's options; with --sampler, ours takes the place of its sampler."""
    npz, sampler, nfe, grid, order = (opts.pop(name) for name in ("npz", "sampler", "nfe", "grid", "order"))
    if sampler:
        opts["sampler_fn"] = functools.partial(few_steps, sampler=sampler, nfe=nfe, grid=grid, order=order)
    return Collection(npz, opts["seeds"])


class Collection(fewstep.Collection):
    """Upstream's batches in one npz, or nothing where `path` is None."""

    def take(self, batch: Any) -> None:
        """One batch as upstream yields it: images uint8 [N, C, H, W], seeds, labels one-hot or None."""
        if self.path and batch.images is not None:
            images = batch.images.permute(0, 2, 3, 1).cpu().numpy()
            self.add(torch.as_tensor(batch.seeds), images, batch.labels)

    def finish(self) -> None:
        """Rank 0 writes; every rank must call."""
        if self.path:
            self.write()


def few_steps(
    net,
    noise: Tensor,
    labels: Tensor | None = None,
    gnet=None,
    *,
    sampler: str,
    nfe: int,
    grid: str | Mapping[str, Any] | None = None,
    rho: float | None = None,
    order: int | None = None,
    sigma_min: float = SIGMA_MIN,
    sigma_max: float = SIGMA_MAX,
    guidance: float = 1.0,
    **own: Any,
) -> Tensor:
    """Images [N, C, H, W] from unit noise in `nfe` evaluations of the guided denoiser, in float64.

    Has the signature of upstream's sampler and stands in for it. As there, D = D_gnet + guidance (D_net - D_gnet).
    """

    def denoise(x: Tensor, sigma: Tensor, class_labels: Tensor | None) -> Tensor:
        denoised = net(x, sigma, class_labels)
        return denoised if guidance == 1 else gnet(x, sigma, class_labels).lerp(denoised, guidance)

    schedule = KarrasVE(sigma_min, sigma_max)
    eps_fn, x_T = make_eps_fn(denoise, labels), schedule.prior(noise.double())
    return sample(eps_fn, x_T, schedule, sampler=sampler, nfe=nfe, discretisation=grid, rho=rho, order=order)
