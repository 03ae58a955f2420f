"""Experiments as data: Tables 5 and 6 of the paper, the quickstart's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

QUICKSTART = Path(__file__).with_name("quickstart")


@dataclass(frozen=True)
class Preset:
    """One row of Table 5. `projection` is None without OGDM; with it, k and gamma of None are our defaults."""

    name: str  # DATASET-BACKBONE[-cond]-TRAINING
    dataset: str  # cifar10 | celeba64 | lsun-church
    training: str  # baseline | scratch | finetune
    batch: int
    images: int  # images seen in training
    projection: str | None = None
    k: float | None = None
    gamma: float | None = None

    @property
    def backbone(self) -> str:
        """The name of its backbone, a module of run.backbones."""
        return self.name.removeprefix(f"{self.dataset}-").partition("-")[0]

    @property
    def conditional(self) -> bool:
        """Trained with class labels. Table 5 lists such rows together with the others."""
        return "-cond-" in self.name

    @property
    def ogdm(self) -> bool:
        """Trained with observation guidance."""
        return self.projection is not None

    @property
    def steps(self) -> int:
        """Optimiser steps: images seen over the batch size."""
        return round(self.images / self.batch)

    @property
    def network(self) -> str:
        """What its name begins with, and all that start from the same baseline share."""
        return self.name.partition("-ogdm")[0].removesuffix("-baseline").removesuffix("-control")

    @property
    def baseline(self) -> str | None:
        """The preset whose weights a fine-tune starts from; None for the others."""
        return f"{self.network}-baseline" if self.training == "finetune" else None

    @property
    def control(self) -> Preset:
        """A fine-tune's control: the same training without OGDM."""
        return replace(self, name=f"{self.network}-control", projection=None, k=None, gamma=None)


M = 1_000_000
ADM, FT = 300_000 * 128, 15_000 * 128  # Table 5 rounds them to 38M and 2M
LDM = 1_500_000
_ROWS = (
    # name                       dataset        training    batch images  projection k   gamma
    ("cifar10-adm-baseline",      "cifar10",     "baseline", 128, ADM),
    ("cifar10-adm-ogdm",          "cifar10",     "scratch",  128, ADM,    "euler", 0.1, 0.01),
    ("cifar10-adm-ogdm-ft",       "cifar10",     "finetune", 128, FT,     "euler", 0.2, 0.025),
    ("cifar10-edm-baseline",      "cifar10",     "baseline", 512, 200 * M),
    ("cifar10-edm-ogdm-ft",       "cifar10",     "finetune", 512, 20 * M, "euler", 0.2, 0.025),
    ("cifar10-edm-ogdm-ft-heun",  "cifar10",     "finetune", 512, 20 * M, "heun",  0.2, 0.005),
    ("cifar10-edm-cond-baseline", "cifar10",     "baseline", 512, 200 * M),
    ("cifar10-edm-cond-ogdm-ft",  "cifar10",     "finetune", 512, 20 * M, "euler", 0.2, 0.025),
    ("celeba64-adm-baseline",     "celeba64",    "baseline", 128, ADM),
    ("celeba64-adm-ogdm",         "celeba64",    "scratch",  128, ADM,    "euler", 0.1, 0.01),
    ("celeba64-adm-ogdm-ft",      "celeba64",    "finetune", 128, FT,     "euler", 0.2, 0.025),
    ("lsun-church-ldm-baseline",  "lsun-church", "baseline", 96,  48 * M),
    ("lsun-church-ldm-ogdm-ft",   "lsun-church", "finetune", 96,  LDM,    "euler", 0.1, 0.01),
)  # fmt: skip

PRESETS = {row[0]: Preset(*row) for row in _ROWS}
# Not in the paper: each baseline, trained on for as long as its fine-tune.
CONTROLS = {p.control.name: p.control for p in PRESETS.values() if p.training == "finetune"}

# Table 6: DATASET-BACKBONE -> sampler -> discretisation. "default of Karras et al." is karras.
DISCRETISATION = {
    "cifar10-adm": {"euler": "quadratic", "s-pndm": "linear", "f-pndm": "linear"},
    "cifar10-edm": {"euler": "karras", "heun": "karras", "s-pndm": "karras"},
    "celeba64-adm": {"euler": "linear", "s-pndm": "linear", "f-pndm": "linear"},
    "lsun-church-ldm": {"euler": "linear", "s-pndm": "quadratic", "f-pndm": "quadratic"},
}


# What the quickstart trains and scores: per data set, the flags of each command. run/sweep.sh starts from them.
# model       the baseline that both fine-tunes start from
# baseline    flags of ogdm_core.diffusers that train such a baseline from scratch
# finetune    flags of ogdm_core.diffusers for both fine-tunes
# steps       length of each fine-tune
# samples     images per sampler and NFE
# times       time grid per cell, for both models, chosen by the seed 0 of a control (docs/lab/quickstart.md):
#             among linear and quadratic for Euler and PNDM, among all four otherwise. Cells that are not listed
#             use the model's grid.
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "mnist": {
        "model": QUICKSTART / "baseline-mnist",
        "baseline": {"channels": "8,16,32", "attention": 4, "scale_shift": True, "steps": 12000, "lr": 2e-3,
                     "anneal": True, "x0_weight": 5},
        "finetune": {"lr": 4e-4, "ema": 0.996, "anneal": True},
        "steps": 1200,
        "samples": 2500,
        "times": {"euler-25": "quadratic", "f-pndm-15": "quadratic", "f-pndm-25": "quadratic", "heun-11": "trailing",
                  "dpmpp-2m-5": "quadratic", "dpmpp-2m-10": "karras", "unipc-5": "quadratic", "unipc-10": "karras"},
    },
    "digits": {
        "model": QUICKSTART / "baseline-digits",
        "baseline": {"channels": "8,16", "steps": 8000, "lr": 8e-4},
        "finetune": {"lr": 1e-4, "ema": 0.995, "anneal": True},
        "steps": 2000,
        "samples": 2500,
        "times": {},
    },
}  # fmt: skip


def others() -> dict[str, Preset]:
    """Presets of codebases that the paper has not."""
    from run import backbones  # these import this module

    return {preset.name: preset for name in backbones.NAMES for preset in backbones.get(name).presets}


def get_preset(name: str) -> Preset:
    """The preset of that name; the error lists the names there are."""
    known = PRESETS | CONTROLS | others()
    if name not in known:
        raise ValueError(f"unknown preset {name!r}; use one of {', '.join(known)}")
    return known[name]


def discretisation_of(preset: Preset, sampler: str) -> str:
    """Table 6's time grid for a sampler on this preset's data set and backbone; linear where it names none."""
    return DISCRETISATION[f"{preset.dataset}-{preset.backbone}"].get(sampler, "linear")
