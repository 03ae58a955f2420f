"""A time grid of one's own: few steps that end where many steps end, from the same noise. No training, no data."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ogdm_core.random import generator_of
from ogdm_core.schedule import Schedule
from run.sampling import Network

IMAGES = 64  # that the distance is the mean over
TEACHER = {"sampler": "heun", "nfe": 99, "discretisation": "polynomial"}  # the many steps


def grid_of(schedule: Schedule, times: Sequence[float], **notes: Any) -> dict[str, Any]:
    """Times as a grid's file has them."""
    return {"schedule": type(schedule).__name__, "T": float(schedule.T), "times": list(times)} | notes


def distance_to_many_steps(network: Network, sampler: str, nfe: int, seed: int) -> Callable[[Sequence[float]], float]:
    """The distance of a grid's times: root mean square over pixels, mean over images."""
    noise = torch.randn((IMAGES, *network.shape), generator=generator_of(seed, "search"))

    def draw(**solver: Any) -> Tensor:
        return torch.cat(list(network.latents(noise, batch=IMAGES, **solver)))

    goal = draw(**TEACHER)

    def distance(times: Sequence[float]) -> float:
        x = draw(sampler=sampler, nfe=nfe, discretisation=grid_of(network.schedule, times))
        return float((x - goal).flatten(1).square().mean(1).sqrt().mean())

    return distance


def improve(
    schedule: Schedule, times: Sequence[float], distance: Callable[[Sequence[float]], float], tries: int, seed: int
) -> tuple[list[float], float, float]:
    """The best of `tries` grids, its distance, and the distance of the one to start from.

    A (1+1) evolution strategy on the steps in log sigma: all of them are scaled at random, about as much
    as lets one try in five succeed. The first time stays, and so does the data at the end.
    """
    generator = generator_of(seed, "grid")
    levels = [math.log(float(schedule.sigma(torch.tensor([t])))) for t in times[:-1]]
    lowest = math.log(schedule.levels()[0])
    gaps = torch.tensor([a - b for a, b in pairwise(levels)], dtype=torch.float64)
    best, first = list(times), distance(times)
    least, width = first, 0.3
    for _ in range(tries if len(gaps) else 0):
        noise = torch.randn(len(gaps), generator=generator, dtype=torch.float64)
        tried = gaps * (width * noise).exp()
        sigma = (levels[0] - torch.cat([torch.zeros(1), tried.cumsum(0)])).clamp(min=lowest).exp()
        grid = [times[0], *schedule.ascending_levels(sigma.flip(0))[-2::-1]]
        fell = all(t > u for t, u in pairwise(grid))
        found = distance(grid) if fell and grid != best else math.inf
        width *= 1.5 if found < least else 1.5**-0.25
        width = max(width, 0.02)
        if found < least:
            best, least, gaps = grid, found, tried
    return best, least, first
