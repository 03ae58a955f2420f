"""The power spectrum of images in four bands, relative to real images: too little is blur, too much is noise."""

from itertools import pairwise

import torch
from torch import Tensor

from ogdm_core.images import Images

EDGES = (0.05, 0.13, 0.25, 0.4, 0.8)  # of the bands, from coarse to fine, in cycles per pixel
MOST = 10_000  # images of a set that are looked at


def bands(images: Images, batch: int = 500) -> Tensor:
    """Power [4] per image in each band, the mean over at most MOST images, spread evenly, and their channels."""
    index = torch.linspace(0, len(images) - 1, min(len(images), MOST)).round().long()
    total = torch.stack([_power(images.pixels(part)) for part in index.split(batch)]).sum(0) / len(index)
    radius = torch.hypot(*torch.meshgrid(*map(torch.fft.fftfreq, total.shape), indexing="ij"))
    return torch.stack([total[(low <= radius) & (radius < high)].sum() for low, high in pairwise(EDGES)])


def _power(pixels: Tensor) -> Tensor:
    """|FFT|^2 [H, W] of uint8 images [N, C, H, W], the sum over N of the mean over C."""
    return torch.fft.fft2(pixels.double() / 127.5 - 1).abs().square().mean(1).sum(0)
