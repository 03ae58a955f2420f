"""Feature nets: what turns images into the vectors that FID and recall compare.

A net is any callable

    net(images: uint8 [N, 3, H, W]) -> features [N, D]
                                    or (features [N, D], spatial features [N, D_s]) for sFID

named by its import path, `--features MODULE:NAME`. A class is called first, without arguments, or
with `cache=FOLDER` if it takes that: a place to keep what it makes. An nn.Module is set to eval
mode and moved to the device; a plain function must cope with images on the device by itself.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .classifier import Classifier
from .sources import file_digest

Features = Tensor | tuple[Tensor, Tensor]
INCEPTION = "inception"
# What torch.load and load_state_dict raise for a file of another kind.
_UNREADABLE = (RuntimeError, pickle.UnpicklingError, AttributeError, KeyError, TypeError, EOFError)
# How the SHA-256 of the published weights begins, as their name says.
PUBLISHED = "6726825d"
URL = (
    "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/"
    "weights-inception-2015-12-05-6726825d.pth"
)


@dataclass(frozen=True)
class Net:
    """A feature net.

    name   to show for it
    key    changes when its outputs may
    notes  what a reader of its numbers should know
    """

    name: str
    key: str
    call: Callable[[Tensor], Features]
    notes: tuple[str, ...] = ()


def check(weights: Path | None, features: str | None) -> None:
    """Raises ValueError, with what to do, if `load` could not work; reads nothing large."""
    if features:
        if weights:
            raise ValueError("--weights is for Inception; leave it out beside --features")
        if features.count(":") != 1:
            raise ValueError(f"--features {features!r}: give MODULE:NAME, such as my.nets:dino")
        return
    if weights is None:
        raise ValueError(
            f"no feature net: download Inception's weights from\n  {URL}\nand give "
            "--weights FILE; or give a net of your own, --features MODULE:NAME"
        )
    if not weights.is_file():
        raise ValueError(f"--weights {weights}: no such file; the weights are at\n  {URL}")
    if importlib.util.find_spec("torch_fidelity") is None:
        raise ValueError(
            "Inception comes with torch-fidelity: pip install --no-deps torch-fidelity"
        )


def load(weights: Path | None, features: str | None, device: str, cache: Path | None) -> Net:
    """The net that `check` has approved of."""
    check(weights, features)
    if features:
        return imported(features, device, cache)
    digest, notes = file_digest(weights), ()
    if not digest.startswith(PUBLISHED):
        notes = (
            f"{weights.name} is not the published file: its SHA-256 begins with {digest[:8]}, not "
            f"{PUBLISHED}; do not set these numbers beside published ones",
        )
    return Net(INCEPTION, f"{INCEPTION}:{digest}", Inception(weights).to(device), notes)


def imported(spec: str, device: str, cache: Path | None) -> Net:
    """The net at MODULE:NAME."""
    name, _, attribute = spec.partition(":")
    try:
        module = importlib.import_module(name)
        net = getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--features {spec!r} cannot be imported: {error}") from error
    if inspect.isclass(net):
        takes_cache = "cache" in inspect.signature(net).parameters
        net = net(cache=cache) if takes_cache else net()
    if not callable(net):
        raise ValueError(f"--features {spec!r} is a {type(net).__name__}, and cannot be called")
    key = hashlib.sha256(spec.encode())
    if source := getattr(module, "__file__", None):
        key.update(Path(source).read_bytes())
    if isinstance(net, nn.Module):
        net = net.eval().requires_grad_(False).to(device)
        for entry, tensor in sorted(net.state_dict().items()):
            key.update(entry.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        if isinstance(net, Classifier):
            net = _Digits(net)
    return Net(spec, f"{spec}:{key.hexdigest()}", net)


class _Digits:
    """The embedded trainer's classifier as a feature net: it takes [-1, 1], perhaps grey."""

    def __init__(self, net: Classifier):
        self.net = net
        self.channels = next(net.parameters()).shape[1]

    def __call__(self, images: Tensor) -> Tensor:
        images = images.float() / 127.5 - 1
        return self.net.features(images.mean(1, keepdim=True) if self.channels == 1 else images)


class Inception(nn.Module):
    """torch-fidelity's port of the 2015 Inception that published FIDs are measured with.

    features  pool_3                     [N, 2048]
    spatial   the first 7 channels of mixed_6/conv, as in ADM's evaluator, [N, 17 * 17 * 7]

    The port's blocks Mixed_5b, c, d, 6a, b, c, d, ... are the graph's mixed, mixed_1, mixed_2,
    mixed_3, ..., so mixed_6/conv is the 1x1 branch of Mixed_6d.
    """

    def __init__(self, weights: Path):
        super().__init__()
        try:
            # Tensors only: the port itself would unpickle whatever the file holds.
            torch.load(weights, map_location="cpu", weights_only=True)
            self.net = _port()("inception-v3-compat", ["2048"], str(weights))
        except _UNREADABLE as error:
            raise ValueError(
                f"--weights {weights} are not torch-fidelity's Inception weights "
                f"({type(error).__name__}); those are at\n  {URL}"
            ) from error
        self._spatial: Tensor | None = None
        self.net.Mixed_6d.branch1x1.register_forward_hook(self._keep)

    def _keep(self, _module, _inputs, output: Tensor) -> None:
        self._spatial = output[:, :7].permute(0, 2, 3, 1).flatten(1)

    @torch.no_grad()
    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        (pooled,) = self.net(images)
        return pooled, self._spatial


def _port() -> type[nn.Module]:
    """torch-fidelity's Inception class without the package's `__init__`, which wants torchvision.

    A torchvision that fits the torch beside it is not always to be had, and Inception needs none.
    """
    name = "torch_fidelity"
    if name in sys.modules:
        return importlib.import_module(name).FeatureExtractorInceptionV3
    bare = types.ModuleType(name)
    bare.__path__ = list(importlib.util.find_spec(name).submodule_search_locations)
    sys.modules[name] = bare
    try:
        module = importlib.import_module(f"{name}.feature_extractor_inceptionv3")
    finally:
        for entry in [n for n in sys.modules if n.split(".")[0] == name]:
            del sys.modules[entry]
    return module.FeatureExtractorInceptionV3
