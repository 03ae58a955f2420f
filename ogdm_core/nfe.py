"""The names of the time grids and of the samplers, and what these cost in network evaluations (NFE).

Needs no torch, so that a command can refuse a wrong name or NFE before it is imported.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

DISCRETISATIONS = ("linear", "quadratic", "trailing", "karras", "polynomial", "logsnr", "uniform")
RHOS = {"karras": 7.0, "polynomial": 7.0, "uniform": 2.0}  # the grids that have a power, and its default


@dataclass(frozen=True)
class Sampler:
    """A sampler's name in print, and how often its steps evaluate the network.

    each    evaluations per step
    first   evaluations of the first steps, which are followed by at least one other
    last    evaluations of the last step, where they differ
    order   the highest order, which is the default, where a lower one can be chosen
    """

    title: str
    each: int = 1
    first: tuple[int, ...] = ()
    last: int | None = None
    order: int | None = None

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
    "dpm-2": Sampler("DPM-Solver-2", each=2, last=1),
    "dpmpp-2m": Sampler("DPM-Solver++(2M)", order=2),
    "dpmpp-3m": Sampler("DPM-Solver++(3M)", order=3),
    "unipc": Sampler("UniPC", order=2),
    "unipc-3": Sampler("UniPC-3", order=3),
    "ipndm": Sampler("iPNDM", order=4),
    "deis": Sampler("DEIS-tAB", order=3),
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


def check_order(sampler: str, order: int | None) -> None:
    """Raises ValueError for an order that the sampler does not have."""
    most = SAMPLERS[sampler].order
    if order is None:
        return
    if most is None:
        known = ", ".join(name for name, s in SAMPLERS.items() if s.order)
        raise ValueError(f"{sampler} has one order only; leave the order out, or use one of {known}")
    if not 1 <= order <= most:
        raise ValueError(f"{sampler} has no order {order}; give 1 to {most}")


def check_rho(discretisation: Any, rho: float | None) -> None:
    """Raises ValueError for a rho that is no power, or beside a time grid that has none."""
    if rho is not None and not 0 < rho < float("inf"):
        raise ValueError(f"rho = {rho:g} is not allowed; give a number above 0")
    if rho is not None and (not isinstance(discretisation, str) or discretisation not in RHOS):
        name = discretisation if isinstance(discretisation, str) else "this time grid"
        raise ValueError(f"{name} has no rho; leave it out, or name one of {', '.join(RHOS)} as the time grid")
