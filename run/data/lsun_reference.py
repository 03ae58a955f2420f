"""LSUN-Church as latent-diffusion is shown it, for its samples to be compared with.

The central square of every training image, scaled with a bicubic filter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ogdm_core.flags import number

from . import write_images

if TYPE_CHECKING:
    from PIL import Image

SOURCE = "the folder that run/prepare_data.sh lsun wrote"
LIST = "church_outdoor_train.txt"


def crop(path: Path, size: int) -> Image.Image:
    """The central square of an image at size x size."""
    from PIL.Image import Resampling

    from ogdm_core.trainer.images import central_square, open_image

    square = central_square(open_image(path, path).convert("RGB"))
    return square.resize((size, size), Resampling.BICUBIC)


def arguments(add: Callable[..., object]) -> None:
    """The flags."""
    add("--size", type=number(int, 1), default=256,
        help="width and height in pixels (default: 256)")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Writes one PNG for each line of the training list."""
    if not (args.source / LIST).is_file():
        raise ValueError(f"{args.source} has no {LIST}; run/prepare_data.sh lsun writes it")
    names = (args.source / LIST).read_text().splitlines()
    pictures = (
        (f"{number:06d}.png", partial(crop, args.source / "churches" / name, args.size))
        for number, name in enumerate(names)
    )
    made = {"dataset": "LSUN church, central squares", "size": args.size}
    write_images(args.folder, pictures, len(names), made)
