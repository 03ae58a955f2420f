"""Lets willisma/SiT (2024, one or more GPUs) run on today's stack and on a CPU. One reason per shim, at the shim."""

import argparse
import functools
import importlib.util
import inspect
import os
import sys
import types
from typing import Any

import numpy as np
import torch

from .. import checkpoints, trust, vision
from ..cpu import device, run_ddp_without_device_ids, start_gloo_for_nccl
from ..distributed import print_once

__all__ = ["autoencoder", "cuda_or_not", "device", "find_model", "install", "tiny"]  # the patches'

SCALE = 0.18215  # upstream's, of latents
tell = functools.cache(print_once)  # the same of a network and of its average once


@functools.cache
def install() -> None:
    """Puts every shim in place. Call it before upstream's first import; twice does no harm."""
    from diffusers.models import AutoencoderKL  # noqa: F401  before the stand-ins: it looks for torchvision and timm

    _torchvision()
    _timm()
    _wandb()
    # Upstream stores its parsed flags, a plain namespace, in its checkpoints.
    torch.serialization.add_safe_globals([argparse.Namespace])
    for name in ("ENTITY", "PROJECT"):  # of wandb; upstream reads them also without --wandb
        os.environ.setdefault(name, "")
    if not torch.cuda.is_available():
        start_gloo_for_nccl()
        run_ddp_without_device_ids()


def cuda_or_not(real: Any) -> Any:
    """torch, for upstream's scripts, which assert that there is CUDA; on a CPU their own name for it says yes."""
    if torch.cuda.is_available():
        return real
    stand_in = types.ModuleType("torch")
    stand_in.__dict__.update(vars(real))
    stand_in.cuda = types.SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, set_device=lambda device: None, synchronize=lambda: None
    )
    return stand_in


def find_model(upstream: Any) -> Any:
    """Upstream's function from a checkpoint's name to its weights, which reads local files without running code."""

    def found(name: str) -> Any:
        return weights(checkpoint(name) if os.path.isfile(name) else upstream(name))

    return found


class Weights(dict[str, torch.Tensor]):
    """A state dict, and the flags that it was trained with, as far as its file says."""

    flags: dict[str, Any]


def weights(read: dict[str, Any]) -> Weights:
    """The EMA's weights of a checkpoint of upstream's trainer, or the weights that a released file is."""
    found = Weights(read.get("ema", read))
    found.flags = dict(vars(read["args"])) if isinstance(read.get("args"), argparse.Namespace) else {}
    return found


def heads(state: Weights) -> int | None:
    """The attention heads that a file says, or those of upstream's models of its width; None for another width."""
    return state.flags.get("num_heads", HEADS.get(state["pos_embed"].shape[-1]))


def load(network: Any, state: Weights, where: str, advice: str) -> None:
    """Loads weights; ends the program for those of another network. Prints a line where the heads are not known."""
    try:
        network.load_state_dict(state)
        here, usual = network.num_heads, heads(state)
        there = state.flags.get("num_heads", here)
        why = f"num_heads: {there} there, {here} here" if there != here else ""
        if "num_heads" not in state.flags:
            tell(f"OGDM: {where} does not say how many attention heads it has; {here} are taken"
                 + (f" (upstream's models of this width have {usual})" if usual else ""))  # fmt: skip
    except (RuntimeError, AttributeError, TypeError) as error:
        why = str(error).strip().splitlines()[-1].strip()
    if why:
        raise SystemExit(f"error: {where} is of another network ({why}); give {advice}")


def checkpoint(path: str) -> dict[str, Any]:
    """A file of upstream's trainer, tensors and flags only; ends the program for any other."""
    try:
        with checkpoints.reading(path):
            read = trust.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError, trust.RefusedError) as error:
        raise SystemExit(f"error: {error}") from error
    if not isinstance(read, dict) or not isinstance(read.get("ema", read), dict):
        raise SystemExit(f"error: {path} holds a {type(read).__name__}, no weights of SiT")
    return read


class autoencoder:  # noqa: N801  stands in for a class that upstream calls by its name
    """diffusers' AutoencoderKL, of a hub's name or a local folder where --vae is not upstream's ema or mse."""

    @staticmethod
    def from_pretrained(name: str) -> Any:
        from diffusers.models import AutoencoderKL

        own = name.removeprefix("stabilityai/sd-vae-ft-")
        if own == "identity":
            return Pixels()
        name = name if own in ("ema", "mse") else own
        try:
            vae = AutoencoderKL.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise SystemExit(f"error: --vae: {name} is no autoencoder that can be had ({error})") from error
        if vae.config.latent_channels != 4 or 2 ** (len(vae.config.block_out_channels) - 1) != 8:
            raise SystemExit(f"error: --vae: {name} does not make latents of 4 channels at an eighth of the size")
        return vae.requires_grad_(False)  # gloo gathers upstream's samples only without gradients


