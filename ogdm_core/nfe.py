"""The names of the time grids, and what the samplers cost in network evaluations (NFE).

Needs no torch, so that a command can refuse a wrong name or NFE before it is imported.
"""

from dataclasses import dataclass

DISCRETISATIONS = ("linear", "quadratic", "trailing", "karras")


@dataclass(frozen=True)
class Cost:
    """NFE = per_step * N + extra, for N >= least steps."""

    per_step: int = 1
    extra: int = 0
    least: int = 1

    def nfe(self, steps: int) -> int:
        return self.per_step * steps + self.extra


SAMPLERS = {
    "euler": Cost(),
    "heun": Cost(per_step=2, extra=-1),
    "s-pndm": Cost(extra=1, least=2),
    "f-pndm": Cost(extra=9, least=4),
    "dpmpp-2m": Cost(),
    "unipc": Cost(),
    "stochastic": Cost(),
}


def cost_of(sampler: str) -> Cost:
    """What a sampler costs; raises for an unknown one."""
    if sampler not in SAMPLERS:
        raise ValueError(f"unknown sampler {sampler!r}; use one of {', '.join(SAMPLERS)}")
    return SAMPLERS[sampler]


def steps_for_nfe(sampler: str, nfe: int) -> int:
    """The number of steps N that costs exactly `nfe` network evaluations.

    Raises for an unknown sampler, and for an NFE that it cannot hit: names the nearest that it can.
    """
    s = cost_of(sampler)
    steps, rest = divmod(nfe - s.extra, s.per_step)
    if rest == 0 and steps >= s.least:
        return steps
    near = sorted({s.nfe(max(steps, s.least)), s.nfe(max(steps + 1, s.least))})
    if steps < s.least:
        near = near[:1]
    raise ValueError(
        f"{sampler} cannot run in {nfe} network evaluations; the nearest it can is " + " or ".join(map(str, near))
    )
