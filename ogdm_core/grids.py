"""A time grid of one's own: a small JSON file, as `run/solvers.sh --search` writes it.

    {"schedule": "DiscreteVP", "T": 1000, "times": [1000, 640, 310, 90, 20, 0], ...}

`times` falls from the noise to the data, 0. Other entries are notes. Needs no torch.
"""

import json
import math
import os
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from .nfe import DISCRETISATIONS, check_order, check_rho, steps_for_nfe


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_grid(path: str | os.PathLike) -> dict[str, Any]:
    """The grid in a file; raises ValueError for what is none, whatever the schedule."""
    try:
        with open(path, encoding="utf-8") as file:
            grid = json.load(file)
    except FileNotFoundError:
        known = ", ".join(DISCRETISATIONS)
        raise ValueError(f"{path} is no time grid, and no such file exists; give a file, or one of {known}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no readable JSON file ({error})") from error
    times = grid.get("times") if isinstance(grid, dict) else None
    if not isinstance(times, list) or len(times) < 2 or not all(map(is_number, times)):
        raise ValueError(f'{path} is no time grid: "times" must list the times from the noise to the data, 0')
    if "schedule" not in grid or not is_number(grid.get("T")):
        raise ValueError(f'{path} is no time grid: it must name its "schedule", and the noisiest time "T"')
    for t, u in pairwise(times):
        if not t > u:
            raise ValueError(f"{path}: times must fall, and {u:g} follows {t:g}")
    if times[-1] != 0:
        raise ValueError(f"{path}: times must end at the data, 0, not at {times[-1]:g}")
    return grid | {"file": str(path)}


def grid_option(text: str) -> str | dict[str, Any]:
    """The type of a flag with a time grid: one of DISCRETISATIONS, or what a file holds."""
    return text if text in DISCRETISATIONS else read_grid(text)


def times_of(grid: Mapping[str, Any], steps: int) -> list[float]:
    """The grid's times, if they are N = `steps` steps."""
    if len(grid["times"]) != steps + 1:
        name = grid.get("file", "the time grid")
        raise ValueError(f"{name} has {len(grid['times']) - 1} steps; this sampler and NFE take {steps}")
    return list(grid["times"])


def fitting_times(grid: Mapping[str, Any], steps: int, schedule: str, T: float, whole: bool) -> list[float]:
    """The grid's times, if they are N = `steps` steps of this schedule, which takes whole times or any."""
    name = grid.get("file", "the time grid")
    if grid["schedule"] != schedule or not math.isclose(grid["T"], T):
        raise ValueError(f"{name} is for {grid['schedule']} with T = {grid['T']:g}; this model has {schedule}, {T:g}")
    times = times_of(grid, steps)
    if whole and (times[0] > T or any(t != int(t) for t in times)):
        raise ValueError(f"{name}: times must be whole and at most T = {T:g}, as those of the model are")
    if not whole and not math.isclose(times[0], T):
        raise ValueError(f"{name}: times must begin at T = {T:g}, where the noise is, not at {times[0]:g}")
    return [int(t) for t in times] if whole else times


def check_solver(sampler: str, nfe: int, discretisation: Any, rho: float | None, order: int | None) -> None:
    """Raises ValueError, which names the flag, for what the sampler or the time grid cannot take."""
    grid = discretisation or "the model's own time grid"
    for flag, wrong in {
        "nfe": lambda: steps_for_nfe(sampler, nfe),
        "order": lambda: check_order(sampler, order),
        "rho": lambda: check_rho(grid, rho),
        "grid": lambda: isinstance(grid, str) or times_of(grid, steps_for_nfe(sampler, nfe)),
    }.items():
        try:
            wrong()
        except ValueError as error:
            raise ValueError(f"--{flag}: {error}") from error
