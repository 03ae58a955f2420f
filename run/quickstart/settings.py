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
    # time grid by cell, the one on which the baseline is best; the model's own where none is given
    times: Mapping[str, str] = field(default_factory=dict)


EXPERIMENTS = {
    "mnist": Experiment(
        "--channels 16,32,64 --attention 4 --scale-shift --steps 14000 --lr 1e-3 --anneal",
        HERE / "baseline-mnist", 700, 1000, "--lr 2e-4 --ema 0.995 --anneal", k=0.3,
        times={cell: "trailing" if cell == "heun-11" else "quadratic" for cell in (
            "euler-10", "euler-25", "s-pndm-10", "f-pndm-15", "f-pndm-25", "heun-11",
            "dpmpp-2m-5", "dpmpp-2m-10", "unipc-5", "unipc-10")},
    ),
    "digits": Experiment("--channels 8,16 --steps 8000 --lr 8e-4", HERE / "baseline-digits",
                         2000, 2500),
}  # fmt: skip
OGDM = {"ogdm_t_max": 0.7, "ogdm_d_kind": "light", "ogdm_fused": True}
GAMMA = {"nonsaturating": 0.06, "hinge": 0.03}  # by adversarial form


def fill_in(args: argparse.Namespace) -> None:
    """OGDM's settings above, where neither a flag nor a recipe gives others."""
    if args.ogdm_recipe is not None:
        return
    experiment = EXPERIMENTS.get(args.data, EXPERIMENTS["digits"])
    for name, value in (OGDM | {"ogdm_k": experiment.k}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
