"""CelebA at 64x64, from the aligned images: 162,770 of the training split (default) or all 202,599.

Two crops of the 178x218 images are in use; a FID means little without saying which:

    ddim     the 128x128 pixels around (x, y) = (89, 121), the face, scaled by bilinear filtering.
             DDIM's and PNDM's code does this, and with it most few-step results on CelebA-64.
    center   the central 178x178 pixels, scaled by bicubic filtering: hair and background as well.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from . import Picture, download, reader, write_images

if TYPE_CHECKING:
    from PIL import Image

ARCHIVE, FOLDER = "img_align_celeba.zip", "img_align_celeba"
SOURCE = f"{ARCHIVE}, the folder {FOLDER}, or torchvision's root"
WIDTH, HEIGHT = 178, 218
# (left, upper, right, lower) and the filter
CROPS = {"ddim": ((25, 57, 153, 185), "BILINEAR"), "center": ((0, 20, 178, 198), "BICUBIC")}
# The official partition goes by number: 000001.jpg to 162770.jpg train, then valid, then test.
SPLITS = {"train": range(1, 162_771), "all": range(1, 202_600)}


def crop(image: Image.Image, kind: str = "ddim", size: int = 64) -> Image.Image:
    """One aligned image, cropped and scaled to size x size."""
    from PIL.Image import Resampling

    if image.size != (WIDTH, HEIGHT):
        raise ValueError(
            f"an image is {image.size[0]}x{image.size[1]}, not {WIDTH}x{HEIGHT}: take the aligned images, {ARCHIVE}"
        )
    box, resample = CROPS[kind]
    return image.convert("RGB").crop(box).resize((size, size), Resampling[resample])


def pictures(read: Callable[[str], bytes], numbers: range, kind: str, size: int) -> Iterator[Picture]:
    """Names and images, in the order of their numbers."""
    from ogdm_core.images import open_image

    def make(name: str) -> Image.Image:
        return crop(open_image(io.BytesIO(read(name)), name), kind, size)

    return ((f"{number:06d}.png", partial(make, f"{number:06d}.jpg")) for number in numbers)


def arguments(add: Callable[..., object]) -> None:
    """The flags."""
    add("--split", choices=tuple(SPLITS), default="train")
    add("--crop", choices=tuple(CROPS), default="ddim")
    add("--size", type=int, default=64, help="width and height in pixels (default: 64)")
    add("--first", type=int, metavar="N", help="only the first N of the split")
    add("--download", action="store_true", help="torchvision fetches it into SOURCE")


def run(args: argparse.Namespace) -> None:
    """Writes the cropped images of one split into a folder."""
    if args.download:
        download("CelebA", args.source)
    numbers = SPLITS[args.split][: args.first]
    read = reader(args.source, ARCHIVE, FOLDER)
    made = {"dataset": "CelebA", "split": args.split, "crop": args.crop, "size": args.size}
    write_images(args.folder, pictures(read, numbers, args.crop, args.size), len(numbers), made)
