"""Measures single training steps: seconds by phase, peak memory, operations, evaluations.

A case has one or two kinds of step, since R1 is taken at every `r1_every`-th only; each kind is
measured by itself and weighs in the mean as often as it occurs.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ogdm_core.observer import Observer

from .cases import CASES, Case
from .trainers import Trainer, tensors

BASELINE = "baseline"


class Stopwatch:
    """Seconds by phase; a phase inside another takes its time from it.

    On CUDA the marks are events in the stream, so that measuring does not make the step wait.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks: list = []
        self.stack: list[str] = []

    def _mark(self, phase: str | None) -> None:
        if self.cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self.marks.append((now, phase))

    def enter(self, name: str) -> None:
        """Time counts for `name` from here."""
        self.stack.append(name)
        self._mark(name)

    def leave(self) -> None:
        """Time counts for the phase around the last one again."""
        self.stack.pop()
        self._mark(self.stack[-1] if self.stack else None)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """`enter` and `leave` around a block."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    @contextlib.contextmanager
    def listening(self, net: torch.nn.Module, observer: Observer | None) -> Iterator[None]:
        """Phases for what happens inside the observer: D's pass over the fakes, Heun's evaluation
        of the denoiser, D's optimiser.

        The backward half of D's pass runs inside the trainer's own, between the gradient's arrival
        at the scores and its departure from the images.
        """
        if observer is None:
            yield
            return
        inside: list[bool] = []

        def before(name: str):
            def hook(module, inputs):
                inside.append(self.stack[-1:] == ["observe"])
                if inside[-1]:
                    self.enter(name)

            return hook

        def answered(module, inputs, output):
            if inside.pop():
                self.leave()

        def scored(module, inputs, logit):
            if not inside.pop():
                return
            self.leave()
            if logit.requires_grad:
                logit.register_hook(lambda gradient: self.enter("d_fake"))
                inputs[0].register_hook(lambda gradient: self.leave())

        handles = [
            net.register_forward_pre_hook(before("denoiser")),
            net.register_forward_hook(answered),
            observer.D.register_forward_pre_hook(before("d_fake")),
            observer.D.register_forward_hook(scored),
            observer.optimizer.register_step_pre_hook(lambda *_: self.enter("optimisers")),
            observer.optimizer.register_step_post_hook(lambda *_: self.leave()),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase; `other` is what no phase claimed."""
        if self.cuda:
            torch.cuda.synchronize()
        spent: dict[str, float] = defaultdict(float)
        for (start, name), (end, _) in zip(self.marks, self.marks[1:], strict=False):
            elapsed = start.elapsed_time(end) / 1000 if self.cuda else end - start
            spent[name or "other"] += elapsed
        return dict(spent)


def silent(phase: str) -> contextlib.AbstractContextManager:
    """A phase that nobody times."""
    return contextlib.nullcontext()


@dataclass
class Subject:
    """What is measured: a case with its observer, or the baseline with neither."""

    name: str
    case: Case | None = None
    observer: Observer | None = None

    def kinds(self) -> dict[str, float]:
        """Kinds of step and how often each occurs: `plain`, and `r1` with the penalty."""
        if self.observer is None:
            return {"plain": 1.0}
        c = self.observer.config
        if c.r1 == 0:
            return {"plain": 1.0}
        if c.r1_every == 1:
            return {"r1": 1.0}
        return {"plain": 1 - 1 / c.r1_every, "r1": 1 / c.r1_every}


def subjects(trainer: Trainer, names: list[str], quick: bool = False) -> dict[str, Subject]:
    """The baseline, then the cases, all on one denoiser."""
    made = {BASELINE: Subject(BASELINE)}
    for name in names:
        made[name] = Subject(name, CASES[name], trainer.observer(CASES[name], quick))
    return made


def take_step(trainer: Trainer, subject: Subject, kind: str) -> dict[str, float]:
    """One training step of the wanted kind; its seconds by phase."""
    if subject.observer is not None:
        subject.observer.steps = 0 if kind == "r1" else 1
    watch = Stopwatch(trainer.device)
    if watch.cuda:
        torch.cuda.synchronize()
    with watch.listening(trainer.net, subject.observer), watch.phase("other"):
        trainer.step(subject.case, subject.observer, watch.phase)
    return watch.seconds()


def exercise(trainer: Trainer, observer: Observer, kind: str = "plain") -> None:
    """The observer's part of a step by itself, at the noisiest time, on a network's stand-in."""
    observer.steps = 0 if kind == "r1" else 1
    x_0, schedule = trainer.images, trainer.schedule
    eps = torch.randn(x_0.shape, generator=torch.Generator().manual_seed(0)).to(x_0)
    t = torch.full((len(x_0),), schedule.T, device=trainer.device)
    x_t = schedule.diffuse(x_0, eps, t)
    eps_t = eps.clone().requires_grad_()
    observer.observe(
        x_0=x_0, eps=eps, x_t=x_t, t=t, eps_t=eps_t, eps_fn=lambda x, t: eps_t
    ).sum().backward()
    observer.step(1.0)


# ---- operations, evaluations, memory ------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts floating-point operations by torch's own formulas.

    torch's FlopCounterMode uses the same, but also hooks modules, which the gradient of a gradient
    in R1 does not survive.
    """

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs or {}, out_val=out)
        return out


def count_step(trainer: Trainer, subject: Subject, kind: str) -> dict[str, float]:
    """Operations, evaluations an image and peak bytes of one step: the same every time.

    A forward pass of D over real and fake counts as two evaluations, a pass of the denoiser
    without gradients as one like any other.
    """
    counted: dict[str, float] = {"denoiser_forward": 0.0, "d_forward": 0.0, "d_calls": 0.0}
    n = trainer.size.batch

    def denoiser(module, inputs):
        counted["denoiser_forward"] += len(inputs[0]) / n

    def discriminator(module, inputs):
        counted["d_forward"] += len(inputs[0]) / n
        counted["d_calls"] += 1

    handles = [trainer.net.register_forward_pre_hook(denoiser)]
    if subject.observer is not None:
        handles.append(subject.observer.D.register_forward_pre_hook(discriminator))
    operations = Operations()
    try:
        with peak_memory(trainer, subject) as peak, operations:
            take_step(trainer, subject, kind)
    finally:
        for handle in handles:
            handle.remove()
    return {"flops": float(operations.flops), "peak_bytes": peak[0]} | counted


@contextlib.contextmanager
def peak_memory(trainer: Trainer, subject: Subject) -> Iterator[list[float]]:
    """Peak bytes of tensors while the block runs: state kept between steps and what a step adds.

    On CUDA the allocator knows. On a CPU its allocations and releases are replayed from a profile:
    unlike a process's resident memory this is the same in every run, is not blurred by what the
    process did before, and leaves out Python, torch itself and other cases' discriminators.
    """
    trainer.optimizer.zero_grad(set_to_none=True)
    state = trainer.state() + (tensors(subject.observer) if subject.observer else [])
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state}
    result = [float(sum(kept.values()))]
    if trainer.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield result
        result[0] += torch.cuda.max_memory_allocated() - before
        return
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        yield result
    result[0] += _highest(profile)


def _highest(profile: torch.profiler.profile) -> float:
    """The highest level that the profile's allocations reach above where they began, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    level = highest = 0.0
    for event in sorted(changes, key=lambda e: e["ts"]):
        level += event["args"]["Bytes"]
        highest = max(highest, level)
    return highest
