"""Data sets, from the archives people have to the folder of images that upstream reads.

One module a data set, each a command: `python -m run.data.cifar10 SOURCE FOLDER`.
`run/prepare_data.sh NAME ...` finds them by name. All of them can be stopped at any time and
started again: an image is written whole or not at all, and one that is there is not made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from PIL import Image

# An image's file name and how to make it; it is only made if it is not there yet.
Job = tuple[str, Callable[[], Image.Image]]


# Beside the images: how they were made, so that a second run does not mix two ways.
RECORD = "prepared.json"


def write_images(
    folder: str | Path, jobs: Iterable[Job], expected: int, made: dict[str, str | int]
) -> int:
    """Writes the images as PNG files into `folder`, with a progress bar; returns how many are new.

    `made` says how the images are made: plain values, "dataset" among them. Raises if the folder
    was begun in another way, or if it then holds another number of images than `expected`: a data
    set with a hole in it, or with another one mixed in, trains without complaint.
    """
    from rich.progress import track

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / RECORD
    before = json.loads(record.read_text()) if record.exists() else made
    if before != made:
        raise ValueError(f"{folder} was begun as {before}, not as {made}; give another folder")
    record.write_text(json.dumps(made) + "\n")
    there = {entry.name for entry in os.scandir(folder)}
    new = 0
    for name, make in track(jobs, description=str(made["dataset"]), total=expected):
        if name not in there:
            partial = folder / f"{name}.partial"
            make().save(partial, format="PNG")
            partial.replace(folder / name)
            new += 1
    count = sum(entry.name.endswith(".png") for entry in os.scandir(folder))
    if count != expected:
        hint = "give an empty folder" if count > expected else "check that the source is complete"
        raise ValueError(f"{folder} holds {count:,} images, not {expected:,}; {hint}")
    print(f"{folder}: {count:,} images, {new:,} of them new")
    return new


def download(dataset: str, root: str | Path) -> None:
    """Lets torchvision fetch one of its data sets into `root`."""
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            "--download needs a torchvision that fits this torch (pytorch.org says which); or "
            f"fetch the archive by hand and leave --download out. The import said: {error}"
        ) from error
    getattr(datasets, dataset)(root=str(root), download=True)
