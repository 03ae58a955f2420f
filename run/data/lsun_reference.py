"""LSUN-Church as latent-diffusion sees it: central squares, for its samples to be compared with."""

import argparse
from functools import partial

from PIL import Image

from ogdm_core.images import central_square, open_image

from .pictures import write_images

LIST = "church_outdoor_train.txt"  # which run/prepare_data.sh lsun writes


def run(args: argparse.Namespace) -> None:
    """Writes one PNG for each line of the training list."""
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