class Pixels(torch.nn.Module):
    """--vae=identity, none at all: a latent is the mean colours of 8x8 pixels, and their grey; decoded to those."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1 / SCALE), requires_grad=False)

    def encode(self, x: torch.Tensor) -> Any:
        """Images [N, 3, 8h, 8w] -> an object with `latent_dist`, of [N, 4, h, w] without spread."""
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        x = torch.nn.functional.avg_pool2d(x, 8)
        z = torch.cat([x, x.mean(1, keepdim=True)], 1) * self.scale
        return types.SimpleNamespace(
            latent_dist=DiagonalGaussianDistribution(torch.cat([z, z.new_full(z.shape, -30)], 1))
        )

    def decode(self, z: torch.Tensor) -> Any:
        """An object with `sample`, images [N, 3, h, w]."""
        return types.SimpleNamespace(sample=z[:, :3] / self.scale)


SIZES = ("depth", "hidden_size", "num_heads")  # in place of a model's
HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16}  # of upstream's models, by their hidden size


def tiny(parser: argparse.ArgumentParser) -> None:
    """Flags for networks and images of other sizes than upstream's, and for an autoencoder of one's own."""
    for action in parser._actions:
        if action.dest in ("image_size", "vae"):
            action.choices = None
    group = parser.add_argument_group("networks of other sizes")
    for name in SIZES:
        group.add_argument(f"--{name.replace('_', '-')}", type=int, help="in place of the --model's")
    parse = parser.parse_known_args

    def parse_and_size(*args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
        namespace, rest = parse(*args, **kwargs)
        if namespace.image_size < 8 or namespace.image_size % 8:
            parser.error(f"--image-size: {namespace.image_size} is not allowed; give a multiple of 8")
        own = {name: vars(namespace).pop(name) for name in SIZES}
        given = {name: value for name, value in own.items() if value is not None}
        if "num_heads" in given:
            namespace.num_heads = given["num_heads"]  # upstream keeps its flags in a checkpoint
        resize(given)
        return namespace, rest

    parser.parse_known_args = parse_and_size


def resize(sizes: dict[str, int]) -> None:
    """Makes upstream build its models with these sizes in place of their own."""
    import models

    own = inspect.unwrap(models.SiT)
    models.SiT = functools.wraps(own, updated=())(lambda **usual: own(**usual | sizes)) if sizes else own


# ---- packages that may be absent ------------------------------------------------------------------


def _torchvision() -> None:
    """A torchvision beside a CPU torch often fails to import. Upstream needs a folder of images and five transforms."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        parts: dict[str, dict[str, Any]] = {
            "datasets": {"ImageFolder": ImageFolder},
            "datasets.utils": {"download_url": lambda url, root, filename: torch.hub.download_url_to_file(
                url, os.path.join(root, filename))},
            "transforms": {"RandomHorizontalFlip": vision.RandomHorizontalFlip, "Compose": Compose,
                           "Lambda": lambda function: function, "ToTensor": lambda: to_tensor, "Normalize": Normalize},
            "utils": {"make_grid": vision.make_grid},
            "ops": {}, "ops.misc": {"FrozenBatchNorm2d": torch.nn.Identity},
        }  # fmt: skip
        vision.provide_torchvision(**parts)


def _timm() -> None:
    """Upstream takes three layers from timm; timm's models need all of torchvision, its layers do not."""
    try:
        import timm.models.vision_transformer  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [n for n in sys.modules if n.split(".")[0] == "timm"]:
            del sys.modules[name]
        found = importlib.util.find_spec("timm")
        if found is None:
            raise
        package = types.ModuleType("timm")
        package.__spec__ = found
        package.__path__ = list(found.submodule_search_locations or [])
        sys.modules["timm"] = package
        from timm.layers import Attention, Mlp, PatchEmbed

        models, transformer = types.ModuleType("timm.models"), types.ModuleType("timm.models.vision_transformer")
        transformer.__dict__.update(Attention=Attention, Mlp=Mlp, PatchEmbed=PatchEmbed)
        sys.modules |= {"timm.models": models, "timm.models.vision_transformer": transformer}


def _wandb() -> None:
    """Upstream imports wandb also without --wandb."""
    if importlib.util.find_spec("wandb") is None:
        sys.modules.setdefault("wandb", vision.Partial("wandb", "install it, or leave --wandb out"))


class Compose:
    """Transforms, one after the other."""

    def __init__(self, transforms: list[Any]):
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class Normalize:
    """(x - mean) / std per channel."""

    def __init__(self, mean: list[float], std: list[float], inplace: bool = False):
        self.mean, self.std = (torch.tensor(v).reshape(-1, 1, 1) for v in (mean, std))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.std


def to_tensor(image: Any) -> torch.Tensor:
    """A PIL image as float [C, H, W] in [0, 1]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)


class ImageFolder(torch.utils.data.Dataset):
    """Images of FOLDER/CLASS/... as RGB, and the numbers of their classes, both in the order of their names."""

    KINDS = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".pgm"}

    def __init__(self, root: str, transform: Any = None):
        self.classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        if not self.classes:
            raise FileNotFoundError(f"{root} has no folder per class, FOLDER/CLASS/image.png")
        self.samples, self.transform = [], transform
        for number, name in enumerate(self.classes):
            for folder, _, files in sorted(os.walk(os.path.join(root, name), followlinks=True)):
                kept = sorted(file for file in files if os.path.splitext(file)[1].lower() in self.KINDS)
                self.samples += [(os.path.join(folder, file), number) for file in kept]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        path, label = self.samples[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        return self.transform(image) if self.transform else image, label
