"""Measures training steps: what can be counted, and seconds, in turn with the plain step's.

A case has one or two kinds of step, since R1 is taken at every `r1_every`-th only; each kind is
measured by itself and weighs in the mean as often as it occurs.
"""

import contextlib
from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ogdm_core.observer import Observer

from .flags import CASES
from .step import Trainer, clock

BASELINE = "baseline"


class Operations(TorchDispatchMode):
    """Counts floating-point operations by torch's own formulas.

    torch's FlopCounterMode uses the same, but also hooks modules, which the gradient of a gradient
    in R1 does not survive.
    """

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **kwargs or {}, out_val=out)
        return out


class Steps:
    """The plain step and the observed steps of some cases, on one network.

    With `shapes`, steps are counted on tensors without content: at any size, in no time.
    """

    def __init__(self, trainer: Trainer, names: list[str], shapes: bool = False):
        self.trainer, self.clock = trainer, clock(trainer.device)
        self.kinds = {BASELINE: {"plain": 1.0}} | {n: CASES[n].kinds() for n in names}
        self.observers: dict[str, Observer] = {}
        self.mode = FakeTensorMode(allow_non_fake_inputs=True) if shapes else contextlib.nullcontext()
        with self.mode:
            trainer.step()  # Adam makes its state in a first step

    def take(self, name: str, kind: str) -> None:
        """One step of that kind."""
        observer = self._observer(name)
        if observer is not None:
            observer.steps = 0 if kind == "r1" else 1  # R1 is taken at multiples of r1_every
        self.trainer.step(observer, name != BASELINE and CASES[name].naive)

    def count(self, name: str) -> dict[str, float]:
        """Operations, evaluations per image and, on a GPU, peak bytes: the same in every run.

        Operations and evaluations are means over steps with and without R1; memory is the larger of
        the two, with this case's D alone. A pass of D over real and fake images counts as two
        evaluations.
        """
        found = dict.fromkeys(("flops", "denoiser_forward", "d_forward"), 0.0)
        self.observers.clear()
        net, observer = self.trainer.net, self._observer(name)
        cuda = self.trainer.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()

        def evaluated(module, inputs):
            found["denoiser_forward" if module is net else "d_forward"] += share * len(inputs[0]) / self.trainer.batch

        with contextlib.ExitStack() as hooks:
            for module in (net, observer.D) if observer else (net,):
                hooks.enter_context(module.register_forward_pre_hook(evaluated))
            hooks.enter_context(mock.patch.object(Observer, "_check_times"))  # shapes alone have no values
            for kind, share in self.kinds[name].items():
                with self.mode, Operations() as operations:
                    self.take(name, kind)
                found["flops"] += share * operations.flops
        self.observers.clear()
        return found | ({"peak_bytes": torch.cuda.max_memory_allocated()} if cuda else {})

    def round(self, number: int) -> Iterator[dict[str, Any]]:
        """Timed steps of every case: {"case", "kind", "seconds", "beside": the plain step's}.

        `beside` is the mean of the plain steps before and after, so that a machine that becomes
        slower or busier affects both. The order rotates; lazy R1 is timed in every second round.
        """
        names = [name for name in self.kinds if name != BASELINE]
        names = names[number % len(names) :] + names[: number % len(names)]
        before = self._seconds(BASELINE, "plain")
        for name, kind in [(n, k) for n in names for k in self.kinds[n]]:
            if self.kinds[name][kind] < 0.5 and number % 2:
                continue
            self._observer(name)  # is not made while the clock runs
            seconds, after = self._seconds(name, kind), self._seconds(BASELINE, "plain")
            yield {"case": name, "kind": kind, "seconds": seconds, "beside": (before + after) / 2}
            before = after

    def _observer(self, name: str) -> Observer | None:
        if name != BASELINE and name not in self.observers:
            self.observers[name] = self.trainer.observer(CASES[name].config)
        return self.observers.get(name)

    def _seconds(self, name: str, kind: str) -> float:
        start = self.clock()
        self.take(name, kind)
        return self.clock() - start


def quartiles(values: list[float]) -> list[float]:
    """The first and the third quartile."""
    first, _, third = quantiles(values * 2 if len(values) == 1 else values, n=4, method="inclusive")
    return [first, third]


def summarise(counts: dict[str, dict], timings: list[dict]) -> dict[str, Any]:
    """{"baseline": ..., "cases": {name: ratios to it}} from what was counted and timed so far."""
    baseline: dict[str, Any] = dict(counts[BASELINE])
    if timings:
        plain = [t["beside"] for t in timings]
        baseline |= {"seconds": median(plain), "quartiles": quartiles(plain)}
    cases: dict[str, dict[str, Any]] = {}
    for name, found in counts.items():
        if name == BASELINE:
            continue
        cases[name] = case = {
            "evaluations": {n: found[n] for n in ("denoiser_forward", "d_forward")},
            "flops_ratio": found["flops"] / baseline["flops"],
        }
        if "peak_bytes" in found:
            case["memory_ratio"] = found["peak_bytes"] / baseline["peak_bytes"]
        shares = CASES[name].kinds()
        ratios = {
            kind: [t["seconds"] / t["beside"] for t in timings if (t["case"], t["kind"]) == (name, kind)]
            for kind in shares
        }
        if all(ratios.values()):
            main = max(shares, key=shares.get)
            rare = sum(share * median(ratios[k]) for k, share in shares.items() if k != main)
            values = [shares[main] * ratio + rare for ratio in ratios[main]]
            ratio = median(values)
            case |= {"ratio": ratio, "quartiles": quartiles(values), "seconds": ratio * baseline["seconds"]}
    return {"baseline": baseline, "cases": cases}
