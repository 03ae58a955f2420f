"""Tables 5 and 6 of the paper as data: what was trained how, and sampled how.

A preset names one row. The splice of its backbone expands it to a full command line.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """One row of Table 5. `projection`, `k` and `gamma` are None for a baseline."""

    name: str
    dataset: str  # cifar10 | celeba64 | lsun-church
    backbone: str  # adm | edm | ldm
    training: str  # baseline | scratch | finetune
    batch: int
    images: int  # images seen in training
    conditional: bool = False
    projection: str | None = None
    k: float | None = None
    gamma: float | None = None

    @property
    def ogdm(self) -> bool:
        return self.projection is not None

    @property
    def steps(self) -> int:
        """Optimiser steps: images seen over the batch size."""
        return round(self.images / self.batch)


M = 1_000_000
_EULER_FT = {"training": "finetune", "projection": "euler", "k": 0.2, "gamma": 0.025}
_EULER_SCRATCH = {"training": "scratch", "projection": "euler", "k": 0.1, "gamma": 0.01}

# `images`: Table 5 rounds ADM's to 38M and 2M; the exact numbers are 300k and 15k steps of 128.
_ROWS = (
    Preset("cifar10-adm-baseline", "cifar10", "adm", "baseline", 128, 300_000 * 128),
    Preset("cifar10-adm-ogdm", "cifar10", "adm", batch=128, images=300_000 * 128, **_EULER_SCRATCH),
    Preset("cifar10-adm-ogdm-ft", "cifar10", "adm", batch=128, images=15_000 * 128, **_EULER_FT),
    Preset("cifar10-edm-baseline", "cifar10", "edm", "baseline", 512, 200 * M),
    Preset("cifar10-edm-ogdm-ft", "cifar10", "edm", batch=512, images=20 * M, **_EULER_FT),
    Preset("cifar10-edm-ogdm-ft-heun", "cifar10", "edm", "finetune", 512, 20 * M,
           projection="heun", k=0.2, gamma=0.005),
    Preset("cifar10-edm-cond-baseline", "cifar10", "edm", "baseline", 512, 200 * M,
           conditional=True),
    Preset("cifar10-edm-cond-ogdm-ft", "cifar10", "edm", batch=512, images=20 * M,
           conditional=True, **_EULER_FT),
    Preset("celeba64-adm-baseline", "celeba64", "adm", "baseline", 128, 300_000 * 128),
    Preset("celeba64-adm-ogdm", "celeba64", "adm", batch=128, images=300_000 * 128,
           **_EULER_SCRATCH),
    Preset("celeba64-adm-ogdm-ft", "celeba64", "adm", batch=128, images=15_000 * 128, **_EULER_FT),
    Preset("lsun-church-ldm-baseline", "lsun-church", "ldm", "baseline", 96, 48 * M),
    Preset("lsun-church-ldm-ogdm-ft", "lsun-church", "ldm", "finetune", 96, 1_500_000,
           projection="euler", k=0.1, gamma=0.01),
)  # fmt: skip

PRESETS = {row.name: row for row in _ROWS}

# Table 6: (dataset, backbone) -> sampler -> discretisation.
DISCRETISATION = {
    ("cifar10", "adm"): {"euler": "quadratic", "s-pndm": "linear", "f-pndm": "linear"},
    ("cifar10", "edm"): {"euler": "karras", "heun": "karras", "s-pndm": "karras"},
    ("celeba64", "adm"): {"euler": "linear", "s-pndm": "linear", "f-pndm": "linear"},
    ("lsun-church", "ldm"): {"euler": "linear", "s-pndm": "quadratic", "f-pndm": "quadratic"},
}


def get_preset(name: str, backbone: str | None = None) -> Preset:
    """The preset of that name; the error lists the names there are."""
    known = [p.name for p in _ROWS if backbone in (None, p.backbone)]
    if name not in known:
        raise ValueError(f"unknown preset {name!r}; use one of {', '.join(known)}")
    return PRESETS[name]
