"""What can be evaluated: images (an npz, a folder, a built-in set), saved statistics, or both."""

import hashlib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ogdm_core.files import atomic_write, sha256
from ogdm_core.images import UNREADABLE, Folder, Images, load, read_npz

KINDS = "an .npz (arr_0: uint8 images [N, H, W, C]; or mu and sigma), a folder of images, digits or mnist"


@dataclass(frozen=True)
class Statistics:
    """Mean [D] and covariance [D, D] of features."""

    mu: np.ndarray
    sigma: np.ndarray
    features: str = ""  # the net that made them, where the file says so
    images: int | None = None

    def save(self, file: Path) -> None:
        """Writes an npz that `open_source` reads."""
        with atomic_write(file) as out:
            np.savez(out, **{k: v for k, v in vars(self).items() if v is not None})


@dataclass(frozen=True)
class Source:
    """Images at `path`, statistics saved there, or both."""

    path: Path
    images: Images | None = None
    statistics: Statistics | None = None

    @property
    def count(self) -> int:
        """Number of images, 0 for a file with nothing but statistics."""
        return 0 if self.images is None else len(self.images)

    def digest(self) -> str:
        """A hash of the content."""
        if self.path.is_file():
            return sha256(self.path)
        total = hashlib.sha256()
        for file in getattr(self.images, "files", []):
            total.update(f"{file.relative_to(self.path)}\0{sha256(file)}\0".encode())
        return total.hexdigest() if self.path.is_dir() else f"{self.path}:{self.count}"


def open_source(path: str | Path) -> Source:
    """The source at `path`, without its images read; raises ValueError for what is of no use."""
    path = Path(path)
    if str(path) in ("digits", "mnist") and not path.exists():
        return Source(path, load(str(path)))
    if path.is_dir():
        return Source(path, Folder(path, exact=True))
    if not path.exists():
        raise ValueError(f"{path} does not exist; give {KINDS}")
    if path.suffix != ".npz":
        raise ValueError(f"{path}: cannot be read; give {KINDS}")
    try:
        with zipfile.ZipFile(path) as archive:  # images are mapped, which checks no sums
            if bad := archive.testzip():
                raise zipfile.BadZipFile(f"{bad} does not match its checksum")
        with np.load(path, allow_pickle=False) as archive:
            names = set(archive.files)
            saved = _statistics(archive) if {"mu", "sigma"} <= names else None
    except UNREADABLE as error:
        raise ValueError(f"{path} is not a readable npz ({error}); write it again") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}; compute the statistics again") from error
    if "arr_0" not in names and saved is None:
        raise ValueError(f"{path} holds {', '.join(sorted(names)) or 'nothing'}; expected {KINDS}")
    return Source(path, read_npz(path) if "arr_0" in names else None, saved)


def planned(model: Path, count: int, shape: Sequence[int]) -> Source:
    """What `count` samples of a model will be, images of `shape` (C, H, W), before they are drawn."""
    return Source(model, Images(np.broadcast_to(np.uint8(0), (count, *shape))))


def _statistics(archive: np.lib.npyio.NpzFile) -> Statistics:
    mu, sigma = (archive[name].astype(np.float64) for name in ("mu", "sigma"))
    for name, array in (("mu", mu), ("sigma", sigma)):
        if not np.isfinite(array).all():
            raise ValueError(f"{name} holds NaN or infinity")
    if mu.ndim != 1 or sigma.shape != 2 * mu.shape:
        raise ValueError(f"mu {mu.shape} and sigma {sigma.shape} must be [D] and [D, D]")
    images = int(archive["images"]) if "images" in archive else None
    return Statistics(mu, sigma, str(archive.get("features", "")), images)
