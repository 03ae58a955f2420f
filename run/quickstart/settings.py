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
    k: float = 0.35
    gamma: float = 0.06  # hinge: half of it
    t_max: float = 0.7
    # time grid by cell: the baseline's best, for Euler, S-PNDM and F-PNDM of linear and quadratic
    # only; the model's own where none is given
    times: Mapping[str, str] = field(default_factory=dict)
    ogdm_times: Mapping[str, str] = field(default_factory=dict)  # where OGDM is best on another


EXPERIMENTS = {
    "mnist": Experiment(
        "--channels 8,16,32 --attention 4 --scale-shift --steps 9000 --lr 2e-3 --anneal",
        HERE / "baseline-mnist", 1000, 2500, "--lr 2e-4 --ema 0.995 --anneal",
        k=0.3, gamma=0.08, t_max=0.45,
        times={"heun-11": "karras", "unipc-10": "karras"} | dict.fromkeys(
            ("euler-10", "euler-25", "s-pndm-10", "f-pndm-15", "f-pndm-25", "dpmpp-2m-5",
             "unipc-5"), "quadratic"),
        ogdm_times={"heun-11": "trailing", "dpmpp-2m-10": "quadratic", "unipc-10": "quadratic"},
    ),
    "digits": Experiment("--channels 8,16 --steps 8000 --lr 8e-4", HERE / "baseline-digits",
                         2000, 2500),
}  # fmt: skip
OGDM = {"ogdm_d_kind": "light", "ogdm_fused": True}


def fill_in(args: argparse.Namespace) -> None:
    """OGDM's settings above, where neither a flag nor a recipe gives others."""
    if args.ogdm_recipe is not None:
        return
    experiment = EXPERIMENTS.get(args.data, EXPERIMENTS["digits"])
    gamma = experiment.gamma / (2 if args.ogdm_adversarial == "hinge" else 1)
    values = OGDM | {"ogdm_k": experiment.k, "ogdm_gamma": gamma, "ogdm_t_max": experiment.t_max}
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
