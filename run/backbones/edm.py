"""NVlabs/edm."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from run import launch
from run.launch import Command, Engine
from run.presets import Preset

from .base import PYTHON, Dnnlib, Flags

if TYPE_CHECKING:
    from torch import Tensor

PRETRAINED = "https://nvlabs-fi-cdn.nvidia.com/edm/pretrained/edm-cifar10-32x32-{}-vp.pkl"
DUMPS = 20  # checkpoints per training; upstream's, every 25M images, come too seldom to resume
SMALL = {
    "smoke": {"--cbase": 8, "--cres": "1,1", "--tick": 1, "--snap": 1, "--dump": 1, "--augment": 0, "--ema": 0,
              "--lr-rampup": 0},
    "cpu": {"--cbase": 16, "--cres": "1,1", "--augment": 0, "--dropout": 0, "--tick": 8, "--snap": 1000,
            "--dump": 1000, "--lr-rampup": 0, "--ema": 0.01},
    "cifar10": {"--cbase": 32, "--cres": "1,2,2", "--blocks": 1, "--attention": 8, "--augment": 0, "--dropout": 0,
                "--tick": 16, "--snap": 1000, "--dump": 4, "--lr-rampup": 0, "--ema": 0.01},
}  # fmt: skip
CONSTRUCTOR = "constructor"  # of a packed network: [class, arguments, keyword arguments]


class Edm(Dnnlib):
    """Several processes by torchrun."""

    name = "edm"
    folder = "edm"
    script = "train.py"
    checkpoint_gb = 1.2
    generator = ("generate.py", "--network")
    not_in_key = frozenset({"--outdir", "--data", "--transfer", "--resume", "--network", "--npz", "--guide",
                            "--snap", "--dump"})  # fmt: skip
    small_images: Mapping[str, tuple[int, int]] = {"smoke": (200, 1000), "cpu": (64, 3_125 * 64),  # it counts thousands
                                                  "cifar10": (64, 20_000 * 64)}  # fmt: skip

    def training(self, preset: Preset, engine: Engine, data: str, out: Path, init: str, seed: int | None) -> Flags:
        """A fine-tune starts from the released model unless others are given, at the full rate."""
        ticks = round(preset.images / 50_000 / DUMPS)
        flags = {
            "--outdir": out, "--nosubdir": None, "--data": data, "--cond": int(preset.conditional),
            "--arch": "ddpmpp", "--precond": "edm", "--batch": preset.batch,
            "--duration": f"{preset.images / 1e6:g}", "--lr": 1e-3, "--ema": 0.5, "--dropout": 0.13,
            "--augment": 0.12, "--snap": ticks, "--dump": ticks,
        }  # fmt: skip
        if seed is not None:
            flags["--seed"] = seed
        if preset.training == "finetune":
            released = PRETRAINED.format("cond" if preset.conditional else "uncond")
            flags |= {"--transfer": init or released, "--lr-rampup": 0}
        return flags

    def resumed(self, command: Command, folder: Path) -> Command | None:
        """Upstream, resumed after its end, would train one batch more and replace the final model."""
        last = launch.newest(folder, self.observed_checkpoint if "--ogdm" in command.flags else self.checkpoint, True)
        if last is None:
            return command
        (kimg,) = re.findall(r"\d+", last.name)
        if int(kimg) >= int(1000 * float(command.flags["--duration"])):
            return None
        flags = {name: value for name, value in command.flags.items() if name != "--transfer"}
        return replace(command, flags=flags | {"--resume": last.with_name(f"training-state-{kimg}.pt")})

    def checkpoints_kept(self, preset: Preset) -> int:
        return DUMPS

    def archive(self, name: str) -> str:
        return f"{name}.zip"

    def convert(self, images: Path, archive: Path, engine: Engine) -> Command:
        """Upstream's own dataset_tool.py."""
        flags = {"--source": images, "--dest": archive}
        return replace(self.command(engine, "dataset_tool.py", flags), launcher=PYTHON)

    def small_training(self, scale: str, preset: Preset, init: str, size: int, rate: str) -> Flags:
        flags = SMALL[scale] | ({"--lr": rate} if scale != "smoke" else {})
        return flags | ({"--lr-rampup": 0.01, "--ema": 0.05} if scale == "cifar10" and not init else {})

    def pack(self, checkpoint: Path, third_party: Path) -> tuple[dict[str, "Tensor"], dict[str, str]]:
        """The network `ema` of a snapshot; its constructor's arguments are kept beside the weights."""
        pickle = self.pickle(third_party)
        with checkpoint.open("rb") as file:
            net = pickle.load(file)["ema"]
        made = [type(net).__name__, list(net.init_args), dict(net.init_kwargs)]
        return net.state_dict(), {CONSTRUCTOR: json.dumps(made)}

    def unpack(self, state: dict[str, "Tensor"], kept: dict[str, str], checkpoint: Path, third_party: Path) -> None:
        """A snapshot, which --transfer reads."""
        pickle, net = self.pickle(third_party), self.build(state, kept, third_party)
        from ogdm_core.files import atomic_write

        with atomic_write(checkpoint) as file:
            pickle.dump({"ema": net}, file)

    def build(self, state: dict[str, "Tensor"], kept: dict[str, str], third_party: Path):
        """The network whose weights and constructor `pack` returned."""
        self.pickle(third_party)
        from training import networks

        name, args, keywords = json.loads(kept[CONSTRUCTOR])
        net = getattr(networks, name)(*args, **keywords).eval().requires_grad_(False)
        net.load_state_dict(state)
        return net


BACKBONE = Edm()
