"""Feature spaces that distances between images are measured in."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

Features = Callable[[Tensor], Tensor]


def load_features(spec: str) -> Features:
    """A function from images [N, C, H, W] in [-1, 1] to features [N, D].

    pixels            the image itself: always there, blind to meaning
    FILE.pt           the classifier that run/quickstart.sh leaves in its output folder
    MODULE:FUNCTION   any function of that signature on the import path, such as an Inception
    """
    if spec == "pixels":
        return lambda images: images.flatten(1)
    if spec.endswith(".pt"):
        return _classifier(Path(spec))
    module, separator, name = spec.partition(":")
    if not separator:
        raise ValueError(f"--features {spec!r}: give pixels, FILE.pt or MODULE:FUNCTION")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--features {spec!r} cannot be imported: {error}") from error


def _classifier(path: Path) -> Features:
    from run.evaluate.classifier import Classifier

    if not path.exists():
        raise FileNotFoundError(f"--features {path}: no such file; run/quickstart.sh writes one")
    state = torch.load(path, weights_only=True)["state"]
    channels, classes = state["body.0.weight"].shape[1], state["head.1.weight"].shape[0]
    net = Classifier(channels, classes)
    net.load_state_dict(state)
    return net.eval().requires_grad_(False).features
