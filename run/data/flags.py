"""The flags of `run/prepare_data.sh`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ogdm_core.cli import Parser, number
from run.provenance import ROOT

DESCRIPTION = """\
Turns a data set's archive into the folder of images that the trainers read.

Can be stopped and started again; counts the images at the end. run/prepare_data.sh NAME --help
says what SOURCE may be, and lists the options."""
CELEBA = """\
CelebA at 64x64, from the aligned images: 162,770 of the training split or all 202,599.

Two crops of the 178x218 images are in use; a FID means little without saying which:

    ddim     the 128x128 pixels around (x, y) = (89, 121), the face, scaled by bilinear filtering.
             DDIM's and PNDM's code does this, and with it most few-step results on CelebA-64.
    center   the central 178x178 pixels, scaled by bicubic filtering: hair and background as well."""
CIFAR10 = """\
CIFAR-10: 50,000 training images of 32x32 as `airplane_00000.png`, ..., `truck_49999.png`.

guided-diffusion takes the label from a file's name, up to the first underscore, and numbers the
labels in alphabetical order, which is CIFAR-10's own."""
FOLDER = """\
Pictures of your own, of any size, grey and colour, as every backbone reads them:

    FOLDER/CLASS_000000.png    the central square, upright, at --size; guided-diffusion reads the class
    FOLDER/dataset.json        the labels, for EDM, whose --data is FOLDER
    FOLDER/ldm.yaml            given to latent-diffusion's main.py after a config of upstream's
    FOLDER/reference.npz       all images and labels, for run/evaluate.sh and class-conditional diffusers models
    FOLDER/left-out.txt        which files were left out, and why

Classes are the folders directly in SOURCE, if there are several. Grey pictures become colour unless all are grey."""
LSUN = """\
LSUN-Church in the layout that latent-diffusion reads:

    FOLDER/church_outdoor_train.txt     one path per line, relative to FOLDER/churches
    FOLDER/church_outdoor_val.txt
    FOLDER/churches/train/, val/        the images, byte for byte as the archives hold them

Validation images are LSUN's 300 if --val names their archive; without it 300 training images stand
in, which is enough for what latent-diffusion does with them: pick checkpoints."""
LSUN_REFERENCE = """\
LSUN-Church as latent-diffusion sees it, for its samples to be compared with: the central square of
every training image, scaled with a bicubic filter."""
LSUN_COUNT = 126_227  # images in church_outdoor_train_lmdb


def parser() -> argparse.ArgumentParser:
    """One subcommand per data set; all of them take SOURCE and FOLDER."""
    p = Parser(prog="run/prepare_data.sh", description=DESCRIPTION)
    names = p.add_subparsers(dest="name", required=True, metavar="celeba|cifar10|folder|lsun|lsun-reference")
    count = number(int, 1)

    def dataset(name: str, description: str, source: str):
        add = names.add_parser(name, description=description).add_argument
        add("source", type=Path, help=source)
        add("folder", type=Path, help="where the images go")
        return add

    add = dataset("celeba", CELEBA, "img_align_celeba.zip, the folder img_align_celeba, or torchvision's root")
    add("--split", choices=("train", "all"), default="train", help="(default: %(default)s)")
    add("--crop", choices=("ddim", "center"), default="ddim", help="(default: %(default)s)")
    add("--size", type=count, default=64, help="width and height in pixels (default: %(default)s)")
    add("--first", type=count, metavar="N", help="only the first N of the split (default: all)")
    add("--download", action="store_true", help="torchvision fetches it into SOURCE")

    add = dataset("cifar10", CIFAR10, "cifar-10-python.tar.gz, the folder cifar-10-batches-py, or torchvision's root")
    add("--split", choices=("train", "test"), default="train", help="(default: %(default)s)")
    add("--size", type=int, choices=(32, 16, 8), default=32,
        help="width and height in pixels; smaller ones are means over areas (default: %(default)s)")  # fmt: skip
    add("--expect", type=count, metavar="N", help="images there must be (default: 50,000 to train on, 10,000 to test)")
    add("--download", action="store_true", help="torchvision fetches it into SOURCE")

    add = dataset("folder", FOLDER, "a folder of pictures")
    add("--size", type=side, required=True, help="width and height in pixels, a power of two from 8")
    add("--enlarge", action="store_true", help="take smaller pictures, too")
    add("--no-classes", action="store_true", help="folders are no classes")

    add = dataset("lsun", LSUN, "church_outdoor_train_lmdb.zip, the LMDB folder from it, or a folder of images")
    add("--val", type=Path, help="church_outdoor_val_lmdb.zip")
    add("--count", type=lambda text: None if text == "any" else count(text), default=LSUN_COUNT, metavar="N|any",
        help="training images there must be (default: %(default)s)")  # fmt: skip
    add("--upstream", type=Path, default=ROOT / "third_party" / "latent-diffusion", metavar="DIR",
        help="gets a link to FOLDER as data/lsun (default: the submodule)")  # fmt: skip

    add = dataset("lsun-reference", LSUN_REFERENCE, "the folder that run/prepare_data.sh lsun wrote")
    add("--size", type=count, default=256, help="width and height in pixels (default: %(default)s)")
    return p


def side(text: str) -> int:
    """The type of an image size that D takes."""
    value = number(int, 8)(text)
    if value & (value - 1):
        raise argparse.ArgumentTypeError(f"{text} is not allowed; give a power of two from 8, such as 32, 64 or 256")
    return value


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The data set's name, SOURCE, FOLDER and the options."""
    return parser().parse_args(argv)
