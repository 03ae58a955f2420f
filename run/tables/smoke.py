"""`--scale smoke`: tiny networks for a few steps on a few real digits at 32x32, on a CPU.

The flags below replace those of the paper's rows, and a small random net takes Inception's place.
Nothing here says anything about image quality; it is there so that every command can be run.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from run.train.commands import ogdm_flags
from run.train.presets import Preset

from .scale import Scale

if TYPE_CHECKING:
    from torch import Tensor, nn

CONFIG = Path(__file__).with_name("smoke_ldm.yaml")
# A rate at which three steps leave a mark, and an EMA that follows.
ADM_NET = {"--image_size": 32, "--num_channels": 32, "--num_res_blocks": 1, "--channel_mult": "1,1",
           "--attention_resolutions": 16}  # fmt: skip
ADM = ADM_NET | {"--log_interval": 1, "--lr": "1e-2", "--ema_rate": 0.5}
EDM = {"--cbase": 8, "--cres": "1,1", "--tick": 1, "--snap": 1, "--dump": 1, "--augment": 0,
       "--ema": 0, "--lr-rampup": 0}  # fmt: skip


class Smoke(Scale):
    """Every row of the paper's, for three steps."""

    def preset(self, preset: Preset) -> Preset:
        """Three steps with a batch of 8; on EDM a thousand images, the least that it counts."""
        batch, images = (200, 1000) if preset.backbone == "edm" else (8, 24)
        return replace(preset, batch=batch, images=images)

    def training(self, preset: Preset, init: str, seed: int) -> dict[str, Any]:
        if preset.backbone == "ldm":
            more = self.ldm_configs(preset, init, CONFIG)
        else:
            more = {"adm": ADM, "edm": EDM}[preset.backbone]
        return more | (ogdm_flags(preset.backbone, {"d_width": 0.02}) if preset.ogdm else {})

    def sampling(self, preset: Preset, images: int) -> dict[str, Any]:
        return ADM_NET | {"--batch_size": images} if preset.backbone == "adm" else {}


SMOKE = Smoke(
    name="smoke",
    title="SMOKE RUN: tiny networks, a few steps, a few digits. These numbers mean nothing but "
    "that the pipeline works",
    images=16, data="digits", size=32, count=96, features="run.tables.smoke:features",
    gigabytes=1.0, guide={"--steps": 3, "--batch-size": 8},
)  # fmt: skip


def features(images: "Tensor") -> "Tensor":
    """uint8 [N, 3, H, W] -> [N, 8]: random convolutions, always the same ones.

    Scaled so that FID has a readable size.
    """
    import torch

    with torch.no_grad():
        return 100 * _network()(images.float().cpu() / 127.5 - 1)


@cache
def _network() -> "nn.Module":
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2), nn.SiLU(), nn.Conv2d(16, 32, 3, stride=2), nn.SiLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 8),
        ).eval()  # fmt: skip
