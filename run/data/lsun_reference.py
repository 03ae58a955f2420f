"""LSUN-Church as latent-diffusion is shown it, for its samples to be compared with.

The central square of every training image, scaled with a bicubic filter.
"""

import argparse
from collections.abc import Callable
from functools import partial

from ogdm_core.cli import number

from . import write_images

SOURCE = "the folder that run/prepare_data.sh lsun wrote"
LIST = "church_outdoor_train.txt"


def arguments(add: Callable[..., object]) -> None:
    """The flags."""
    add("--size", type=number(int, 1), default=256,
        help="width and height in pixels (default: 256)")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Writes one PNG for each line of the training list."""
    from PIL import Image

    from ogdm_core.images import central_square, open_image

    if not (args.source / LIST).is_file():
        raise ValueError(f"{args.source} has no {LIST}; run/prepare_data.sh lsun writes it")
    names = (args.source / LIST).read_text().splitlines()

    def crop(name: str) -> Image.Image:
        path = args.source / "churches" / name
        square = central_square(open_image(path, path).convert("RGB"))
        return square.resize((args.size, args.size), Image.Resampling.BICUBIC)

    pictures = ((f"{i:06d}.png", partial(crop, name)) for i, name in enumerate(names))
    made = {"dataset": "LSUN church, central squares", "size": args.size}
    write_images(args.folder, pictures, len(names), made)
