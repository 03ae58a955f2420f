"""CIFAR-10: 50,000 training images of 32x32 as `airplane_00000.png`, ..., `truck_49999.png`.

guided-diffusion takes the label from a file's name, up to the first underscore, and numbers the
labels in alphabetical order, which is CIFAR-10's own.
"""

from __future__ import annotations

import argparse
import io
import pickle
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from . import Job, download, write_images

CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
ARCHIVE, FOLDER = "cifar-10-python.tar.gz", "cifar-10-batches-py"
BATCHES = {
    "train": tuple(f"data_batch_{i}" for i in range(1, 6)),
    "test": ("test_batch",),
}
COUNT = {"train": 50_000, "test": 10_000}


class _ArraysOnly(pickle.Unpickler):
    """Reads the archive's pickles, which hold numpy arrays, and refuses anything else in them."""

    ALLOWED = {("multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"),
               ("_codecs", "encode")}  # fmt: skip

    def find_class(self, module: str, name: str):
        if (module.rpartition(".")[2], name) not in self.ALLOWED:
            raise ValueError(f"this is not CIFAR-10: a batch asks for {module}.{name}")
        if name == "_reconstruct":
            module = _multiarray()
        return super().find_class(module, name)


def _multiarray() -> str:
    """Where numpy keeps `_reconstruct` these days; the archive names its place of 2009."""
    return np.zeros(0).__reduce__()[0].__module__


def read_batches(source: str | Path, split: str = "train") -> Iterator[dict[bytes, object]]:
    """The pickled batches, from the .tar.gz, from the folder in it, or from torchvision's root."""
    source = Path(source)
    for inner in (source / FOLDER, source / ARCHIVE):
        if source.is_dir() and inner.exists():
            return read_batches(inner, split)
    if source.is_dir():
        return (_unpickle((source / name).read_bytes()) for name in _present(source, split))
    if tarfile.is_tarfile(source):
        return _read_archive(source, split)
    raise ValueError(f"{source} is neither {ARCHIVE} nor the folder {FOLDER} from it")


def _present(folder: Path, split: str) -> tuple[str, ...]:
    missing = [name for name in BATCHES[split] if not (folder / name).exists()]
    if missing:
        raise ValueError(f"{folder} has no {', '.join(missing)}; expected the folder {FOLDER}")
    return BATCHES[split]


def _read_archive(source: Path, split: str) -> Iterator[dict[bytes, object]]:
    with tarfile.open(source) as tar:
        for name in BATCHES[split]:
            try:
                member = tar.extractfile(f"{FOLDER}/{name}")
            except KeyError as error:
                raise ValueError(f"{source} has no {FOLDER}/{name}; expected {ARCHIVE}") from error
            yield _unpickle(member.read())


def _unpickle(data: bytes) -> dict[bytes, object]:
    return _ArraysOnly(io.BytesIO(data), encoding="bytes").load()


def jobs(source: str | Path, split: str = "train") -> Iterator[Job]:
    """Names and images, in the archive's order."""
    number = 0
    for batch in read_batches(source, split):
        pixels = np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
        for image, label in zip(pixels.transpose(0, 2, 3, 1), batch[b"labels"], strict=True):
            yield f"{CLASSES[label]}_{number:05d}.png", lambda image=image: Image.fromarray(image)
            number += 1


def main(argv: list[str] | None = None) -> None:
    """Writes the images of one split into a folder."""
    parser = argparse.ArgumentParser(prog="prepare_data.sh cifar10", description=__doc__)
    parser.add_argument("source", help=f"{ARCHIVE}, the folder {FOLDER}, or torchvision's root")
    parser.add_argument("folder", help="where the images go")
    parser.add_argument("--split", choices=tuple(BATCHES), default="train")
    parser.add_argument("--expect", type=int, help="number of images, if it is not CIFAR-10's own")
    parser.add_argument("--download", action="store_true",
                        help="let torchvision fetch the archive into SOURCE first")  # fmt: skip
    args = parser.parse_args(argv)
    try:
        if args.download:
            download("CIFAR10", args.source)
        expected = COUNT[args.split] if args.expect is None else args.expect
        made = {"dataset": "CIFAR-10", "split": args.split}
        write_images(args.folder, jobs(args.source, args.split), expected, made)
    except (ValueError, OSError, pickle.UnpicklingError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
