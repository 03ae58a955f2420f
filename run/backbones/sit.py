"""willisma/SiT."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from run import launch
from run.launch import Command, Engine
from run.presets import Preset

from .base import Flags, Torchrun

IMAGENET = 1_281_167  # images; upstream counts epochs
FINETUNE = Preset("imagenet256-sit-ogdm-ft", "imagenet256", "finetune", 256, 4 * IMAGENET, "euler")
NETWORK = {"--model": "SiT-XL/2", "--image-size": 256, "--num-classes": 1000}


class Sit(Torchrun):
    """Several processes by torchrun. It makes a folder of its own below --results-dir."""

    name = "sit"
    folder = "SiT"
    script = "train.py"
    packages = ("timm", "torchdiffeq", "diffusers")
    model = "model.pt"
    weights = "*/checkpoints/[0-9]*.pt"
    checkpoint = "*/checkpoints/[0-9]*.pt"
    observed_checkpoint = "*/checkpoints/ogdm-*.pt"
    samples = "*.npz"
    checkpoint_gb = 11.0  # 675 million weights: network, EMA, two moments of Adam
    not_in_key = frozenset({"--data-path", "--results-dir", "--init", "--ckpt", "--latents", "--sample-dir"})
    mirrors = True
    presets = (
        Preset("imagenet256-sit-baseline", "imagenet256", "baseline", 256, 1400 * IMAGENET),
        FINETUNE,
        FINETUNE.control,
    )
    small_images: Mapping[str, tuple[int, int]] = {"smoke": (20, 40)}

    def training(self, preset: Preset, engine: Engine, data: str, out: Path, init: str, seed: int | None) -> Flags:
        """Upstream's settings; a fine-tune needs weights, since upstream's script downloads them elsewhere."""
        if preset.training == "finetune" and not init:
            raise ValueError(f"{preset.name} fine-tunes: give SiT-XL-2-256x256.pt, or your own weights, with --init")
        return {
            "--data-path": data, "--results-dir": out, **NETWORK, "--global-batch-size": preset.batch,
            "--epochs": preset.images // IMAGENET, "--ckpt-every": 5000,
            **({"--init": init} if preset.training == "finetune" else {}),
            **({} if seed is None else {"--global-seed": seed}),
        }  # fmt: skip

    def sampling(
        self, preset: Preset, model: str, out: Path, sampler: str, nfe: int, images: int, seed: int
    ) -> tuple[str, Flags]:
        """The npz stands beside the folder of images, which upstream names after the settings."""
        return "sample_ddp.py", {
            "ODE": None, **NETWORK, "--ckpt": model, "--sample-dir": out, "--num-fid-samples": images,
            "--global-seed": seed, "--per-proc-batch-size": 32, "--sampler": sampler, "--nfe": nfe,
        }  # fmt: skip

    def resumed(self, command: Command, folder: Path) -> Command | None:
        observed = "--ogdm" in command.flags
        last = launch.newest(folder, self.observed_checkpoint if observed else self.checkpoint, True)
        if last is None:
            return command
        flags = {name: value for name, value in command.flags.items() if name != "--init"}
        return replace(command, flags=flags | {"--ckpt": last.with_name(last.name.removeprefix("ogdm-"))})

    def checkpoints_kept(self, preset: Preset) -> int:
        return preset.steps // 5000

    def small_training(self, scale: str, preset: Preset, init: str, size: int, rate: str) -> Flags:
        return {
            "--model": "SiT-S/2", "--image-size": 64, "--num-classes": 10, "--depth": 2, "--hidden-size": 24,
            "--num-heads": 2, "--epochs": 1, "--num-workers": 0, "--log-every": 1, "--ckpt-every": 2,
        }  # fmt: skip


BACKBONE = Sit()
