"""NVlabs/edm2."""

import re
from collections.abc import Mapping
from pathlib import Path

from run import launch
from run.launch import Command, Engine
from run.presets import Preset

from .base import Dnnlib, Flags

MI = 1 << 20  # upstream counts images in powers of two
RELEASED = "https://nvlabs-fi-cdn.nvidia.com/edm2/posthoc-reconstructions/edm2-img64-s-1073741-0.075.pkl"
LAST_RATE = 0.0026  # at the end of the released training: 0.01 / sqrt(1024 Mi / (35,000 * 2,048))
SMALL = {
    "smoke": {"--model-channels": 16, "--status": 256, "--snapshot": 1024, "--checkpoint": 1024, "--lr-rampup": 0},
    "cpu": {"--model-channels": 48, "--status": 8192, "--snapshot": 16384, "--checkpoint": 16384},
}  # fmt: skip
FINETUNE = Preset("imagenet64-edm2-ogdm-ft", "imagenet64", "finetune", 2048, 20 * MI, "euler")


class Edm2(Dnnlib):
    """Several processes by torchrun. The same command again continues a run."""

    name = "edm2"
    folder = "edm2"
    script = "train_edm2.py"
    checkpoint_gb = 5.6  # 280 million weights: network, two EMAs, two moments of Adam
    mark = b"MPConv"  # a class in the source that its networks bring
    generator = ("generate_images.py", "--net")
    not_in_key = frozenset({"--outdir", "--data", "--transfer", "--net", "--npz", "--snapshot", "--checkpoint"})
    presets = (
        Preset("imagenet64-edm2-baseline", "imagenet64", "baseline", 2048, 1024 * MI),
        FINETUNE,
        FINETUNE.control,
    )
    small_images: Mapping[str, tuple[int, int]] = {"smoke": (256, 1024), "cpu": (64, 2_048 * 64)}

    def training(self, preset: Preset, engine: Engine, data: str, out: Path, init: str, seed: int | None) -> Flags:
        """Upstream's S-sized network. A fine-tune goes on at the rate where the released training ended."""
        kept = preset.images // 20 // MI * MI or MI
        flags = {
            "--outdir": out, "--data": data, "--preset": "edm2-img64-s", "--batch": preset.batch,
            "--duration": preset.images, "--snapshot": kept, "--checkpoint": kept,
        }  # fmt: skip
        if seed is not None:
            flags["--seed"] = seed
        if preset.training == "finetune":
            flags |= {"--transfer": init or RELEASED, "--lr": LAST_RATE, "--decay": 0, "--lr-rampup": 0}
        return flags

    def resumed(self, command: Command, folder: Path) -> Command | None:
        """Upstream continues by itself, and ends with an error where nothing is left."""
        last = launch.newest(folder, self.checkpoint, True)
        done = int(re.findall(r"\d+", last.name)[0]) if last else -1
        return None if done >= int(command.flags["--duration"]) // 1000 else command

    def checkpoints_kept(self, preset: Preset) -> int:
        return 20

    def small_training(self, scale: str, preset: Preset, init: str, size: int, rate: str) -> Flags:
        """Upstream saves at multiples of --snapshot only. Weights are kept at unit size, so rates are higher."""
        flags = SMALL[scale] | {"--channel-mult": 1, "--blocks": 1, "--attention": ""}
        flags["--duration"] = -(-preset.images // flags["--snapshot"]) * flags["--snapshot"]
        if scale != "smoke":
            flags |= {"--lr": f"{10 * float(rate):g}", "--lr-rampup": 0 if init else 0.01}
        return flags


BACKBONE = Edm2()
