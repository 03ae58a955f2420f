"""Samples of a trained network, for whatever measures them or shows them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from ogdm_core.schedule import Schedule
from ogdm_core.solvers import EpsFn
from run import backbones
from run.backbones.base import Backbone
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


class Network:
    """A trained network, ready to be sampled.

    schedule   of its noise
    shape      (C, H, W) of x, which may be a latent
    eps_of     its denoiser eps(x [N, ...], t [N]) for labels [N], None where it has no classes
    decode     x [N, ...] to images in [-1, 1]
    dtype      of x while it is sampled
    """

    def __init__(
        self, schedule: Schedule, shape: tuple[int, int, int], eps_of: Callable[[Tensor | None], EpsFn],
        device: str, classes: int = 0, decode: Callable[[Tensor], Tensor] = lambda x: x,
        dtype: torch.dtype = torch.float32,
    ):  # fmt: skip
        self.schedule, self.shape, self.eps_fn, self.device = schedule, shape, eps_of, device
        self.classes, self.decode, self.dtype = classes, decode, dtype

    def labels(self, count: int) -> Tensor | None:
        """[count]: image i is of class i mod classes; None for a model without classes."""
        return torch.arange(count, device=self.device) % self.classes if self.classes else None

    def latents(
        self, noise: Tensor, sampler: str, nfe: int, *, guide: Guide | None = None, weight: float = 1.0,
        batch: int = BATCH, **solver: Any,
    ) -> Iterator[Tensor]:  # fmt: skip
        """x_0 [N, ...] of each batch; `guide` corrects eps once per step, `solver` is for `samplers.sample`."""
        labels = self.labels(len(noise))
        for i in trange(
            0, len(noise), batch, desc=f"{sampler} {nfe}", unit="batch", leave=False, mininterval=bar_interval()
        ):
            label = None if labels is None else labels[i : i + batch]
            eps_fn = self.eps_fn(label)
            if guide is not None:
                plan = gradient_plan(sampler, nfe)
                eps_fn = guided(eps_fn, guide, self.schedule, weight, label, plan)
            x_T = self.schedule.prior(noise[i : i + batch].to(self.device, self.dtype))
            yield sample(eps_fn, x_T, self.schedule, sampler=sampler, nfe=nfe,
                         generator=generator_of("steps", i, device=self.device), **solver)  # fmt: skip

    @torch.no_grad()
    def image_shape(self) -> tuple[int, ...]:
        """(C, H, W) of its images."""
        return tuple(self.decode(torch.zeros(1, *self.shape, device=self.device, dtype=self.dtype)).shape[1:])

    @torch.no_grad()
    def draw(self, noise: Tensor, sampler: str, nfe: int, **options: Any) -> Tensor:
        """Samples [N, C, H, W] in [-1, 1], on the CPU, by the options of `latents`."""
        parts = self.latents(noise, sampler, nfe, **options)
        return torch.cat([self.decode(x).clamp(-1, 1).float().cpu() for x in parts])


def device_here() -> str:
    """The GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class Model(Network):
    """A model in diffusers' format."""

    def __init__(self, path: str, device: str | None = None):
        unet, scheduler = load_model(path)
        device = device or device_here()
        unet.to(device).eval()
        schedule, kind = schedule_of(scheduler), scheduler.config.prediction_type

        def eps_of(label: Tensor | None) -> EpsFn:
            return make_eps_fn(unet, schedule, kind, {"class_labels": label})

        shape = shape_of(unet.config, unet_config(path))
        super().__init__(schedule, shape, eps_of, device, unet.config.num_class_embeds or 0)


def draw_images(
    path: str, output: Path, count: int, sampler: str, nfe: int, seed: int = 0,
    guide: Path | None = None, weight: float = 1.0, check: Callable[[tuple[int, ...]], None] = lambda shape: None,
    **solver: Any,
) -> None:  # fmt: skip
    """Writes `count` samples of the model at `path` to an npz, as an evaluator reads them.

    check   raises for images of a shape (C, H, W) that are of no use, before any is drawn
    """
    model = open_network(Path(path))
    check(model.image_shape())
    noise = torch.randn((count, *model.shape), generator=generator_of(seed, "samples"))
    x = model.draw(noise, sampler, nfe, guide=load_guide(guide, model.device) if guide else None, weight=weight,
                   **solver)  # fmt: skip
    label = model.labels(count)
    images = to_uint8(x).permute(0, 2, 3, 1).numpy()
    write_npz(str(output), images, None if label is None else label.cpu().numpy())
    cost = guided_nfe(sampler, nfe) if guide else nfe
    print(f"wrote {output}: {count} images, {sampler}, NFE {cost}", flush=True)


def backbone_of(path: Path) -> Backbone | None:
    """The backbone whose weights the file holds; None for a model in diffusers' format or an npz of samples."""
    if path.suffix == ".npz" or unet_config(path).is_file():
        return None
    if not (found := backbones.reader_of(path)):
        kinds = ", ".join(f"{b.name}'s {b.suffix}" for b in map(backbones.get, backbones.NAMES) if b.suffix)
        raise ValueError(f"{path} is no model: give a folder in diffusers' format, or a file of weights: {kinds}")
    return found


def open_network(
    path: Path, device: str | None = None, native: Sequence[str] = (), third_party: Path = ROOT / "third_party"
) -> Network:
    """A model in diffusers' format, or a file of weights of a backbone's; `native` is for `Backbone.network`."""
    backbone = backbone_of(path)
    if backbone is None:
        return Model(str(path), device)
    if problem := backbone.not_ready(third_party):
        raise ValueError(problem)
    if native and not backbone.takes_flags:
        raise ValueError(f"--native: {backbone.name}'s checkpoints hold their network's flags; leave it out")
    return backbone.network(path, third_party, native, device or device_here())
