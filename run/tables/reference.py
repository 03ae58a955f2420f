"""LSUN's images as latent-diffusion is shown them, for its samples to be compared with.

    python -m run.tables.reference LSUN FOLDER --size 256

The central square, scaled with a bicubic filter. Can be stopped and started again.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from PIL import Image

from ogdm_core.flags import Parser
from run.data import write_images

LIST = "church_outdoor_train.txt"


def crop(path: Path, size: int) -> Image.Image:
    """The central square of an image at size x size."""
    with Image.open(path) as image:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        square = image.convert("RGB").crop((left, top, left + side, top + side))
    return square.resize((size, size), Image.Resampling.BICUBIC)


def write_reference(lsun: Path, folder: Path, size: int) -> None:
    """One PNG for each line of the training list that run/prepare_data.sh wrote."""
    if not (lsun / LIST).is_file():
        raise ValueError(f"{lsun} has no {LIST}; run/prepare_data.sh lsun writes it")
    names = (lsun / LIST).read_text().splitlines()
    pictures = (
        (f"{number:06d}.png", partial(crop, lsun / "churches" / name, size))
        for number, name in enumerate(names)
    )
    made = {"dataset": "LSUN church, central squares", "size": size}
    write_images(folder, pictures, len(names), made)


def main(argv: list[str] | None = None) -> None:
    """Writes the folder of reference images."""
    p = Parser(prog="python -m run.tables.reference", description=__doc__)
    p.add_argument("lsun", type=Path, help="the folder that run/prepare_data.sh lsun wrote")
    p.add_argument("folder", type=Path, help="where the images go")
    p.add_argument("--size", type=int, default=256, help="default: %(default)s")
    args = p.parse_args(argv)
    try:
        write_reference(args.lsun, args.folder, args.size)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
