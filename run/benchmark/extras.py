"""What else must stay small: sampling, imports, the observer's own bookkeeping, checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from ogdm_core.config import OGDMConfig
from ogdm_core.observer import Observer
from ogdm_core.samplers import sample

from .measure import exercise
from .rounds import quartiles
from .trainers import ROOT, Trainer

NFE = 4


def sampling(trainer: Trainer, observer: Observer, repeats: int = 3) -> dict:
    """One image by Euler's method, with a plain network and with one that observation trained.

    Both are the same class with other weights; the discriminator has no part in sampling, which
    its count of evaluations shows.
    """
    trained = trainer.eps_fn()
    shape = (1, 3, trainer.size.resolution, trainer.size.resolution)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(trainer.device)
    x_T = trainer.schedule.prior(noise)
    calls = {"denoiser": 0, "d": 0}

    def count(name: str):
        def hook(module, inputs):
            calls[name] += 1

        return hook

    weights = {name: p.clone() for name, p in trainer.ema.state_dict().items()}
    observed = trainer.net.state_dict()
    seconds: dict[str, list[float]] = {"plain": [], "ogdm": []}
    evaluations: dict[str, dict[str, int]] = {}
    handles = [trainer.ema.register_forward_pre_hook(count("denoiser")),
               observer.D.register_forward_pre_hook(count("d"))]  # fmt: skip
    try:
        for i in range(repeats + 1):
            order = ("plain", "ogdm") if i % 2 else ("ogdm", "plain")
            for name in order:
                trainer.ema.load_state_dict(weights if name == "plain" else observed)
                calls.update(denoiser=0, d=0)
                took = _seconds(
                    lambda: sample(trained, x_T, trainer.schedule, sampler="euler", nfe=NFE),
                    trainer.device,
                )
                evaluations[name] = dict(calls)
                if i:  # the first turn warms up
                    seconds[name].append(took)
    finally:
        trainer.ema.load_state_dict(weights)
        for handle in handles:
            handle.remove()
    ratios = [o / p for o, p in zip(seconds["ogdm"], seconds["plain"], strict=True)]
    return {
        "nfe": NFE,
        "evaluations": evaluations,
        "seconds": {name: median(values) for name, values in seconds.items()},
        "ratio": median(ratios),
        "quartiles": quartiles(ratios),
    }


def import_time(repeats: int = 3) -> dict:
    """Seconds of `import ogdm_core` once torch is imported, each in a new process."""
    code = (
        "import time, torch; start = time.perf_counter(); import ogdm_core; "
        "print(time.perf_counter() - start)"
    )
    taken = []
    for _ in range(repeats):
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True,
                              text=True, check=True)  # fmt: skip
        taken.append(float(done.stdout))
    return {"seconds_beyond_torch": median(taken), "quartiles": quartiles(taken)}


class _Nothing(nn.Module):
    """A discriminator without cost: one weight."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, t: Tensor, s: Tensor, label=None, parts: int = 1) -> Tensor:
        return self.weight * x[:, 0, 0, 0]


def bookkeeping(trainer: Trainer, baseline_seconds: float, repeats: int = 30) -> dict:
    """Lookahead, projection, losses and statistics: an observer whose D costs nothing."""
    observer = Observer(
        OGDMConfig(), trainer.schedule, 3, trainer.size.resolution, device=trainer.device,
        build=_Nothing,
    )  # fmt: skip
    taken = [
        _seconds(lambda: exercise(trainer, observer), trainer.device) for _ in range(repeats + 3)
    ][3:]
    return {
        "seconds": median(taken),
        "quartiles": quartiles(taken),
        "share_of_step": median(taken) / baseline_seconds,
    }


def checkpoint(observer: Observer, repeats: int = 3) -> dict:
    """Writes the observer's state as a trainer does: to a new file that then replaces the old."""
    taken, size = [], 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "observer.pt"
        part = path.with_suffix(".part")
        for _ in range(repeats):
            start = time.perf_counter()
            torch.save(observer.state_dict(), part)
            os.replace(part, path)
            taken.append(time.perf_counter() - start)
        size = path.stat().st_size
    return {"seconds": median(taken), "quartiles": quartiles(taken), "bytes": size,
            "parameters": sum(p.numel() for p in observer.D.parameters())}  # fmt: skip


def _seconds(work, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
