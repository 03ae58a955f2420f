"""Images in and out of pictures: everything here is [N, C, H, W] in [-1, 1]."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ogdm_core.trainer import images as data


def load_images(source: str, count: int | None = None) -> Tensor:
    """The first `count` images of `source`, or all.

    `digits`, `mnist`, an .npz (arr_0, uint8, NHWC, as ADM's and our samplers write it) or a folder
    of image files in the order of their names (as EDM's generate.py writes it).
    """
    images = data.load(source)
    if count is not None and len(images) < count:
        raise ValueError(f"{source} holds {len(images)} images, but {count} are wanted")
    return images.batch(torch.arange(count if count is not None else len(images)))


def tile(images: Tensor, columns: int, gap: int = 1) -> np.ndarray:
    """One picture in [0, 1], [H', W'] or [H', W', 3], of the images side by side, white between."""
    n, channels, height, width = images.shape
    if channels not in (1, 3):
        raise ValueError(f"pictures need images with 1 or 3 channels, these have {channels}")
    rows = -(-n // columns)
    shape = (rows * (height + gap) - gap, columns * (width + gap) - gap, channels)
    canvas = np.ones(shape, dtype=np.float32)
    pixels = ((images.detach().float().cpu().clamp(-1, 1) + 1) / 2).permute(0, 2, 3, 1).numpy()
    for i, image in enumerate(pixels):
        top, left = (i // columns) * (height + gap), (i % columns) * (width + gap)
        canvas[top : top + height, left : left + width] = image
    return canvas[..., 0] if channels == 1 else canvas


def show(ax, images: Tensor, columns: int, gap: int = 1) -> None:
    """Draws `tile(images)` on an axes without ticks."""
    ax.imshow(tile(images, columns, gap), vmin=0, vmax=1, cmap="gray", aspect="equal")
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)
