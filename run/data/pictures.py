"""What the data sets share: files in folders and archives in, a folder of PNG files out.

A preparation can be stopped at any time and started again: an image is written whole or not at all,
and one that exists is not made again.
"""

import json
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from ogdm_core.cli import bar_interval
from ogdm_core.files import atomic_write, write_json
from ogdm_core.images import UNREADABLE

# An image's file name and how to make it; it is only made if the file does not exist yet.
Picture = tuple[str, Callable[[], Image.Image]]
# Beside the images: how they were made, so that a second run does not mix two ways.
RECORD = "prepared.json"


def write_images(folder: Path, pictures: Iterable[Picture], expected: int, made: dict[str, str | int]) -> None:
    """Writes the images as PNG files into `folder`, with a progress bar.

    `made` says how the images are made: plain values, "dataset" among them. Raises if the folder
    was begun in another way, or if it then holds another number of images than `expected`: a data
    set with a hole in it, or with another one mixed in, trains without complaint.
    """
    record = folder / RECORD
    try:
        before = json.loads(record.read_text()) if record.exists() else made
    except ValueError as error:
        raise ValueError(
            f"{record} is damaged ({error}), so how {folder} was begun is not known; give another "
            f"folder, or write {json.dumps(made)} into the file if it was begun that way"
        ) from error
    if before != made:
        raise ValueError(f"{folder} was begun as {before}, not as {made}; give another folder")
    write_json(record, made)
    there = {entry.name for entry in os.scandir(folder)}
    new = 0
    for name, make in tqdm(pictures, str(made["dataset"]), expected, unit=" images", mininterval=bar_interval()):
        if name not in there:
            with atomic_write(folder / name, sync=False) as file:
                make().save(file, format="PNG")
            new += 1
    count = sum(entry.name.endswith(".png") for entry in os.scandir(folder))
    if count != expected:
        hint = "give an empty folder" if count > expected else "check that the source is complete"
        raise ValueError(f"{folder} holds {count:,} images, not {expected:,}; {hint}")
    print(f"{folder}: {count:,} images, {new:,} of them new")


def reader(source: Path, archive: str, folder: str) -> Callable[[str], bytes]:
    """A function that reads a file by its name in `folder`, from that folder or from its archive.

    `source` is either, or a place where torchvision keeps them. The function raises ValueError where
    the file is absent or damaged.
    """
    inner = [f"{root}{name}" for root in ("", "celeba/") for name in (folder, archive)]
    source = next((source / path for path in inner if (source / path).exists()), source)
    if source.is_dir():
        opened, prefix = partial(open, mode="rb"), str(source)
    elif zipfile.is_zipfile(source):
        opened, prefix = zipfile.ZipFile(source).open, folder
    elif source.is_file() and tarfile.is_tarfile(source):
        opened, prefix = tarfile.open(source).extractfile, folder  # noqa: SIM115
    else:
        raise ValueError(f"{source} is neither {archive} nor the folder {folder} from it")

    def read(name: str) -> bytes:
        try:
            with opened(f"{prefix}/{name}") as file:
                return file.read()
        except (KeyError, FileNotFoundError) as error:
            raise ValueError(f"{source} has no {name}; expected {folder}, complete") from error
        except (*UNREADABLE, tarfile.TarError) as error:
            raise ValueError(f"{source} is damaged ({name}: {error}); get it again") from error

    return read


def download(dataset: str, root: Path) -> None:
    """Lets torchvision fetch one of its data sets into `root`."""
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            "--download needs a torchvision that fits this torch (pytorch.org says which); or "
            f"fetch the archive by hand and leave --download out. The import said: {error}"
        ) from error
    getattr(datasets, dataset)(root=str(root), download=True)
