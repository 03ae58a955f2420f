"""What can be evaluated: an npz of images, a folder of images, saved statistics.

Images come in batches, uint8 [N, H, W, 3]; no source is ever held in memory as a whole.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
KINDS = "an .npz (arr_0: uint8 images [N, H, W, C]; or mu and sigma) or a folder of images"


@dataclass(frozen=True)
class Statistics:
    """Mean [D] and covariance [D, D] of features, and of spatial ones (ADM's mu_s, sigma_s)."""

    mu: np.ndarray
    sigma: np.ndarray
    mu_s: np.ndarray | None = None
    sigma_s: np.ndarray | None = None
    features: str = ""  # the net that made them, where the file says so
    images: int | None = None


class Source:
    """Images at `path`; `count` is 0 for a file with nothing but statistics.

    size         (height, width), None without images
    statistics   those saved beside the images, or None
    """

    count: int = 0
    channels: int = 3  # as stored; batches always have 3
    size: tuple[int, int] | None = None
    statistics: Statistics | None = None

    def __init__(self, path: Path):
        self.path = path

    def batches(self, size: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """Images start..stop as uint8 [up to size, H, W, 3], in order."""
        raise NotImplementedError

    def digest(self) -> str:
        """A hash of the content."""
        raise NotImplementedError


def open_source(path: str | Path) -> Source:
    """The source at `path`, looked at but not read; raises ValueError for what cannot be used."""
    path = Path(path)
    if path.is_dir():
        return Folder(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist; give {KINDS}")
    if path.suffix != ".npz":
        raise ValueError(f"{path}: cannot be read; give {KINDS}")
    return Npz(path)


class Npz(Source):
    """arr_0 as samplers write it; mu and sigma as evaluators save them; or both."""

    def __init__(self, path: Path):
        super().__init__(path)
        try:
            with zipfile.ZipFile(path) as archive:
                names = {Path(name).stem for name in archive.namelist()}
        except (zipfile.BadZipFile, OSError) as error:
            raise ValueError(f"{path} is not a readable npz ({error}); write it again") from error
        if {"mu", "sigma"} <= names:
            self.statistics = self._statistics(names)
        if "arr_0" in names:
            with _Member(path) as (_, shape):
                self.count, self.size, self.channels = shape[0], shape[1:3], shape[3]
        elif self.statistics is None:
            found = ", ".join(sorted(names)) or "nothing"
            raise ValueError(f"{path} holds {found}; expected {KINDS}")

    def _statistics(self, names: set[str]) -> Statistics:
        wanted = [name for name in ("mu", "sigma", "mu_s", "sigma_s") if name in names]
        with np.load(self.path, allow_pickle=False) as archive:
            arrays = {name: archive[name].astype(np.float64) for name in wanted}
            label = str(archive["features"]) if "features" in names else ""
            images = int(archive["images"]) if "images" in names else None
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise ValueError(f"{self.path}: {name} holds NaN or infinity; compute it again")
        return Statistics(**arrays, features=label, images=images)

    def batches(self, size: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        with _Member(self.path) as (file, shape):
            height, width, channels = shape[1:]
            bytes_each = height * width * channels
            file.seek(start * bytes_each, 1)
            stop = self.count if stop is None else min(stop, self.count)
            for begin in range(start, stop, size):
                wanted = (min(begin + size, stop) - begin) * bytes_each
                data = file.read(wanted)
                if len(data) != wanted:
                    raise ValueError(f"{self.path} ends too early; write it again")
                images = np.frombuffer(data, np.uint8).reshape(-1, height, width, channels)
                yield images if channels == 3 else images.repeat(3, axis=3)

    def digest(self) -> str:
        return file_digest(self.path)


class _Member:
    """arr_0 of an npz as a stream: (file at the first image, shape [N, H, W, C])."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self):
        self.archive = zipfile.ZipFile(self.path)
        try:
            self.file = self.archive.open("arr_0.npy")
            version = np.lib.format.read_magic(self.file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }.get(version)
            if read is None:
                raise ValueError(f"arr_0 has npy format {version}; save it with numpy.savez")
            shape, fortran, dtype = read(self.file)
            if dtype != np.uint8:
                raise ValueError(
                    f"arr_0 is {dtype}, but images must be uint8 in 0..255; for values in [-1, 1]: "
                    "((x + 1) * 127.5).clip(0, 255).astype('uint8')"
                )
            if len(shape) == 3:
                shape = (*shape, 1)
            if len(shape) != 4 or shape[3] not in (1, 3) or 0 in shape:
                raise ValueError(
                    f"arr_0 has shape {shape}; images must be [N, H, W, C] with C 1 or 3"
                )
            if fortran:
                raise ValueError(
                    "arr_0 is in Fortran order; save numpy.ascontiguousarray of it instead"
                )
        except ValueError as error:
            self.archive.close()
            raise ValueError(f"{self.path}: {error}") from error
        return self.file, tuple(shape)

    def __exit__(self, *_):
        self.file.close()
        self.archive.close()


def file_digest(path: Path) -> str:
    """SHA-256 of a file; Python 3.10 has no hashlib.file_digest."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


class Folder(Source):
    """Image files in a folder and those below it, in the order of their names."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
        if not self.files:
            raise ValueError(f"{path} has no image files in it ({', '.join(SUFFIXES)})")
        self.count = len(self.files)
        self.size = self._decode(self.files[0]).shape[:2]

    def _decode(self, file: Path) -> np.ndarray:
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(file) as image:
                if image.mode not in ("1", "L", "P", "RGB", "RGBA"):
                    raise ValueError(f"{file} has mode {image.mode}; save it as 8-bit RGB or grey")
                pixels = np.asarray(image.convert("RGB"))
        except (UnidentifiedImageError, OSError) as error:
            raise ValueError(f"{file} cannot be read as an image ({error}); remove it") from error
        if self.size is not None and pixels.shape[:2] != self.size:
            first = f"{self.size[1]}x{self.size[0]}"
            raise ValueError(
                f"{file} is {pixels.shape[1]}x{pixels.shape[0]}, but {self.files[0].name} is "
                f"{first}: all images of a folder must have one size"
            )
        return pixels

    def batches(self, size: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        stop = self.count if stop is None else min(stop, self.count)
        with ThreadPoolExecutor(4) as pool:
            for begin in range(start, stop, size):
                files = self.files[begin : min(begin + size, stop)]
                yield np.stack(list(pool.map(self._decode, files)))

    def digest(self) -> str:
        total = hashlib.sha256()
        for file in self.files:
            content = hashlib.sha256(file.read_bytes()).digest()
            total.update(str(file.relative_to(self.path)).encode() + b"\0" + content)
        return total.hexdigest()
