"""CIFAR-10 as files whose names begin with their class."""

import argparse
import hashlib
import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from PIL import Image

from ogdm_core.files import write_json
from ogdm_core.trust import RefusedError
from ogdm_core.unpickle import Unpickler

from .pictures import Picture, download, reader, write_images

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ARCHIVE, FOLDER = "cifar-10-python.tar.gz", "cifar-10-batches-py"
BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
SIDE = 32
COUNT = {"train": 50_000, "test": 10_000}
# MD5 of what a batch holds: a byte of label and the pixels, image by image.
SUMS = {
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25", "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421", "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d", "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}  # fmt: skip
# What a file with other content raises: of pickle, of a dict, of numpy.
DAMAGED = (pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, ValueError)


def pictures(read: Callable[[str], bytes], split: str, published: bool) -> Iterator[Picture]:
    """Names and images, in the archive's order; `published` wants them to be CIFAR-10's own."""
    number = 0
    for name in BATCHES[split]:
        data = read(name)
        try:
            batch = Unpickler(io.BytesIO(data), encoding="bytes").load()
            pixels = np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
            labels = [range(len(CLASSES)).index(label) for label in batch[b"labels"]]
            pairs = list(zip(pixels.transpose(0, 2, 3, 1), labels, strict=True))
        except DAMAGED as error:
            why = str(error)
            if isinstance(error, RefusedError):  # without its advice on a flag that is not ours
                why = f"{why.partition(',')[0]}, which the file asks for, may run any code"
            raise ValueError(f"{name} is no batch of CIFAR-10 ({why}); get it again") from error
        if published:
            content = np.concatenate([np.array(labels, np.uint8)[:, None], pixels.reshape(len(pixels), -1)], 1)
            if hashlib.md5(content.tobytes()).hexdigest() != SUMS[name]:
                raise ValueError(f"{name} is not CIFAR-10's (its checksum differs); get the archive again, or say how "
                                 "many images there must be, --expect N")  # fmt: skip
        for image, label in pairs:
            yield f"{CLASSES[label]}_{number:05d}.png", partial(Image.fromarray, image)
            number += 1


def run(args: argparse.Namespace) -> None:
    """Writes the images of one split into a folder, and their labels as EDM's dataset_tool.py reads them."""
    if args.download:
        download("CIFAR10", args.source)
    images = pictures(reader(args.source, ARCHIVE, FOLDER), args.split, args.expect is None)
    made: dict[str, str | int] = {"dataset": "CIFAR-10", "split": args.split}
    if args.size != SIDE:
        made["size"] = args.size
        images = ((name, partial(_averaged, make, args.size)) for name, make in images)
    write_images(args.folder, images, args.expect or COUNT[args.split], made)
    names = sorted(file.name for file in args.folder.glob("*.png"))
    write_json(args.folder / "dataset.json", {"labels": [[n, CLASSES.index(n.partition("_")[0])] for n in names]})


def _averaged(make: Callable[[], Image.Image], size: int) -> Image.Image:
    """The picture at size x size, each pixel the mean of an area."""
    return make().resize((size, size), Image.Resampling.BOX)
