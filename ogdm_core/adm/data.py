"""Checks of --data_dir before training: errors that guided-diffusion would not notice."""

import argparse
import functools
import os
from typing import Any

from torch import distributed as dist

from ..folder import Named
from ..sealed import blobfile
from .compat import refusals


@refusals()
def check(flags: argparse.Namespace, classes: int, image_datasets: Any) -> None:
    """ValueError for what upstream trains on wrongly, or waits on for ever, without a word.

    Upstream's module `image_datasets` lists the files when the first batch is asked for; the list
    made here is kept for it. Its data set then names a file that cannot be read.
    """
    found = functools.cache(image_datasets._list_image_files_recursively)
    image_datasets._list_image_files_recursively = found
    images, ranks, where = found(flags.data_dir), dist.get_world_size(), flags.data_dir
    if len(images) // ranks < flags.batch_size:
        raise ValueError(
            f"--data_dir: {where} has {len(images)} images, {len(images) // ranks} per rank; "
            f"--batch_size {flags.batch_size} needs at least that many on each of {ranks} ranks"
        )
    if flags.class_cond:
        names = [os.path.basename(path) for path in images]
        bare = [name for name in names if "_" not in name]
        if bare:
            raise ValueError(
                f"--class_cond: {len(bare)} of {len(names)} file names in {where} name no class, "
                f"such as {bare[0]}; name them CLASS_anything.png"
            )
        there = len({name.split("_")[0] for name in names})
        if there > classes:
            raise ValueError(f"--class_cond: {there} classes in {where}, the model has {classes}")
    pngs = [path for path in images if path.lower().endswith(".png")]
    deep = [path for path in pngs[:: len(pngs) // 1000 + 1] if _bits(path) > 8]
    if deep:
        raise ValueError(
            f"--data_dir: {deep[0]} has 16 bits per channel, and so have {len(deep)} of the PNGs "
            "looked at; upstream would clip them to white. Convert them to 8 bits"
        )
    upstream = image_datasets.ImageDataset
    image_datasets.ImageDataset = lambda *args, **kwargs: Named(upstream(*args, **kwargs), _file)


def _file(images: Any, i: int) -> str:
    return images.local_images[i]


def _bits(path: str) -> int:
    """Bits per channel of a PNG: a byte of its header."""
    with blobfile().BlobFile(path, "rb") as file:
        header = file.read(25)
    return header[24] if len(header) == 25 else 0
