"""Jobs that prepare data: the paper's sets from their owners' archives, or a scale's stand-in.

FID is measured against the whole training set.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from run.backbones.base import Backbone
from run.launch import Command, Engine, module
from run.provenance import ROOT

from .jobs import Job
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
    labels: bool = False  # the archive has class labels, which a folder of images has not
    cropped: bool = False  # the images have sizes of their own; they are compared as crops of `size`
    smaller: bool = False  # than its owners' images

    @property
    def packed(self) -> str:
        """The name of a file that holds the images, where a backbone reads one."""
        return self.folder if self.smaller else f"{self.folder}-{self.size}x{self.size}"

    @property
    def reference(self) -> str:
        """The folder of the images that are compared."""
        return f"{self.folder}-{self.size}" if self.cropped else self.folder


SOURCES = {
    "cifar10": Source("cifar10", "cifar-10-python.tar.gz",
                      "https://www.cs.toronto.edu/~kriz/cifar.html", "cifar10", 32, 0.4, labels=True),
    "celeba64": Source("celeba", "img_align_celeba.zip",
                       "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html", "celeba64", 64, 1.8),
    "lsun-church": Source("lsun", "church_outdoor_train_lmdb.zip",
                          "https://github.com/fyu/lsun", "lsun", 256, 18.0, cropped=True),
}  # fmt: skip
VALIDATION = "church_outdoor_val_lmdb.zip"
CHURCHES = "church_outdoor_train.txt"  # the list of images that run/prepare_data.sh writes


def source_of(dataset: str, size: int = 0) -> Source:
    """The data set, with its images at `size` (0: as they are)."""
    source = SOURCES[dataset]
    smaller = replace(source, folder=f"{source.folder}-{size}", size=size, smaller=True)
    return smaller if 0 < size < source.size else source


def real(dataset: str, backbone: Backbone, out: Path, data: Path, engine: Engine, size: int = 0) -> tuple[Job, Job]:
    """What the backbone trains on, and the images that FID is measured against."""
    source = source_of(dataset, size)
    home = backbone.home(engine.third_party)
    folder = str(data / source.folder)
    settings = {"size": size} if size else {}
    images = reference = Job(dataset, "data", out, settings, lambda _: prepare(source, data, home), folder)
    if source.cropped:
        place, size = data / source.reference, {"--size": source.size}
        reference = Job(
            f"{dataset}-reference", "data", out, {"crop": source.size},
            lambda _: module("run.data", "lsun-reference", images.output, place, **size), str(place), needs=(images,),
        )  # fmt: skip
    if archive := backbone.archive(source.packed):
        from_archive = source.labels and not source.smaller
        origin, needs = (data / source.archive, ()) if from_archive else (images.output, (images,))
        return _converted(dataset, backbone, out, engine, origin, data / archive, *needs, **settings), reference
    return images, reference


def prepare(source: Source, data: Path, home: Path) -> Command | None:
    """run/prepare_data.sh; nothing if the folder is there and the archive is not. LSUN is read in the codebase's own
    folder, `home`."""
    archive, folder, flags = data / source.archive, data / source.folder, {}
    lsun = source.command == "lsun"
    if source.smaller:
        flags["--size"] = source.size
    if folder.exists() and not archive.is_file():
        place = home / "data" / "lsun"
        if not lsun or (place / CHURCHES).is_file():
            return None
        return Command((), "ln", native=("-sfn", str(folder.resolve()), str(place)))
    if lsun:
        flags = {"--upstream": home} | ({"--val": data / VALIDATION} if (data / VALIDATION).is_file() else {})
    return Command((str(ROOT / "run" / "prepare_data.sh"), source.command, str(archive)), str(folder), flags)


def _converted(
    name: str, backbone: Backbone, out: Path, engine: Engine, source: Path, product: Path, *needs: Job, **settings: int
) -> Job:  # fmt: skip
    """The file that the backbone reads; nothing is done if it is there and the source is not."""

    def build(folder: Path) -> Command | None:
        if not needs and product.is_file() and not source.exists():
            return None
        return backbone.convert(source, folder / product, engine)

    return Job(f"{name}-zip", "data", out, settings, build, str(product), needs=needs)


# ---- stand-ins ----------------------------------------------------------------------------------


def _digits(scale: Scale, out: Path, name: str, product: str, **more: object) -> Job:
    flags = {"--data": scale.data, "--size": scale.size, "--count": scale.count} | more

    def build(folder: Path) -> Command:
        return module("run.tables.stand_in", folder / product, **flags)

    return Job(f"{scale.data}{name}", "data", out, flags, build, product)


def stand_in(scale: Scale, backbone: Backbone, out: Path, engine: Engine) -> tuple[Job, Job]:
    """Images that come with a package: what the backbone trains on, and what FID compares with."""
    images = reference = _digits(scale, out, "", "images")
    if scale.controls and backbone.mirrors:
        reference = _digits(scale, out, "-mirrored", "images", **{"--mirrored": None})
    if archive := backbone.archive(scale.data):
        return _converted(scale.data, backbone, out, engine, images.output, Path(archive), images), reference
    return images, reference


def classifier(scale: Scale, out: Path) -> Job:
    """The net in whose features the stand-ins are compared."""
    return _digits(scale, out, "-classifier", "classifier.pt", **{"--classifier": None})
