"""Where pictures get their samples: a method is a name and a function from noise to images."""

import argparse
import glob
import os
import string
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ogdm_core.images import Images, load, to_uint8
from run.evaluate.features import load_features
from run.sampling import Model


@dataclass(frozen=True)
class Method:
    """A trained model: draw(noise [N, C, H, W], nfe, sampler) gives uint8 images [N, C, H, W]."""

    name: str
    draw: Callable[[Tensor, int, str], Tensor]
    shape: tuple[int, int, int] | None = None  # (C, H, W), where the noise's shape matters


def load_images(source: str, count: int | None = None) -> Tensor:
    """The first `count` images of a data set, an .npz or a folder, or all: uint8 [N, C, H, W]."""
    images = load(source)
    if count is not None and len(images) < count:
        raise ValueError(f"{source} holds {len(images)} images, but {count} are wanted")
    return images.pixels(torch.arange(len(images) if count is None else count))


def load_method(argument: str, device: str = "cpu") -> Method:
    """NAME=PATH: a diffusers folder, or files PATH with {sampler} and {nfe}.

    The i-th images of all such files come from the same noise. A pattern may hold *: the newest file counts.
    """
    name, _, path = argument.partition("=")
    if not (name and path):
        raise ValueError(f"--method {argument!r}: give NAME=PATH, such as OGDM=out/ogdm")
    fields = {field for _, field, _, _ in string.Formatter().parse(path) if field is not None}
    if not fields:
        model = Model(path, device)
        return Method(name, lambda noise, nfe, s: to_uint8(model.draw(noise, s, nfe)), model.shape)
    if fields != {"sampler", "nfe"}:
        raise ValueError(
            f"--method {argument}: a pattern has the fields {{sampler}} and {{nfe}}, this one has "
            + ", ".join(f"{{{field}}}" for field in sorted(fields))
        )

    def read(noise: Tensor, nfe: int, sampler: str) -> Tensor:
        file = path.format(sampler=sampler, nfe=nfe)
        file = max(glob.glob(file), key=os.path.getmtime, default=file)
        if not Path(file).exists():
            raise FileNotFoundError(
                f"{file} is missing: {name}'s samples by {sampler} with {nfe} evaluations. Make it "
                "with the backbone's own sampling command, from the same seeds as the others."
            )
        return load_images(file, len(noise))

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
