"""CelebA at 64x64; flags.py describes the two crops in use."""

import argparse
import io
from functools import partial

from PIL import Image
from PIL.Image import Resampling

from ogdm_core.images import open_image

from .pictures import download, reader, write_images

ARCHIVE, FOLDER = "img_align_celeba.zip", "img_align_celeba"
WIDTH, HEIGHT = 178, 218
# (left, upper, right, lower) and the filter
CROPS = {"ddim": ((25, 57, 153, 185), Resampling.BILINEAR), "center": ((0, 20, 178, 198), Resampling.BICUBIC)}
# The official partition goes by number: 000001.jpg to 162770.jpg train, then valid, then test.
SPLITS = {"train": range(1, 162_771), "all": range(1, 202_600)}


def crop(image: Image.Image, kind: str = "ddim", size: int = 64) -> Image.Image:
    """One aligned image, cropped and scaled to size x size."""
    if image.size != (WIDTH, HEIGHT):
        raise ValueError(
            f"an image is {image.size[0]}x{image.size[1]}, not {WIDTH}x{HEIGHT}: take the aligned images, {ARCHIVE}"
        )
    box, resample = CROPS[kind]
    return image.convert("RGB").crop(box).resize((size, size), resample)


def run(args: argparse.Namespace) -> None:
    """Writes the cropped images of one split into a folder, in the order of their numbers."""
    if args.download:
        download("CelebA", args.source)
    numbers = SPLITS[args.split][: args.first]
    read = reader(args.source, ARCHIVE, FOLDER)

    def make(name: str) -> Image.Image:
        return crop(open_image(io.BytesIO(read(name)), name), args.crop, args.size)

    pictures = ((f"{number:06d}.png", partial(make, f"{number:06d}.jpg")) for number in numbers)
    made = {"dataset": "CelebA", "split": args.split, "crop": args.crop, "size": args.size}
    write_images(args.folder, pictures, len(numbers), made)
