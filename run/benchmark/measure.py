"""Measures training steps: what can be counted, and seconds, in turn with the plain step's.

A case has one or two kinds of step, since R1 is taken at every `r1_every`-th only; each kind is
measured by itself and weighs in the mean as often as it occurs.
"""

import contextlib
from collections.abc import Iterator
from itertools import accumulate
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ogdm_core.observer import Observer

from .cases import CASES
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
    """The plain step and the observed steps of some cases, on one network."""

    def __init__(self, trainer: Trainer, names: list[str], quick: bool = False):
        self.trainer, self.clock = trainer, clock(trainer.device)
        self.observers = {n: trainer.observer(CASES[n].config(quick)) for n in names}
        self.kinds = {BASELINE: {"plain": 1.0}} | {n: CASES[n].kinds() for n in names}

    def take(self, name: str, kind: str) -> None:
        """One step of that kind."""
        observer = self.observers.get(name)
        if observer is not None:
            observer.steps = 0 if kind == "r1" else 1  # R1 is taken at multiples of r1_every
        self.trainer.step(observer, name != BASELINE and CASES[name].naive)

    def count(self, name: str, memory: bool = True) -> dict[str, float]:
        """Operations, evaluations per image and, with `memory`, peak bytes: the same in every run.

        Operations and evaluations are means over steps with and without R1; memory is the larger
        of the two. A pass of D over real and fake images counts as two evaluations.
        """
        found = dict.fromkeys(("flops", "denoiser_forward", "d_forward", "d_calls"), 0.0)
        net, observer, peaks = self.trainer.net, self.observers.get(name), []

        def evaluated(module, inputs):
            images = share * len(inputs[0]) / self.trainer.batch
            found["denoiser_forward" if module is net else "d_forward"] += images
            found["d_calls"] += 0 if module is net else share

        with contextlib.ExitStack() as hooks:
            for module in (net, observer.D) if observer else (net,):
                hooks.enter_context(module.register_forward_pre_hook(evaluated))
            for kind, share in self.kinds[name].items():
                watch = peak_memory(self.trainer, observer, peaks)
                with watch if memory else contextlib.nullcontext(), Operations() as operations:
                    self.take(name, kind)
                found["flops"] += share * operations.flops
        return found | ({"peak_bytes": max(peaks)} if memory else {})

    def round(self, number: int) -> Iterator[dict[str, Any]]:
        """Timed steps of every case: {"case", "kind", "seconds", "beside": the plain step's}.

        `beside` is the mean of the plain steps before and after, so that a machine that becomes
        slower or busier affects both. The order rotates; lazy R1 is timed in every second round.
        """
        names = list(self.observers)
        names = names[number % len(names) :] + names[: number % len(names)]
        before = self._seconds(BASELINE, "plain")
        for name, kind in [(n, k) for n in names for k in self.kinds[n]]:
            if self.kinds[name][kind] < 0.5 and number % 2:
                continue
            seconds, after = self._seconds(name, kind), self._seconds(BASELINE, "plain")
            beside = (before + after) / 2
            yield {"case": name, "kind": kind, "seconds": seconds, "beside": beside}
            before = after

    def _seconds(self, name: str, kind: str) -> float:
        start = self.clock()
        self.take(name, kind)
        return self.clock() - start


@contextlib.contextmanager
def peak_memory(trainer: Trainer, observer: Observer | None, peaks: list[int]) -> Iterator[None]:
    """Adds to `peaks` the most bytes that tensors had: kept between steps, and added in the block.

    CUDA's allocator reports the rise. On a CPU it comes from the allocations in a profile: unlike
    the resident memory of the process, it is the same in every run and leaves out torch itself and
    other cases' discriminators.
    """
    owners = [trainer, observer] if observer else [trainer]
    modules = [trainer.net, trainer.ema, *(o.D for o in owners[1:])]
    kept = [trainer.x_0, trainer.eps]
    kept += [t for module in modules for t in (*module.parameters(), *module.buffers())]
    kept += [t for o in owners for state in o.optimizer.state.values() for t in state.values()]
    storages = [t.untyped_storage() for t in kept if isinstance(t, Tensor)]
    base = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    if trainer.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield
        peaks.append(base + torch.cuda.max_memory_allocated() - before)
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        yield
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    peaks.append(base + max(accumulate((e.nbytes() for e in events), initial=0)))


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
        evaluations = {n: found[n] for n in ("denoiser_forward", "d_forward", "d_calls")}
        cases[name] = case = {
            "evaluations": evaluations, "flops_ratio": found["flops"] / baseline["flops"],
        }  # fmt: skip
        if "peak_bytes" in found:
            case["memory_ratio"] = found["peak_bytes"] / baseline["peak_bytes"]
        shares = CASES[name].kinds()
        ratios = {kind: [t["seconds"] / t["beside"] for t in timings
                         if (t["case"], t["kind"]) == (name, kind)] for kind in shares}  # fmt: skip
        if all(ratios.values()):
            main = max(shares, key=lambda kind: shares[kind])
            rare = sum(share * median(ratios[k]) for k, share in shares.items() if k != main)
            values = [shares[main] * ratio + rare for ratio in ratios[main]]
            case |= {"ratio": median(values), "quartiles": quartiles(values),
                     "seconds": median(values) * baseline["seconds"]}  # fmt: skip
    return {"baseline": baseline, "cases": cases}
