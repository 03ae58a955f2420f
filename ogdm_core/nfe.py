"""The names of the time grids and of the samplers, and what these cost in network evaluations (NFE).

Needs no torch, so that a command can refuse a wrong name or NFE before it is imported.
"""

from bisect import bisect_left
from dataclasses import dataclass

DISCRETISATIONS = ("linear", "quadratic", "trailing", "karras")


@dataclass(frozen=True)
class Sampler:
    """A sampler's name in print, and how often its steps evaluate the network.

    each    evaluations per step
    first   evaluations of the first steps, which are followed by at least one other
    last    evaluations of the last step, where they differ
    """

    title: str
    each: int = 1
    first: tuple[int, ...] = ()
    last: int | None = None

    @property
    def least(self) -> int:
        """The smallest number of steps."""
        return len(self.first) + 1

    def evaluations(self, steps: int) -> list[int]:
        """The evaluations of each step, for at least `least` steps."""
        counts = [*self.first, *[self.each] * (steps - len(self.first))]
        return counts if self.last is None else [*counts[:-1], self.last]

    def nfe(self, steps: int) -> int:
        """The evaluations of all steps."""
        return sum(self.evaluations(steps))


SAMPLERS = {
    "euler": Sampler("Euler"),
    "heun": Sampler("Heun", each=2, last=1),
    "s-pndm": Sampler("S-PNDM", first=(2,)),
    "f-pndm": Sampler("F-PNDM", first=(4, 4, 4)),
    "dpmpp-2m": Sampler("DPM-Solver++(2M)"),
    "unipc": Sampler("UniPC"),
    "stochastic": Sampler("stochastic"),
}


def steps_for_nfe(sampler: str, nfe: int) -> int:
    """The number of steps N that costs exactly `nfe` network evaluations.

    Raises for an unknown sampler, and for an NFE that it cannot hit: names the nearest that it can.
    """
    if sampler not in SAMPLERS:
        raise ValueError(f"unknown sampler {sampler!r}; use one of {', '.join(SAMPLERS)}")
    s = SAMPLERS[sampler]
    possible = range(s.least, max(s.least, nfe) + 1)  # a step takes one evaluation or more
    steps = possible[bisect_left(possible, nfe, key=s.nfe)]
    if s.nfe(steps) == nfe:
        return steps
    near = [str(s.nfe(n)) for n in (steps - 1, steps) if n >= s.least]
    raise ValueError(f"{sampler} cannot run in {nfe} network evaluations; the nearest it can is {' or '.join(near)}")
