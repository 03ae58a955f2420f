"""`--scale cpu`: does the method work? Fine-tunes of small networks on real digits, on a CPU.

Each of the paper's fine-tunes stands below its control: the baseline trained on for as many steps
without OGDM, everything else equal. Stages and native commands are those of the paper's scale; the
images are digits at 8x8 (`cpu-mnist`: MNIST at 16x16), and FID is in the features of a small
classifier, not Inception's. CelebA has no counterpart: it would be the same network on the same
digits.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from run.train.commands import ogdm_flags
from run.train.presets import Preset

from . import paper
from .scale import CLASSIFIER, Scale

HERE = Path(__file__).parent
TABLES = (1, 2, 3, 9)
BASELINES = HERE / "baselines"  # DATA-NETWORK.safetensors, as run.tables.baselines packs them
NFES = {"euler": (25, 10, 5), "heun": (25, 11), "s-pndm": (25, 10),
        "f-pndm": (25, 20), "stochastic": (50, 25, 10)}  # fmt: skip

# The networks and the trainings' flags, by backbone.
ADM_NET = {"--num_channels": 32, "--num_res_blocks": 1, "--channel_mult": "1,1",
           "--attention_resolutions": "2", "--num_heads": 4, "--dropout": 0}  # fmt: skip
FLAGS: dict[str, dict[str, Any]] = {
    "adm": ADM_NET | {"--log_interval": 500, "--ema_rate": "0.995"},
    "edm": {"--cbase": 16, "--cres": "1,1", "--augment": 0, "--dropout": 0, "--tick": 8,
            "--snap": 1000, "--dump": 1000, "--lr-rampup": 0, "--ema": 0.01},
    "ldm": {},
}  # fmt: skip
RATE = {"adm": "--lr", "edm": "--lr", "ldm": "model.base_learning_rate"}
BATCH = 64
BASELINE_STEPS, FINETUNE_STEPS = {"adm": 4_000, "edm": 3_125, "ldm": 4_000}, 1_000
BASELINE_RATE, FINETUNE_RATE = "1e-3", "2e-4"
OGDM = {"adm": {"k": 0.5, "gamma": 0.06}, "edm": {"k": 0.5, "gamma": 0.12},
        "edm-heun": {"k": 0.2, "gamma": 0.025}, "edm-cond": {"k": 0.3, "gamma": 1.2},
        "ldm": {"k": 0.25, "gamma": 0.1}}  # fmt: skip
ON_MNIST = {"adm": {"k": 0.35, "gamma": 0.12}}  # with k 0.5 and t_max 0.7 FID is four times as high
T_MAX = {"digits": {"adm": 0.7, "ldm": 0.7}, "mnist": {"adm": 0.45, "ldm": 0.7}}


def network(preset: Preset) -> str:
    """Its place in OGDM, and the name of its baseline."""
    heun = "-heun" * (preset.projection == "heun")
    return preset.backbone + "-cond" * preset.conditional + heun


class Cpu(Scale):
    """Fine-tunes and their controls."""

    def table(self, number: int) -> paper.Table:
        table = paper.table(number)
        return paper.with_controls(table, NFES) if number in TABLES else replace(table, rows=())

    def preset(self, preset: Preset) -> Preset:
        baseline = preset.training == "baseline"
        steps = BASELINE_STEPS[preset.backbone] if baseline else FINETUNE_STEPS
        settings = OGDM | (ON_MNIST if self.data == "mnist" else {})
        ogdm = settings[network(preset)] if preset.ogdm else {}
        return replace(preset, batch=BATCH, images=steps * BATCH, **ogdm)

    def training(self, preset: Preset, init: str, seed: int) -> dict[str, Any]:
        backbone = preset.backbone
        more = FLAGS[backbone] | {RATE[backbone]: FINETUNE_RATE if init else BASELINE_RATE}
        if backbone == "adm":
            more["--image_size"] = self.size
        if backbone == "ldm":
            more |= self.ldm_configs(preset, init, HERE / "cpu_ldm.yaml")
            more |= {f"model.params{part}.image_size": self.size
                     for part in ("", ".unet_config.params")}  # fmt: skip
            more |= {f"data.params.{part}.params.size": self.size
                     for part in ("train", "validation")}  # fmt: skip
        late = {"t_max": t} if (t := T_MAX[self.data].get(backbone)) else {}
        ogdm = {"d_kind": "light", "fused": True, **late, "seed": seed}
        return more | (ogdm_flags(backbone, ogdm) if preset.ogdm else {})

    def sampling(self, preset: Preset, images: int) -> dict[str, Any]:
        batch = "--batch" if preset.backbone == "edm" else "--batch_size"
        net = ADM_NET | {"--image_size": self.size} if preset.backbone == "adm" else {}
        return net | {batch: 500}

    def shipped(self, preset: Preset) -> Path | None:
        file = BASELINES / f"{self.data}-{network(preset)}.safetensors"
        return file if preset.training == "baseline" and file.is_file() else None


TITLE = (
    "CPU SCALE: small networks on {} at {}x{}, FID and recall in the features of a small "
    "classifier, not Inception's: they compare with each other only"
)
DIGITS = Cpu(
    name="cpu", title=TITLE.format("scikit-learn's digits", 8, 8), images=2_500, seeds=(0, 1, 2),
    data="digits", size=8, mirrored=("adm",), features=CLASSIFIER, controls=True, gigabytes=2.0,
)  # fmt: skip
MNIST = replace(DIGITS, name="cpu-mnist", data="mnist", size=16,
                title=TITLE.format("5,000 of MNIST's digits", 16, 16))  # fmt: skip
