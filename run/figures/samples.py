"""Where pictures get their samples: a method is a name and a function from noise to images.

    draw(noise [N, C, H, W], nfe, sampler) -> uint8 images [N, C, H, W]

A folder in diffusers' format is sampled here. Other backbones are sampled with their own commands
from the same seeds, one file (or folder of images) per sampler and NFE; the path then names them
with the fields {sampler} and {nfe}:

    Baseline=samples/base-{sampler}-{nfe}.npz
"""

from __future__ import annotations

import argparse
import string
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ogdm_core.trainer.images import Images, load, to_uint8
from run.evaluate.features import load_features


@dataclass(frozen=True)
class Method:
    """A trained model to draw from; `shape` is (C, H, W) where the noise's shape matters."""

    name: str
    draw: Callable[[Tensor, int, str], Tensor]
    shape: tuple[int, int, int] | None = None


def load_images(source: str, count: int | None = None) -> Tensor:
    """The first `count` images of a data set, an .npz or a folder, or all: uint8 [N, C, H, W]."""
    images = load(source)
    if count is not None and len(images) < count:
        raise ValueError(f"{source} holds {len(images)} images, but {count} are wanted")
    return images.pixels(torch.arange(len(images) if count is None else count))


def load_method(argument: str, device: str = "cpu") -> Method:
    """NAME=PATH, PATH being a diffusers folder or a pattern with {sampler} and {nfe}."""
    name, _, path = argument.partition("=")
    if not (name and path):
        raise ValueError(f"--method {argument!r}: give NAME=PATH, such as OGDM=out/ogdm")
    fields = {field for _, field, _, _ in string.Formatter().parse(path) if field is not None}
    if fields == {"sampler", "nfe"}:
        return _files(name, path)
    if fields:
        raise ValueError(
            f"--method {argument}: a pattern has the fields {{sampler}} and {{nfe}}, this one has "
            + ", ".join(f"{{{field}}}" for field in sorted(fields))
        )
    return _diffusers(name, path, device)


def _diffusers(name: str, path: str, device: str) -> Method:
    """A `save_pretrained` folder with unet/ (a UNet2DModel) and scheduler/."""
    from run.draw import Model

    model = Model(path, device)

    def sample(noise: Tensor, nfe: int, sampler: str) -> Tensor:
        return to_uint8(model.draw(noise, sampler, nfe))

    return Method(name, sample, model.shape)


def _files(name: str, pattern: str) -> Method:
    """Samples made elsewhere. The i-th image of every file must come from the same noise."""

    def read(noise: Tensor, nfe: int, sampler: str) -> Tensor:
        path = pattern.format(sampler=sampler, nfe=nfe)
        if not Path(path).exists():
            raise FileNotFoundError(
                f"{path} is missing: {name}'s samples by {sampler} with {nfe} evaluations. Make it "
                "with the backbone's own sampling command, from the same seeds as the others."
            )
        return load_images(path, len(noise))

    return Method(name, read)


def shared_noise(methods: Sequence[Method], count: int, seed: int) -> Tensor:
    """The same initial noise [count, C, H, W] for every method that is sampled here."""
    shapes = {method.shape for method in methods if method.shape is not None}
    if len(shapes) > 1:
        raise ValueError(
            f"the models make images of different shapes ({', '.join(map(str, sorted(shapes)))}): "
            "the same noise cannot start them all"
        )
    shape = shapes.pop() if shapes else (0,)
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def feature_net(args: argparse.Namespace) -> Callable[[Tensor | Images], Tensor]:
    """The net that --features or --weights names, for a tensor of images or an `Images`.

    It reads and evaluates 64 images at a time: data sets that do not fit memory are welcome.
    """
    spec = args.features or (None if args.weights else "pixels")
    net = load_features(spec, args.weights, args.device)
    print(*net.notes, sep="\n", end="\n" * bool(net.notes), file=sys.stderr)

    def features(images: Tensor | Images) -> Tensor:
        pixels = images.__getitem__ if isinstance(images, Tensor) else images.pixels
        return torch.cat([net(pixels(index)) for index in torch.arange(len(images)).split(64)])

    return features
