"""Scales: the paper's own data and networks, or small stand-ins for a CPU.

`Scale` itself is `paper`, which changes nothing. `smoke` runs every command of the paper's rows on tiny networks for a
few steps; its numbers mean nothing. The others ask whether the method works: each of the paper's fine-tunes, of a small
network on real images, stands below its control, the baseline trained on for as many steps without OGDM, everything
else equal. `cpu` and `cpu-mnist` have digits; CelebA has no counterpart there: it would be the same network on the same
digits. `cpu-cifar10` has CIFAR-10's photographs at 16x16. Beside Table 3's samplers stand two that the paper does not
have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from run import backbones
from run.presets import Preset

from . import paper

NAMES = ("paper", "smoke", "cpu", "cpu-mnist", "cpu-cifar10", "cpu-cifar10-32")
CLASSIFIER = "classifier"
# What the paper leaves open about Table 7's guide.
GUIDE = {"--kind": "paper", "--width": 0.25, "--steps": 10_000}
SHIPPED = Path(__file__).with_name("baselines")  # DATA-NETWORK.safetensors, as run.tables.baselines packs them


@dataclass(frozen=True)
class Scale:
    """The paper's. A subclass says what takes the place of the rows' presets and flags."""

    name: str = "paper"
    title: str = ""  # stands in front of the table's own
    images: int = 50_000  # samples per cell
    seeds: tuple[int, ...] = (0,)
    networks: str = ""  # smoke | cpu | cifar10, the backbones' small ones; empty: the rows' own
    data: str = ""  # digits | mnist, which come with a package; empty: the rows' own data sets
    size: int = 0  # of the images; 0: the rows' own
    count: int = 0  # the first so many; 0: all
    features: str = ""  # as --features of run/evaluate.sh, or CLASSIFIER: a job trains it; empty: Inception
    controls: bool = False  # fine-tunes beside their controls, in place of the paper's rows
    gigabytes: float = 0.0  # what a run takes on a disk at most; 0: it is counted
    guide: Mapping[str, Any] = field(default_factory=GUIDE.copy)

    @property
    def small(self) -> bool:
        """Runs on a CPU."""
        return bool(self.networks)

    @property
    def images_of(self) -> str:
        """What the images are called in a table; empty: as the rows' own data set."""
        return self.data if self.controls else ""

    def table(self, number: int) -> paper.Table:
        """The rows there are; those of ours have no data at the paper's scale."""
        table = paper.table(number)
        return replace(table, cells=()) if table.ours and not self.data else table

    def preset(self, preset: Preset) -> Preset:
        """The preset as it is trained."""
        return preset

    def training(self, preset: Preset, init: str, seed: int) -> dict[str, Any]:
        """Native flags in place of the preset's, for a training that starts from `init`."""
        return {}

    def sampling(self, preset: Preset, images: int) -> dict[str, Any]:
        """Native flags in place of the preset's."""
        backbone = backbones.get(preset.backbone)
        return backbone.small_sampling(self.networks, self.size, images) if self.networks else {}

    def evaluation(self, images: int) -> dict[str, Any]:
        """Further flags of run/evaluate.sh."""
        return {}

    def shipped(self, preset: Preset) -> Path | None:
        """Weights of a baseline that come with this repository."""
        return None


class Smoke(Scale):
    """Every row of the paper's, for three steps."""

    def preset(self, preset: Preset) -> Preset:
        batch, images = backbones.get(preset.backbone).small_images[self.networks]
        return replace(preset, batch=batch, images=images)

    def training(self, preset: Preset, init: str, seed: int) -> dict[str, Any]:
        backbone = backbones.get(preset.backbone)
        flags = backbone.small_training(self.networks, preset, init, self.size, "")
        return flags | (backbone.ogdm(d_width=0.02) if preset.ogdm else {})


