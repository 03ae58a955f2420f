"""Samples of a model in diffusers' format, for whatever measures them or shows them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import trange

from ogdm_core.cli import bar_interval
from ogdm_core.diffusers.model import load_model, make_eps_fn, schedule_of, unet_config
from ogdm_core.fewstep import write_npz
from ogdm_core.guidance import Guide, gradient_plan, guided, guided_nfe, load_guide
from ogdm_core.images import to_uint8
from ogdm_core.random import generator_of
from ogdm_core.samplers import sample
from ogdm_core.solvers import EpsFn
from run import backbones
from run.backbones.base import Backbone
from run.launch import Engine
from run.provenance import ROOT

BATCH = 64  # images at once


def shape_of(config: Mapping[str, Any], file: str | Path) -> tuple[int, int, int]:
    """(C, H, W) of a U-Net's images, from its config, which `file` holds."""
    channels, size = config.get("in_channels"), config.get("sample_size")
    shape = (channels, *(size if isinstance(size, list | tuple) else (size, size)))
    if len(shape) != 3 or not all(isinstance(n, int) and n > 0 for n in shape):
        raise ValueError(
            f"{file} has in_channels {channels} and sample_size {size}; write a whole number for "
            "in_channels, and one or two for sample_size"
        )
    return shape


class Model:
    """A model in diffusers' format, ready to be sampled: eps_theta and its schedule."""

    def __init__(self, path: str, device: str | None = None):
        self.unet, scheduler = load_model(path)
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.unet.to(self.device).eval()
        self.schedule, self.kind = schedule_of(scheduler), scheduler.config.prediction_type
        self.shape = shape_of(self.unet.config, unet_config(path))

    def labels(self, count: int) -> Tensor | None:
        """[count]: image i is of class i mod classes; None for a model without classes."""
        classes = self.unet.config.num_class_embeds or 0
        return torch.arange(count, device=self.device) % classes if classes else None

    def eps_fn(self, label: Tensor | None) -> EpsFn:
        """The network as eps(x [N, ...], t [N])."""
        return make_eps_fn(self.unet, self.schedule, self.kind, {"class_labels": label})

    def draw(
        self, noise: Tensor, sampler: str, nfe: int, *,
        discretisation: str | None = None, guide: Guide | None = None, weight: float = 1.0,
        batch: int = BATCH,
    ) -> Tensor:  # fmt: skip
        """Samples [N, C, H, W] in [-1, 1], on the CPU; `guide` corrects eps once per step."""
        labels, parts = self.labels(len(noise)), []
        for i in trange(
            0, len(noise), batch, desc=f"{sampler} {nfe}", unit="batch", leave=False, mininterval=bar_interval()
        ):
            label = None if labels is None else labels[i : i + batch]
            eps_fn = self.eps_fn(label)
            if guide is not None:
                plan = gradient_plan(sampler, nfe)
                eps_fn = guided(eps_fn, guide, self.schedule, weight, label, plan)
            x = sample(
                eps_fn, self.schedule.prior(noise[i : i + batch].to(self.device)), self.schedule,
                sampler=sampler, nfe=nfe, discretisation=discretisation,
                generator=generator_of("steps", i, device=self.device),
            )  # fmt: skip
            parts.append(x.clamp(-1, 1).cpu())
        return torch.cat(parts)


def draw_images(
    path: str, output: Path, count: int, sampler: str, nfe: int, seed: int = 0,
    discretisation: str | None = None, guide: Path | None = None, weight: float = 1.0,
) -> None:  # fmt: skip
    """Writes `count` samples of the model at `path` to an npz, as an evaluator reads them."""
    model = Model(path)
    noise = torch.randn((count, *model.shape), generator=generator_of(seed, "samples"))
    x = model.draw(noise, sampler, nfe, discretisation=discretisation,
                   guide=load_guide(guide, model.device) if guide else None,
                   weight=weight)  # fmt: skip
    label = model.labels(count)
    images = to_uint8(x).permute(0, 2, 3, 1).numpy()
    write_npz(str(output), images, None if label is None else label.cpu().numpy())
    cost = guided_nfe(sampler, nfe) if guide else nfe
    print(f"wrote {output}: {count} images, {sampler}, NFE {cost}", flush=True)


def backbone_of(path: Path) -> Backbone | None:
    """The backbone whose weights the file holds; None for a model in diffusers' format or an npz of samples."""
    if path.suffix == ".npz" or unet_config(path).is_file():
        return None
    found = [b for b in map(backbones.get, backbones.NAMES) if path.is_file() and path.suffix == b.suffix]
    if not found:
        kinds = ", ".join(backbones.get(name).suffix for name in backbones.NAMES)
        raise ValueError(f"{path} is no model in diffusers' format, no .npz and no file of weights ({kinds})")
    return found[0]


def draw(
    path: Path, folder: Path, count: int, sampler: str, nfe: int, seed: int = 0, discretisation: str | None = None
) -> Path:
    """An npz in `folder` with samples of a model, drawn here or by the native script of its codebase."""
    backbone, npz = backbone_of(path), folder / "samples.npz"
    if path.suffix == ".npz":
        return path
    if backbone is None:
        draw_images(str(path), npz, count, sampler, nfe, seed, discretisation)
        return npz
    third_party = ROOT / "third_party"
    if problem := backbone.not_ready(third_party):
        raise ValueError(problem)
    backbone.check_sampling(sampler)
    engine = Engine(max(1, torch.cuda.device_count()))
    command = backbone.sample_file(path, folder, sampler, nfe, count, seed, discretisation, engine)
    if command.run():
        raise ValueError(f"{path} could not be sampled; the reason is above. The command was: {command}")
    return next(folder.glob(backbone.samples)) if backbone.samples else npz
