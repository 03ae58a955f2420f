"""What the quickstart trains and scores, by data set. The sweep takes its defaults from here."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
FINETUNE = "--lr 1e-4 --ema 0.995 --anneal"


@dataclass(frozen=True)
class Experiment:
    """What differs between the data sets."""

    baseline: str  # flags that train the baseline from scratch
    shipped: Path  # a baseline of this kind
    steps: int  # of each fine-tune
    samples: int  # per sampler and NFE
    finetune: str = FINETUNE  # flags of both fine-tunes
    # OGDM's settings; gamma is halved for the hinge form
    ogdm: Mapping[str, object] = field(default_factory=lambda: {"k": 0.35, "gamma": 0.06, "t_max": 0.7})
    # time grid by cell: the one on which the control's first seed is best, for Euler, S-PNDM and
    # F-PNDM of linear and quadratic only; the model's own where none is given
    times: Mapping[str, str] = field(default_factory=dict)
    ogdm_times: Mapping[str, str] = field(default_factory=dict)  # where OGDM's is best on another


EXPERIMENTS = {
    "mnist": Experiment(
        "--channels 8,16,32 --attention 4 --scale-shift --steps 12000 --lr 2e-3 --anneal "
        "--x0-weight 5",
        HERE / "baseline-mnist", 1200, 2500, "--lr 4e-4 --x0-weight 100 --ema 0.996 --anneal",
        ogdm={"projection": "split", "k": 0.3, "gamma": 0.15, "t_max": 0.85},
        times=dict.fromkeys(
            ("euler-25", "f-pndm-15", "f-pndm-25", "dpmpp-2m-5", "unipc-5"), "quadratic",
        ) | {"heun-11": "trailing", "dpmpp-2m-10": "karras", "unipc-10": "karras"},
        ogdm_times={"dpmpp-2m-10": "quadratic", "unipc-10": "quadratic"},
    ),
    "digits": Experiment("--channels 8,16 --steps 8000 --lr 8e-4", HERE / "baseline-digits",
                         2000, 2500),
}  # fmt: skip
OGDM = {"d_kind": "light", "fused": True}
UNSPLIT = {"k": 0.3, "gamma": 0.08, "t_max": 0.45}  # MNIST's with another projection than split


def experiment_of(args: argparse.Namespace) -> Experiment:
    """The data's own; for other data the digits'."""
    return EXPERIMENTS.get(args.data, EXPERIMENTS["digits"])


def fill_in(args: argparse.Namespace) -> None:
    """OGDM's settings above, where neither a flag nor a recipe gives others."""
    if args.ogdm_recipe is not None:
        return
    ogdm = experiment_of(args).ogdm
    if "projection" in ogdm and args.ogdm_projection not in (None, ogdm["projection"]):
        ogdm = UNSPLIT
    for name, value in (OGDM | ogdm).items():
        if name == "gamma" and args.ogdm_adversarial == "hinge":
            value /= 2
        if getattr(args, f"ogdm_{name}") is None:
            setattr(args, f"ogdm_{name}", value)
