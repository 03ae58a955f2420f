"""Samples of a model in diffusers' format, for whatever measures them or shows them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ogdm_core.guidance import Guide, guided, guided_nfe, load_guide, once_per_step
from ogdm_core.progress import Progress
from ogdm_core.random import generator_of
from ogdm_core.samplers import sample, steps_for_nfe
from ogdm_core.splice.diffusers import make_eps_fn, schedule_of
from ogdm_core.splice.sampling import write_npz
from ogdm_core.trainer.images import to_uint8
from ogdm_core.trainer.train import load_model


def cells(text: str) -> list[tuple[str, int]]:
    """'euler-5,s-pndm-10' as (sampler, NFE) pairs; raises what argparse shows."""
    pairs = [cell.rpartition("-")[::2] for cell in text.split(",")]
    try:
        found = [(sampler, int(nfe)) for sampler, nfe in pairs]
        for sampler, nfe in found:
            steps_for_nfe(sampler, nfe)
    except ValueError as error:
        words = f"{text!r}: {error}; give SAMPLER-NFE[,...], such as euler-5,s-pndm-10"
        raise argparse.ArgumentTypeError(words) from None
    return found


def labels(unet: Any, noise: Tensor) -> Tensor | None:
    """Image i is of class i mod classes; None for a model without classes."""
    classes = unet.config.num_class_embeds or 0
    return torch.arange(len(noise), device=noise.device) % classes if classes else None


def draw(
    unet: Any, scheduler: Any, noise: Tensor, sampler: str, nfe: int, batch: int = 64, *,
    discretisation: str | None = None, guide: Guide | None = None, weight: float = 1.0,
) -> Tensor:  # fmt: skip
    """Samples [N, C, H, W] in [-1, 1] from unit noise; image i is of class i mod classes.

    guide, weight   corrects eps once per step (`ogdm_core.guidance`)
    """
    schedule = schedule_of(scheduler)
    label, parts = labels(unet, noise), []
    progress = Progress(f"{sampler} {nfe}: image", len(noise))
    for i in range(0, len(noise), batch):
        part = None if label is None else label[i : i + batch]
        eps_fn = make_eps_fn(unet, schedule, scheduler.config.prediction_type, part)
        if guide is not None:
            turns = once_per_step(sampler, nfe)
            eps_fn = guided(eps_fn, guide, schedule, weight, part, turns)
        x = sample(
            eps_fn, schedule.prior(noise[i : i + batch]), schedule, sampler=sampler, nfe=nfe,
            discretisation=discretisation, generator=generator_of("steps", i, device=noise.device),
        )  # fmt: skip
        parts.append(x.clamp(-1, 1))
        progress.update(min(i + batch, len(noise)))
    return torch.cat(parts)


def draw_images(
    model: str, path: Path, count: int, sampler: str, nfe: int, seed: int = 0,
    discretisation: str | None = None, guide: Path | None = None, weight: float = 1.0,
) -> None:  # fmt: skip
    """Writes `count` samples to an npz, as an evaluator reads them."""
    unet, scheduler = load_model(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    unet.to(device).eval()
    size = unet.config.sample_size
    shape = (count, unet.config.in_channels, size, size)
    noise = torch.randn(shape, generator=generator_of(seed, "samples")).to(device)
    x = draw(unet, scheduler, noise, sampler, nfe, discretisation=discretisation,
             guide=load_guide(guide, device) if guide else None, weight=weight)  # fmt: skip
    label = labels(unet, noise)
    images = to_uint8(x).permute(0, 2, 3, 1).numpy()
    write_npz(str(path), images, None if label is None else label.cpu().numpy())
    cost = guided_nfe(sampler, nfe) if guide else nfe
    print(f"wrote {path}: {count} images, {sampler}, NFE {cost}", flush=True)
