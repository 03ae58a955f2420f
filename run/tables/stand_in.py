"""Images that come with a package, in the layouts that upstreams read, and nets to compare them.

python -m run.tables.stand_in images/ --data digits --size 8              PNG files with labels
python -m run.tables.stand_in net.pt  --data digits --size 8 --classifier a small classifier
"""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn

from ogdm_core import images as data_sets
from ogdm_core.cli import Parser, errors_in_one_line
from ogdm_core.files import write_json
from run.data.pictures import write_images
from run.evaluate.classifier import save_classifier, train_classifier


def write_digits(folder: Path, data: str, size: int, count: int = 0, mirrored: bool = False) -> None:
    """The first `count` images (0: all) as RGB files LABEL_NUMBER.png, perhaps with mirror images.

    guided-diffusion takes a label from the file's name, EDM's dataset_tool.py from dataset.json.
    """
    images = data_sets.load(data, size)
    count = count or len(images)
    pixels, labels = images.array[:count, 0], images.labels.tolist()

    def picture(i: int, mirror: bool) -> Image.Image:
        image = Image.fromarray(pixels[i])
        if image.width != size:
            image = image.resize((size, size), Image.Resampling.BICUBIC)
        return (ImageOps.mirror(image) if mirror else image).convert("RGB")

    made = [(i, mirror) for mirror in (False, True)[: 1 + mirrored] for i in range(count)]
    names = [f"{labels[i]}_{i:05d}{'m' * mirror}.png" for i, mirror in made]
    makers = (lambda i=i, mirror=mirror: picture(i, mirror) for i, mirror in made)
    record = {"dataset": data, "size": size, "mirrored": mirrored}
    write_images(folder, zip(names, makers, strict=True), len(names), record)
    write_json(folder / "dataset.json", {"labels": [[n, int(n.split("_")[0])] for n in names]})


def write_classes(folder: Path, images: Path, times: int) -> None:
    """The images of `write_digits`, each pixel `times` as wide, in a folder per class, which SiT's data set reads."""
    for file in sorted(images.glob("*.png")):
        place = folder / file.name.partition("_")[0]
        place.mkdir(parents=True, exist_ok=True)
        with Image.open(file) as image:
            size = image.width * times
            image.resize((size, size), Image.Resampling.NEAREST).save(place / file.name)


class Digits:
    """The folder's images as latent-diffusion's data sets give them: [size, size, 3] in [-1, 1]."""

    def __init__(self, folder: str, size: int, count: int | None = None):
        def read(file: Path) -> np.ndarray:
            with Image.open(file) as image:
                return np.asarray(image.resize((size, size)), dtype=np.float32) / 127.5 - 1

        self.images = [read(file) for file in sorted(Path(folder).glob("*.png"))[:count]]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {"image": self.images[i]}


def random_features(images: torch.Tensor) -> torch.Tensor:
    """uint8 [N, 3, H, W] -> [N, 8]: random convolutions, always the same ones, scaled so that FID has a readable
    size. They take Inception's place in a smoke run, and say nothing about quality."""
    with torch.no_grad():
        return 100 * _random_network()(images.float().cpu() / 127.5 - 1)


@cache
def _random_network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2), nn.SiLU(), nn.Conv2d(16, 32, 3, stride=2), nn.SiLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 8),
        ).eval()  # fmt: skip


@errors_in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Writes the images or the classifier."""
    p = Parser(prog="python -m run.tables.stand_in", description=__doc__)
    p.add_argument("output", type=Path, help="folder of the images, or file of the classifier")
    p.add_argument("--data", choices=("digits", "mnist"), default="digits")
    p.add_argument("--size", type=int, default=32, help="side in pixels (default: %(default)s)")
    p.add_argument("--count", type=int, default=0, help="the first so many (default: all)")
    p.add_argument("--mirrored", action="store_true", help="the mirror images, too")
    p.add_argument("--classes-of", type=Path, metavar="DIR", help="these images, eight times as wide, by class")
    p.add_argument("--classifier", action="store_true", help="train a net in place of the images")
    args = p.parse_args(argv)
    if args.classes_of:
        write_classes(args.output, args.classes_of, 8)
        return
    if not args.classifier:
        write_digits(args.output, args.data, args.size, args.count, args.mirrored)
        return
    net, accuracy = train_classifier(data_sets.load(args.data, args.size))
    save_classifier(args.output, net, accuracy)
    print(f"{args.output}: classifies {accuracy:.1%} of the tenth that was held out")


if __name__ == "__main__":
    main()
