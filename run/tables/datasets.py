"""Jobs that prepare data: the paper's sets from their owners' archives, or a scale's stand-in.

FID is measured against the whole training set.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from run.provenance import ROOT
from run.train import commands
from run.train.commands import Command, Engine
from run.train.presets import Preset

from .jobs import Job, module
from .scale import Scale


@dataclass(frozen=True)
class Source:
    """A data set as its owners give it out."""

    command: str  # of run/prepare_data.sh
    archive: str  # file name
    url: str  # where people get it
    folder: str  # ours, in --data
    size: int  # side of the images that are compared
    gigabytes: float  # what the prepared set takes on a disk, roughly


REFERENCE_SIZE = 256  # LSUN's images have sizes of their own; latent-diffusion is shown 256x256
SOURCES = {
    "cifar10": Source("cifar10", "cifar-10-python.tar.gz",
                      "https://www.cs.toronto.edu/~kriz/cifar.html", "cifar10", 32, 0.4),
    "celeba64": Source("celeba", "img_align_celeba.zip",
                       "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html", "celeba64", 64, 1.8),
    "lsun-church": Source("lsun", "church_outdoor_train_lmdb.zip",
                          "https://github.com/fyu/lsun", "lsun", REFERENCE_SIZE, 18.0),
}  # fmt: skip
EDM_ZIP, VALIDATION = "cifar10-32x32.zip", "church_outdoor_val_lmdb.zip"
CHURCHES = "church_outdoor_train.txt"  # the list of images that run/prepare_data.sh writes


def real(preset: Preset, out: Path, data: Path, engine: Engine) -> tuple[Job, Job]:
    """What the backbone trains on, and the images that FID is measured against."""
    images = Job(preset.dataset, "data", out, {}, lambda _: prepare(preset.dataset, data, engine),
                 str(data / SOURCES[preset.dataset].folder))  # fmt: skip
    if preset.backbone == "ldm":
        place = data / f"lsun-{REFERENCE_SIZE}"
        return images, Job(
            "lsun-church-reference", "data", out, {"crop": REFERENCE_SIZE},
            lambda _: module("run.data", "lsun-reference", images.output, place,
                             **{"--size": REFERENCE_SIZE}),
            str(place), needs=(images,),
        )  # fmt: skip
    if preset.backbone == "edm":
        archive = data / SOURCES["cifar10"].archive
        return _zip("cifar10", out, engine, archive, data / EDM_ZIP), images
    return images, images


def prepare(dataset: str, data: Path, engine: Engine) -> Command | None:
    """run/prepare_data.sh; nothing if the folder is there and the archive is not."""
    source = SOURCES[dataset]
    archive, folder = data / source.archive, data / source.folder
    home = engine.third_party / commands.UPSTREAM["ldm"]
    lsun = dataset == "lsun-church"
    if folder.exists() and not archive.is_file():
        place = home / "data" / "lsun"  # where latent-diffusion looks for it
        if not lsun or (place / CHURCHES).is_file():
            return None
        return Command((), "ln", native=("-sfn", str(folder.resolve()), str(place)))
    flags = {"--upstream": home} if lsun else {}
    if lsun and (data / VALIDATION).is_file():
        flags["--val"] = data / VALIDATION
    script = str(ROOT / "run" / "prepare_data.sh")
    return Command((script, source.command, str(archive)), str(folder), flags)


def _zip(name: str, out: Path, engine: Engine, source: Path, product: Path, *needs: Job) -> Job:
    """EDM's own dataset_tool.py; nothing if its zip is there and the source is not."""

    def build(folder: Path) -> Command | None:
        if not needs and product.is_file() and not source.exists():
            return None
        flags = {"--source": source, "--dest": folder / product}
        command = engine.command("edm", "dataset_tool.py", flags)
        return replace(command, launcher=(sys.executable,))

    return Job(f"{name}-zip", "data", out, {}, build, str(product), needs=needs)


# ---- stand-ins ----------------------------------------------------------------------------------


def _digits(scale: Scale, out: Path, name: str, product: str, **more: object) -> Job:
    flags = {"--data": scale.data, "--size": scale.size, "--count": scale.count} | more

    def build(folder: Path) -> Command:
        return module("run.tables.digits", folder / product, **flags)

    return Job(f"{scale.data}{name}", "data", out, flags, build, product)


def stand_in(scale: Scale, backbone: str, out: Path, engine: Engine) -> tuple[Job, Job]:
    """Images that come with a package: what the backbone trains on, and what FID compares with."""
    images = _digits(scale, out, "", "images")
    reference = images
    if backbone in scale.mirrored:
        reference = _digits(scale, out, "-mirrored", "images", **{"--mirrored": None})
    if backbone == "edm":
        name = f"{scale.data}.zip"
        return _zip(scale.data, out, engine, images.output, Path(name), images), reference
    return images, reference


def classifier(scale: Scale, out: Path) -> Job:
    """The net in whose features the stand-ins are compared."""
    return _digits(scale, out, "-classifier", "classifier.pt", **{"--classifier": None})
