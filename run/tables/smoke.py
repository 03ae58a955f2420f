"""What `--scale smoke` runs on: a few real digits at 32x32, and a small feature net for their FID.

    python -m run.tables.smoke FOLDER     writes the digits, in the layouts upstreams read

Nothing here says anything about image quality; it is there so that every command can be run.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from run.data import write_images

SIZE, COUNT = 32, 96


def write_digits(folder: Path, count: int = COUNT) -> None:
    """`count` of scikit-learn's 8x8 digits, enlarged, as RGB files named LABEL_NUMBER.png.

    guided-diffusion takes a label from the file's name, EDM's dataset_tool.py from dataset.json.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    names = [f"{digits.target[i]}_{i:05d}.png" for i in range(count)]

    def picture(i: int) -> Image.Image:
        pixels = (digits.images[i] / 16 * 255).round().astype(np.uint8)
        return Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.BICUBIC).convert("RGB")

    jobs = ((name, lambda i=i: picture(i)) for i, name in enumerate(names))
    write_images(folder, jobs, count, {"dataset": "digits", "size": SIZE})
    labels = [[name, int(digits.target[i])] for i, name in enumerate(names)]
    (folder / "dataset.json").write_text(json.dumps({"labels": labels}) + "\n")


class Digits(torch.utils.data.Dataset):
    """The folder's images as latent-diffusion's data sets give them: [size, size, 3] in [-1, 1]."""

    def __init__(self, folder: str, size: int = SIZE, count: int = COUNT):
        self.files, self.size = sorted(Path(folder).glob("*.png"))[:count], size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        with Image.open(self.files[i]) as image:
            image = image.resize((self.size, self.size))
            return {"image": np.asarray(image, dtype=np.float32) / 127.5 - 1}


def features(images: Tensor) -> Tensor:
    """uint8 [N, 3, H, W] -> [N, 8]: random convolutions, always the same ones.

    Scaled so that FID has a readable size.
    """
    with torch.no_grad():
        return 100 * _network()(images.float().cpu() / 127.5 - 1)


@cache
def _network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2), nn.SiLU(), nn.Conv2d(16, 32, 3, stride=2), nn.SiLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 8),
        ).eval()  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Writes the digits."""
    parser = argparse.ArgumentParser(prog="python -m run.tables.smoke", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the images go")
    parser.add_argument("--count", type=int, default=COUNT, help="default: %(default)s")
    args = parser.parse_args(argv)
    write_digits(args.folder, args.count)


if __name__ == "__main__":
    main()
