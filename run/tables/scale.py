"""What a table is made of: at the paper's scale its own rows, data and networks, else stand-ins.

`Scale` itself is `paper`, which changes nothing. The others are values of it or of a subclass:
smoke.py (do all commands run?), cpu.py (does the method work, on small networks?).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from run.train.commands import LDM_BASE, LDM_FINETUNE
from run.train.presets import Preset

from . import paper

NAMES = ("paper", "smoke", "cpu", "cpu-mnist")
CLASSIFIER = "classifier"
# What the paper leaves open about Table 7's guide.
GUIDE = {"--kind": "paper", "--width": 0.25, "--steps": 10_000}


@dataclass(frozen=True)
class Scale:
    """The paper's. A subclass says what takes the place of the rows' presets and flags."""

    name: str = "paper"
    title: str = ""  # stands in front of the table's own
    images: int = 50_000  # samples per cell
    seeds: tuple[int, ...] = (0,)
    data: str = ""  # digits | mnist, which come with a package; empty: the rows' own data sets
    size: int = 0  # of those images
    count: int = 0  # the first so many; 0: all
    mirrored: tuple[str, ...] = ()  # backbones that are compared with the mirrored images, too
    features: str = ""  # MODULE:NAME, or CLASSIFIER: a job trains it; empty: Inception
    controls: bool = False  # fine-tunes beside their controls, in place of the paper's rows
    gigabytes: float = 0.0  # what a run takes on a disk at most; 0: it is counted
    guide: Mapping[str, Any] = field(default_factory=GUIDE.copy)

    @property
    def small(self) -> bool:
        """Runs on a CPU in little time."""
        return bool(self.data)

    def table(self, number: int) -> paper.Table:
        """The rows there are."""
        return paper.table(number)

    def preset(self, preset: Preset) -> Preset:
        """The preset as it is trained."""
        return preset

    def training(self, preset: Preset, init: str, seed: int) -> dict[str, Any]:
        """Native flags in place of the preset's, for a training that starts from `init`."""
        return {}

    def ldm_configs(self, preset: Preset, init: str, own: Path) -> dict[str, Any]:
        """latent-diffusion's configs: upstream's, the fine-tune's, and `own` in the end."""
        tuned = [str(LDM_FINETUNE)] if preset.training == "finetune" else []
        start = {} if init else {"model.params.ckpt_path": "null"}
        return {"--base": (LDM_BASE, *tuned, str(own)), **start}

    def sampling(self, preset: Preset, images: int) -> dict[str, Any]:
        """Native flags in place of the preset's."""
        return {}

    def shipped(self, preset: Preset) -> Path | None:
        """Weights of a baseline that come with this repository."""
        return None


def get_scale(name: str) -> Scale:
    """The scale of that name."""
    from . import cpu, smoke

    return {scale.name: scale for scale in (Scale(), smoke.SMOKE, cpu.DIGITS, cpu.MNIST)}[name]