class Cpu(Scale):
    """Fine-tunes and their controls."""

    TABLES: tuple[int, ...] = (1, 2, 3, 9, 10)
    DATASETS: tuple[str, ...] = ("cifar10", "lsun-church")  # of the paper, whose rows have a counterpart
    NFES: Mapping[str, tuple[int, ...]] = {
        "euler": (25, 10, 5), "heun": (25, 11), "s-pndm": (25, 10), "f-pndm": (25, 20), "stochastic": (50, 25, 10),
    }  # fmt: skip
    OTHERS: Mapping[str, tuple[int, ...]] = {"dpmpp-2m": (10, 5), "unipc": (10, 5)}  # that the paper does not have
    FINETUNE_STEPS = 1_000
    BASELINE_RATE, FINETUNE_RATE = "1e-3", "2e-4"

    def table(self, number: int) -> paper.Table:
        table = super().table(number)
        if number not in self.TABLES:
            return replace(table, cells=())
        if table.ours:
            return table
        table = paper.with_controls(table, self.NFES, self.DATASETS)
        pndm = dict.fromkeys(cell.row for cell in table.cells if cell.sampler == "s-pndm")
        more = (
            replace(table.select(row)[0], row=row.replace("s-pndm", sampler), sampler=sampler, nfe=nfe, fid_text=None,
                    recall_text=None)
            for sampler, nfes in self.OTHERS.items() for row in pndm for nfe in nfes
        )  # fmt: skip
        return replace(table, cells=(*table.cells, *more))

    def network(self, preset: Preset) -> str:
        """The name of its baseline."""
        return f"{self.data}-{preset.backbone}" + "-cond" * preset.conditional

    def preset(self, preset: Preset) -> Preset:
        batch, images = backbones.get(preset.backbone).small_images[self.networks]
        if preset.training != "baseline":
            images = batch * self.FINETUNE_STEPS
        return replace(preset, batch=batch, images=images, k=None, gamma=None)

    def training(self, preset: Preset, init: str, seed: int) -> dict[str, Any]:
        backbone = backbones.get(preset.backbone)
        rate = self.FINETUNE_RATE if init else self.BASELINE_RATE
        flags = backbone.small_training(self.networks, preset, init, self.size, rate)
        return flags | (backbone.ogdm(d_kind="light", fused=True, seed=seed) if preset.ogdm else {})

    def shipped(self, preset: Preset) -> Path | None:
        file = SHIPPED / f"{self.network(preset)}.safetensors"
        return file if preset.training == "baseline" and file.is_file() else None


class CpuCifar10(Cpu):
    """The same on CIFAR-10's own images, made smaller."""

    TABLES = (1, 3, 9)
    DATASETS = ("cifar10",)
    NFES = {"euler": (25, 10, 5), "s-pndm": (10,), "stochastic": (25, 10)}
    FINETUNE_STEPS = 2_000

    def evaluation(self, images: int) -> dict[str, Any]:
        """Real images against real ones where there are twice as many of them."""
        return {"--pr-images": max(5_000, images)} | ({"--floor": None} if images <= 25_000 else {})

    @property
    def images_of(self) -> str:
        return f"CIFAR-10 {self.size}x{self.size}"

    def network(self, preset: Preset) -> str:
        return f"cifar10-{self.size}" + super().network(preset)


SMOKE = Smoke(
    name="smoke",
    title="SMOKE RUN: tiny networks, a few steps, a few digits. These numbers mean nothing but "
    "that the pipeline works",
    images=16, networks="smoke", data="digits", size=32, count=96, features="run.tables.stand_in:random_features",
    gigabytes=1.0, guide={"--steps": 3, "--batch-size": 8},
)  # fmt: skip
TITLE = "CPU SCALE: small networks on {} at {}x{}"
CPU_DIGITS = Cpu(
    name="cpu", title=TITLE.format("scikit-learn's digits", 8, 8), images=2_500, seeds=(0, 1, 2),
    networks="cpu", data="digits", size=8, features=CLASSIFIER, controls=True, gigabytes=2.0,
)  # fmt: skip
CPU_MNIST = replace(
    CPU_DIGITS, name="cpu-mnist", data="mnist", size=16, title=TITLE.format("5,000 of MNIST's digits", 16, 16)
)
CPU_CIFAR10 = CpuCifar10(
    name="cpu-cifar10", images=5_000, seeds=(0, 1, 2), networks="cifar10", size=16, features="lite0,lite0-64",
    title=TITLE.format("CIFAR-10", 16, 16),
    controls=True, gigabytes=4.0,
)  # fmt: skip
CPU_CIFAR10_32 = replace(
    CPU_CIFAR10, name="cpu-cifar10-32", size=32, title=CPU_CIFAR10.title.replace("16x16", "32x32"), gigabytes=6.0
)
SCALES = {s.name: s for s in (Scale(), SMOKE, CPU_DIGITS, CPU_MNIST, CPU_CIFAR10, CPU_CIFAR10_32)}


def get_scale(name: str) -> Scale:
    """The scale of that name."""
    return SCALES[name]
