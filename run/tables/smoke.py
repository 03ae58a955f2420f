"""`--scale smoke`: tiny networks for a few steps on a few real digits at 32x32, on a CPU.

    python -m run.tables.smoke FOLDER     writes the digits, in the layouts upstreams read

The flags below replace those of the paper's rows, and a small random net takes Inception's place.
Nothing here says anything about image quality; it is there so that every command can be run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ogdm_core.files import write_json
from run.data import write_images
from run.train.commands import LDM_BASE, LDM_FINETUNE
from run.train.presets import Preset

SIZE, COUNT = 32, 96
FEATURES = "run.tables.smoke:features"
CONFIG = Path(__file__).with_name("smoke_ldm.yaml")
# A rate at which three steps leave a mark, and an EMA that follows.
ADM_NET = {"--image_size": 32, "--num_channels": 32, "--num_res_blocks": 1, "--channel_mult": "1,1",
           "--attention_resolutions": 16}  # fmt: skip
ADM = ADM_NET | {"--log_interval": 1, "--lr": "1e-2", "--ema_rate": 0.5}
EDM = {"--cbase": 8, "--cres": "1,1", "--tick": 1, "--snap": 1, "--dump": 1, "--augment": 0,
       "--ema": 0, "--lr-rampup": 0}  # fmt: skip
GUIDE = {"--steps": 3, "--batch-size": 8}
WIDTH = {"adm": "--ogdm_d_width", "edm": "--ogdm-d-width", "ldm": "model.params.ogdm.d_width"}


def small(preset: Preset) -> Preset:
    """Three steps with a batch of 8; on EDM a thousand images, the least that upstream counts."""
    batch, images = (200, 1000) if preset.backbone == "edm" else (8, 24)
    return replace(preset, batch=batch, images=images)


def training(preset: Preset, init: str) -> dict[str, Any]:
    """Flags in place of the row's."""
    more: dict[str, Any] = dict({"adm": ADM, "edm": EDM, "ldm": {}}[preset.backbone])
    if preset.backbone == "ldm":
        tuned = [str(LDM_FINETUNE)] if preset.training == "finetune" else []
        more = {"--base": (LDM_BASE, *tuned, str(CONFIG))}
        more |= {} if init else {"model.params.ckpt_path": "null"}
    return more | ({WIDTH[preset.backbone]: 0.02} if preset.ogdm else {})


def folders(preset: Preset, data: str) -> dict[str, str]:
    """Where LDM's stand-in for LSUN is; the others have a flag of their own for it."""
    parts = ("train", "validation") if preset.backbone == "ldm" else ()
    return {f"data.params.{part}.params.folder": data for part in parts}


def sampling(preset: Preset, images: int) -> Mapping[str, Any]:
    """Flags in place of the row's."""
    return ADM_NET | {"--batch_size": images} if preset.backbone == "adm" else {}


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
    write_json(folder / "dataset.json", {"labels": labels})


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
