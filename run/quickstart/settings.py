"""What the quickstart trains and scores: per data set, the flags of each command. run/sweep.sh starts from them."""

from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

# model       the baseline that both fine-tunes start from
# baseline    flags of ogdm_core.diffusers that train such a baseline from scratch
# finetune    flags of ogdm_core.diffusers for both fine-tunes
# steps       length of each fine-tune
# samples     images per sampler and NFE
# ogdm        settings of the OGDM fine-tune; the hinge form has half of gamma
# unsplit     the same for another projection than split
# times       time grid per cell, chosen by the control's seed 0: among linear and quadratic for Euler and PNDM,
#             among all four otherwise. Cells that are not listed use the model's grid.
# ogdm_times  cells for which OGDM's seed 0 is best on another grid
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "mnist": {
        "model": HERE / "baseline-mnist",
        "baseline": {
            "channels": "8,16,32",
            "attention": 4,
            "scale_shift": True,
            "steps": 12000,
            "lr": 2e-3,
            "anneal": True,
            "x0_weight": 5,
        },
        "finetune": {"lr": 4e-4, "x0_weight": 100, "ema": 0.996, "anneal": True},
        "steps": 1200,
        "samples": 2500,
        "ogdm": {"projection": "split", "k": 0.3, "gamma": 0.15, "t_max": 0.85, "d_kind": "light", "fused": True},
        "unsplit": {"k": 0.3, "gamma": 0.08, "t_max": 0.45, "d_kind": "light", "fused": True},
        "times": {
            "euler-25": "quadratic",
            "f-pndm-15": "quadratic",
            "f-pndm-25": "quadratic",
            "heun-11": "trailing",
            "dpmpp-2m-5": "quadratic",
            "dpmpp-2m-10": "karras",
            "unipc-5": "quadratic",
            "unipc-10": "karras",
        },
        "ogdm_times": {"dpmpp-2m-10": "quadratic", "unipc-10": "quadratic"},
    },
    "digits": {
        "model": HERE / "baseline-digits",
        "baseline": {"channels": "8,16", "steps": 8000, "lr": 8e-4},
        "finetune": {"lr": 1e-4, "ema": 0.995, "anneal": True},
        "steps": 2000,
        "samples": 2500,
        "ogdm": {"k": 0.35, "gamma": 0.06, "t_max": 0.7, "d_kind": "light", "fused": True},
        "times": {},
        "ogdm_times": {},
    },
}
