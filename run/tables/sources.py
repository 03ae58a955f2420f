"""The data sets: where they come from, and the stages that prepare them.

For each there is what a backbone trains on and the folder of images that FID is measured against,
which is the whole training set.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from run.provenance import ROOT

from .recipes import Recipe
from .reference import LIST
from .stages import Command, Stage, python_path

REFERENCE_SIZE = 256  # LSUN's images have sizes of their own; latent-diffusion is shown 256x256


@dataclass(frozen=True)
class Source:
    """A data set as its owners give it out."""

    archive: str  # file name
    url: str  # where people get it
    prepared: str  # our folder of it in --data
    size: int  # side of the images that are compared
    gigabytes: float  # what the prepared set takes on a disk, roughly


SOURCES = {
    "cifar10": Source("cifar-10-python.tar.gz", "https://www.cs.toronto.edu/~kriz/cifar.html",
                      "cifar10", 32, 0.4),
    "celeba64": Source("img_align_celeba.zip",
                       "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html", "celeba64", 64, 1.8),
    "lsun-church": Source("church_outdoor_train_lmdb.zip", "https://github.com/fyu/lsun", "lsun",
                          REFERENCE_SIZE, 18.0),
}  # fmt: skip
EDM_ZIP, VALIDATION = "cifar10-32x32.zip", "church_outdoor_val_lmdb.zip"
COMMANDS = {"cifar10": "cifar10", "celeba64": "celeba", "lsun-church": "lsun"}


def environment() -> tuple[tuple[str, str], ...]:
    """To run modules of this repository from any folder."""
    return (("PYTHONPATH", python_path(ROOT)),)


def prepared(dataset: str, data: Path) -> list[Path]:
    """All that preparing a data set leaves in `data`."""
    extra = {"cifar10": [EDM_ZIP], "lsun-church": [f"lsun-{REFERENCE_SIZE}"]}
    return [data / name for name in (SOURCES[dataset].prepared, *extra.get(dataset, []))]


def missing(dataset: str, backbone: str, data: Path, training: bool) -> str | None:
    """What to do if a data set is neither prepared in `data` nor there as its archive."""
    source = SOURCES[dataset]
    if (data / source.archive).is_file():
        return None
    wanted = [data / source.prepared]
    if backbone == "edm" and training:
        wanted.append(data / EDM_ZIP)
    absent = [str(path) for path in wanted if not path.exists()]
    if not absent:
        return None
    return (
        f"{dataset}: there is no {data / source.archive} to prepare it from, and no "
        f"{' and no '.join(absent)} either; get {source.archive} from {source.url}, or give the "
        "folder that has it with --data"
    )


def data_stages(dataset: str, recipe: Recipe, work: Path, data: Path) -> tuple[Stage, Stage]:
    """The stages whose outputs are what the backbone trains on, and the reference images."""
    if recipe.smoke:
        images = _digits(work)
        source, archive = images.output, "digits.zip"
    else:
        images = _prepared(dataset, recipe, work, data)
        source, archive = data / SOURCES[dataset].archive, str(data / EDM_ZIP)
        if dataset == "lsun-church":
            return images, _cropped(images, work, data)
    if recipe.upstream == "edm":  # it reads a zip, which its own tool writes
        return _zip(recipe, work, source, archive, (images,) if recipe.smoke else ()), images
    return images, images


def _digits(work: Path) -> Stage:
    def build(folder: Path) -> list[Command]:
        module = (sys.executable, "-m", "run.tables.smoke")
        return [Command((*module, str(folder / "images")), env=environment())]

    return Stage("digits/data", "data", work, ("digits",), build, product="images")


def _prepared(dataset: str, recipe: Recipe, work: Path, data: Path) -> Stage:
    """run/prepare_data.sh; nothing if the folder is there and the archive is not."""
    source = SOURCES[dataset]
    archive, folder = data / source.archive, data / source.prepared

    def build(_: Path) -> list[Command]:
        if folder.exists() and not archive.is_file():
            return _linked(folder, recipe.home) if dataset == "lsun-church" else []
        script = str(ROOT / "run" / "prepare_data.sh")
        argv = [script, COMMANDS[dataset], str(archive), str(folder)]
        if dataset == "lsun-church":
            argv += ["--upstream", str(recipe.home)]
            val = data / VALIDATION
            argv += ["--val", str(val)] if val.is_file() else []
        return [Command(tuple(argv))]

    return Stage(f"{dataset}/data", "data", work, (dataset,), build, product=str(folder))


def _linked(folder: Path, home: Path) -> list[Command]:
    """Puts a prepared LSUN where latent-diffusion looks for it, which prepare_data.sh does too."""
    place = home / "data" / "lsun"
    if (place / LIST).is_file():
        return []
    return [Command(("ln", "-sfn", str(folder.resolve()), str(place)))]


def _cropped(images: Stage, work: Path, data: Path) -> Stage:
    """LSUN's images as latent-diffusion is shown them, to compare its samples with."""
    place = data / f"lsun-{REFERENCE_SIZE}"

    def build(_: Path) -> list[Command]:
        module = (sys.executable, "-m", "run.tables.reference")
        size = ("--size", str(REFERENCE_SIZE))
        argv = (*module, str(images.output), str(place), *size)
        return [Command(argv, env=environment())]

    settings = ("center crop", str(REFERENCE_SIZE))
    return Stage("lsun-church/reference", "data", work, settings, build, str(place),
                 needs=(images,))  # fmt: skip


def _zip(recipe: Recipe, work: Path, source: Path, archive: str, needs: tuple[Stage, ...]) -> Stage:
    """EDM's own dataset_tool.py; nothing if its zip is there and the source is not."""

    def build(folder: Path) -> list[Command]:
        target = folder / archive
        if target.is_file() and not source.exists() and not needs:
            return []
        tool = [sys.executable, "dataset_tool.py"]
        return [recipe.command([*tool, f"--source={source}", f"--dest={target}"])]

    name = "digits/zip" if recipe.smoke else "cifar10/zip"
    return Stage(name, "data", work, (name,), build, product=archive, needs=needs)
