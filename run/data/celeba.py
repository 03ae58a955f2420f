"""CelebA at 64x64, from the aligned images: 162,770 of the training split (default) or all 202,599.

Two crops of the 178x218 images are in use; a FID means little without saying which:

    ddim     the 128x128 pixels around (x, y) = (89, 121), the face, scaled by bilinear filtering.
             DDIM's and PNDM's code does this, and with it most few-step results on CelebA-64.
    center   the central 178x178 pixels, scaled by bicubic filtering: hair and background as well.
"""

from __future__ import annotations

import argparse
import io
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image

from . import Job, download, write_images

ARCHIVE, FOLDER = "img_align_celeba.zip", "img_align_celeba"
WIDTH, HEIGHT = 178, 218
# (left, upper, right, lower) and the filter
CROPS = {
    "ddim": ((25, 57, 153, 185), Image.Resampling.BILINEAR),
    "center": ((0, 20, 178, 198), Image.Resampling.BICUBIC),
}
# The official partition goes by number: 000001.jpg to 162770.jpg train, then valid, then test.
SPLITS = {"train": range(1, 162_771), "all": range(1, 202_600)}

Read = Callable[[str], bytes]


def crop(image: Image.Image, kind: str = "ddim", size: int = 64) -> Image.Image:
    """One aligned image, cropped and scaled to size x size."""
    if image.size != (WIDTH, HEIGHT):
        raise ValueError(
            f"an image is {image.size[0]}x{image.size[1]}, not {WIDTH}x{HEIGHT}: take the aligned "
            f"images, {ARCHIVE}"
        )
    box, resample = CROPS[kind]
    return image.convert("RGB").crop(box).resize((size, size), resample)


def open_source(source: str | Path) -> Read:
    """A reader of `NNNNNN.jpg`, from the zip, from the folder in it, or from torchvision's root."""
    source = Path(source)
    inner = (Path(FOLDER), Path(ARCHIVE), Path("celeba", FOLDER), Path("celeba", ARCHIVE))
    for path in inner:
        if source.is_dir() and (source / path).exists():
            return open_source(source / path)
    if source.is_dir():
        return lambda name: (source / name).read_bytes()
    if zipfile.is_zipfile(source):
        archive = zipfile.ZipFile(source)
        return lambda name: archive.read(f"{FOLDER}/{name}")
    raise ValueError(f"{source} is neither {ARCHIVE} nor the folder {FOLDER} from it")


def jobs(read: Read, numbers: range, kind: str = "ddim", size: int = 64) -> Iterator[Job]:
    """Names and images, in the order of their numbers."""

    def make(number: int) -> Image.Image:
        name = f"{number:06d}.jpg"
        try:
            data = read(name)
        except (KeyError, FileNotFoundError) as error:
            raise ValueError(f"the source has no {name}; is it complete?") from error
        return crop(Image.open(io.BytesIO(data)), kind, size)

    for number in numbers:
        yield f"{number:06d}.png", lambda number=number: make(number)


def main(argv: list[str] | None = None) -> None:
    """Writes the cropped images of one split into a folder."""
    parser = argparse.ArgumentParser(
        prog="prepare_data.sh celeba",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help=f"{ARCHIVE}, the folder {FOLDER}, or torchvision's root")
    parser.add_argument("folder", help="where the images go")
    parser.add_argument("--split", choices=tuple(SPLITS), default="train")
    parser.add_argument("--crop", choices=tuple(CROPS), default="ddim")
    parser.add_argument("--size", type=int, default=64, help="pixels a side (default: 64)")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N of the split")
    parser.add_argument("--download", action="store_true",
                        help="let torchvision fetch the archive into SOURCE first")  # fmt: skip
    args = parser.parse_args(argv)
    try:
        if args.download:
            download("CelebA", args.source)
        numbers = SPLITS[args.split][: args.first]
        images = jobs(open_source(args.source), numbers, args.crop, args.size)
        made = {"dataset": "CelebA", "split": args.split, "crop": args.crop, "size": args.size}
        write_images(args.folder, images, len(numbers), made)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
