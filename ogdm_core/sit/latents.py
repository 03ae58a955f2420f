"""Latents on disk, once: what --latents writes and reads."""

import hashlib
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..distributed import print_once, rank
from ..files import read_json, write_json

BATCH = 16


class Latents(Dataset):
    """The autoencoder's moments [8, h, w] of each image or of its mirror image, at random, and its class.

    folder   latents.npy, float32 [N, 2, 8, h, w], and latents.json, which says of which images and autoencoder
    """

    def __init__(self, folder: str, labels: list[int]):
        self.moments, self.labels = np.load(f"{folder}/latents.npy", mmap_mode="r"), labels

    def __len__(self) -> int:
        return len(self.moments)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        mirrored = int(torch.rand(1) < 0.5)
        return torch.from_numpy(self.moments[index, mirrored].copy()), self.labels[index]


class FromMoments:
    """An autoencoder whose `encode` is given the moments of images in place of images."""

    def __init__(self, vae: Any):
        self.decode = vae.decode

    def encode(self, moments: Tensor) -> Any:
        """As the autoencoder's own: an object with `latent_dist`."""
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        return SimpleNamespace(latent_dist=DiagonalGaussianDistribution(moments))


def cached(folder: str, dataset: Any, vae: Any, image_size: int) -> Latents:
    """The latents of upstream's dataset, made on rank 0 if they are not there.

    Ends the program where they are of another autoencoder, or of other images.
    """
    here = {"vae": _fingerprint(vae), "images": _names(dataset), "image_size": image_size}
    about = Path(folder, "latents.json")
    if rank() == 0 and not about.is_file():
        _make(Path(folder), dataset, vae)
        write_json(about, here)
    while not about.is_file():  # hours for a large set, which a collective does not wait
        time.sleep(1)
    there = read_json(about)
    for name, what in {"vae": "another autoencoder", "images": "other images", "image_size": "another size"}.items():
        if there.get(name) != here[name]:
            raise SystemExit(
                f"error: --latents: {folder} holds latents of {what}; give an empty folder to make them anew"
            )
    return Latents(folder, [label for _, label in dataset.samples])


@torch.no_grad()
def _make(folder: Path, dataset: Any, vae: Any) -> None:
    """Writes latents.npy; upstream's transforms are a crop, the mirroring at random, and two more."""
    crop, _, *others = dataset.transform.transforms
    device = next(vae.parameters()).device
    folder.mkdir(parents=True, exist_ok=True)
    print_once(f"Encoding {len(dataset)} images and their mirror images into {folder}")
    part, kept, made = folder / f".latents.{os.getpid()}.npy", dataset.transform, None
    try:
        dataset.transform = lambda image: others[1](others[0](crop(image)))
        for start in range(0, len(dataset), BATCH):
            x = torch.stack([dataset[i][0] for i in range(start, min(start + BATCH, len(dataset)))]).to(device)
            both = [vae.encode(v).latent_dist.parameters.float().cpu() for v in (x, x.flip(3))]
            moments = torch.stack(both, 1).numpy()
            if made is None:
                made = np.lib.format.open_memmap(part, "w+", np.float32, (len(dataset), *moments.shape[1:]))
            made[start : start + len(moments)] = moments
        if made is None:
            raise SystemExit("error: --data-path: there are no images in it")
        made.flush()
        os.replace(part, folder / "latents.npy")
    finally:
        dataset.transform = kept
        part.unlink(missing_ok=True)


def _fingerprint(vae: Any) -> str:
    """A hash of the encoder's weights."""
    found = hashlib.sha256()
    for name, value in vae.state_dict().items():
        if not name.startswith(("decoder", "post_quant")):
            found.update(name.encode() + value.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()


def _names(dataset: Any) -> str:
    """A hash of the images' names below their folder, and of their classes."""
    parts = [f"{Path(path).parent.name}/{Path(path).name} {label}\n" for path, label in dataset.samples]
    return hashlib.sha256("".join(parts).encode()).hexdigest()
