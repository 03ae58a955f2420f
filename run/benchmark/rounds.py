"""Interleaved timing that cancels drift, and the ratios drawn from it.

A round takes the cases in turn, with a step of the baseline before and after each; a case's ratio
is its step over the mean of those two neighbours. Rounds rotate the order, and add up over runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median, quantiles

from .cases import CASES
from .measure import BASELINE, Subject, exercise, take_step
from .trainers import Trainer

R1_EVERY = 2  # rounds between timings of a lazy R1's step, which weighs little
PHASES = ("denoiser", "d_fake", "d_real", "r1", "optimisers", "other")
PHASE_NAMES = {
    "denoiser": "denoiser",
    "d_fake": "D on fake",
    "d_real": "D on real",
    "r1": "R1",
    "optimisers": "optimisers, EMA",
    "other": "lookahead, projection, rest",
}


@dataclass
class Timing:
    """One timed step: its seconds by phase and the baseline's total around it."""

    kind: str
    phases: dict[str, float]
    beside: float

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def ratio(self) -> float:
        return self.seconds / self.beside


@dataclass
class Timings:
    """All timings so far, by case."""

    cases: dict[str, list[Timing]] = field(default_factory=dict)
    baseline: list[dict[str, float]] = field(default_factory=list)
    rounds: int = 0

    def count(self, name: str, kind: str) -> int:
        """How often a kind of step of a case was timed."""
        return sum(t.kind == kind for t in self.cases.get(name, []))

    def to_dict(self) -> dict:
        """Plain values."""
        cases = {
            name: [{"kind": t.kind, "phases": t.phases, "beside": t.beside} for t in timings]
            for name, timings in self.cases.items()
        }
        return {"rounds": self.rounds, "baseline": self.baseline, "cases": cases}

    @classmethod
    def from_dict(cls, values: dict) -> Timings:
        """From `to_dict`."""
        cases = {name: [Timing(**t) for t in ts] for name, ts in values["cases"].items()}
        return cls(cases, values["baseline"], values["rounds"])


def plan(subjects: dict[str, Subject], timings: Timings) -> list[tuple[str, str]]:
    """(case, kind of step) in the order of the next round.

    The order rotates, and what an interrupted round did not come to goes first.
    """
    number = timings.rounds
    names = [name for name in subjects if name != BASELINE]
    names = names[number % len(names) :] + names[: number % len(names)]
    if number % 2:
        names.reverse()
    steps = [
        (name, kind)
        for name in names
        for kind, weight in subjects[name].kinds().items()
        if weight > 0.5 or number % R1_EVERY == 0 or not timings.count(name, kind)
    ]
    return sorted(steps, key=lambda step: timings.count(*step))


def run_round(
    trainer: Trainer, subjects: dict[str, Subject], timings: Timings
) -> Iterator[tuple[str, str]]:
    """One round of timed steps, added to `timings` one by one; yields before each step."""

    def baseline() -> float:
        timings.baseline.append(take_step(trainer, subjects[BASELINE], "plain"))
        return sum(timings.baseline[-1].values())

    yield BASELINE, "plain"
    before = baseline()
    for name, kind in plan(subjects, timings):
        yield name, kind
        phases = take_step(trainer, subjects[name], kind)
        yield BASELINE, "plain"
        after = baseline()
        timing = Timing(kind, phases, (before + after) / 2)
        timings.cases.setdefault(name, []).append(timing)
        before = after
    timings.rounds += 1


def warm_up(
    trainer: Trainer, subjects: dict[str, Subject], done: set[str]
) -> Iterator[tuple[str, str]]:
    """Untimed work of the shapes to come, so that libraries choose and build their kernels.

    One step of the baseline, and each kind of D alone; nothing for subjects in `done`.
    """
    seen = set()
    for subject in subjects.values():
        if subject.name in done:
            continue
        for kind in subject.kinds():
            if subject.observer is None:
                yield subject.name, kind
                take_step(trainer, subject, kind)
                continue
            c = subject.observer.config
            if (key := (c.d_kind, c.d_width, c.d_precision, c.fused, kind)) not in seen:
                seen.add(key)
                yield subject.name, kind
                exercise(trainer, subject.observer, kind)


def quartiles(values: list[float]) -> list[float]:
    """The first and the third quartile."""
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = quantiles(values, n=4, method="inclusive")
    return [first, third]


def summarise(name: str, timings: Timings, kinds: dict[str, float]) -> dict:
    """Ratio to the baseline's step with its quartiles, seconds, and where the time goes.

    `phases` are in units of the baseline's step and add up to the ratio.
    """
    of = {k: [t for t in timings.cases[name] if t.kind == k] for k in kinds}
    main = max(kinds, key=kinds.get)
    rest = {k: w for k, w in kinds.items() if k != main}
    rare = sum(w * median(t.ratio for t in of[k]) for k, w in rest.items())
    ratios = [kinds[main] * t.ratio + rare for t in of[main]]
    ratio = median(ratios)
    phases = _phases(name, timings, of, kinds)
    scale = ratio / sum(phases.values())
    return {
        "ratio": ratio,
        "quartiles": quartiles(ratios),
        "samples": len(ratios),
        "seconds": ratio * median(sum(b.values()) for b in timings.baseline),
        "phases": {phase: scale * phases.get(phase, 0.0) for phase in PHASES},
    }


def _phases(name: str, timings: Timings, of: dict[str, list[Timing]], kinds: dict) -> dict:
    """Shares of each phase in baseline steps, with D's own step told apart.

    Real and fake go through D's step in one batch and take half of it each; fused, only the real
    ones do. R1 is what a step with it takes longer than one without.
    """

    def typical(ts: list[Timing], phase: str) -> float:
        return median(t.phases.get(phase, 0.0) / t.beside for t in ts)

    case = CASES[name]
    plain = of.get("plain") or [
        t for t in timings.cases.get(case.without or "", []) if t.kind == "plain"
    ]
    found = {
        phase: sum(w * typical(of[k], phase) for k, w in kinds.items())
        for phase in ("denoiser", "d_fake", "optimisers", "observe", "other", "d_step")
    }
    step = typical(plain, "d_step") if plain else found["d_step"]
    on_real = step if case.settings.get("fused") else step / 2
    return {
        "denoiser": found["denoiser"],
        "d_fake": found["d_fake"] + step - on_real,
        "d_real": on_real,
        "r1": max(0.0, found["d_step"] - step),
        "optimisers": found["optimisers"],
        "other": found["observe"] + found["other"],
    }
