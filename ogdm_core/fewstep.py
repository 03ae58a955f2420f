"""Few-step sampling behind the upstream scripts: flags and their checks, noise by image, npz files.

Flags that contradict each other end the script with a usage error (exit code 2) when they are
parsed, on every backbone.
"""

import argparse
import functools
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from .cli import time_grid, typed
from .distributed import gather, print_once, rank
from .files import atomic_write, check_writable
from .grids import check_solver, grid_option
from .nfe import DISCRETISATIONS, RHOS, SAMPLERS, steps_for_nfe
from .schedule import Schedule
from .trust import trust_option

NFE = 10  # of --sampler without --nfe
FLAGS: dict[str, dict[str, Any]] = {
    "sampler": {"choices": tuple(SAMPLERS), "metavar": "NAME",
                "help": f"{', '.join(SAMPLERS)}; without it upstream's own sampler runs"},
    "nfe": {"type": int, "metavar": "INT",
            "help": f"network evaluations per image, with --sampler (default: {NFE})"},
    "discretization": {
             "type": time_grid, "metavar": "NAME|FILE",
             "help": f"time grid, with --sampler: {', '.join(DISCRETISATIONS)}, or a FILE of run/solvers.sh --search "
                     "(default: linear; EDM: karras)"},
    "rho": {"type": float, "metavar": "FLOAT",
            "help": f"power of the time grid (default: {', '.join(f'{n} {rho:g}' for n, rho in RHOS.items())})"},
    "order": {"type": int, "metavar": "INT",
              "help": "order of ipndm (1 to 4), deis, dpmpp-3m, unipc-3 (1 to 3), dpmpp-2m, unipc (1 or 2) "
                      "(default: the highest)"},
    "eta": {"type": float, "metavar": "FLOAT",
            "help": "noise of the stochastic sampler: 0 is euler, 1 is DDPM's (default: 1)"},
    "seed": {"type": int, "metavar": "INT",
             "help": "with --sampler, image i is made from (seed, i), whatever the batch size"},
    "npz": {"metavar": "FILE",
            "help": "also write all images to this file, as ADM's evaluator reads them"},
    "guide": {"metavar": "FILE",
              "help": "guide that corrects the score (see run/guidance.sh), with --sampler"},
    "guide_weight": {"type": float, "metavar": "FLOAT",
                     "help": "weight of the guidance (default: 1)"},
}  # fmt: skip


SPELLINGS = {"discretization": ["--discretisation", "--grid"]}  # beside a flag's own


def solver_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """How to sample, of the flags above, as `samplers.sample` takes it."""
    grid = values["grid"] or "karras" if "grid" in values else values["discretization"]  # EDM's, and others'
    return {name: values[name] for name in ("sampler", "nfe", "rho", "order")} | {"discretisation": grid}


def check(values: MutableMapping[str, Any], our_flags: list[str], upstream_flags: list[str]) -> None:
    """Fills in --nfe's default, and raises ValueError for flags that contradict each other.

    our_flags        flags above that were given, as in --nfe
    upstream_flags   flags of upstream's own sampler that were given, as in --steps
    """
    guide = values.get("guide")
    if guide is None and values.get("guide_weight") is not None:
        raise ValueError("--guide-weight needs --guide")
    if guide is not None and not os.path.isfile(guide):
        raise ValueError(f"--guide: there is no file {guide}; `run/guidance.sh train` makes one")
    for name in ("batch_size", "num_samples", "n_samples"):
        if values.get(name) is not None and values[name] < 1:
            raise ValueError(f"--{name}: {values[name]} is not allowed; give at least 1")
    if values.get("npz"):
        try:
            check_writable(values["npz"])
        except OSError as error:
            raise ValueError(f"--npz: cannot write {values['npz']} ({error})") from error
    eta = values.get("eta")
    if eta is not None and not 0 <= eta <= 1:
        raise ValueError(f"--eta: {eta:g} is not allowed; give a number in [0, 1]")
    if not values["sampler"]:
        if needy := [flag for flag in our_flags if flag != "--npz"]:
            raise ValueError(f"{', '.join(needy)} needs --sampler, as in --sampler euler --nfe 10")
        return
    values["nfe"] = NFE if values["nfe"] is None else values["nfe"]
    check_solver(**solver_of(values))
    if upstream_flags:
        raise ValueError(
            f"{', '.join(upstream_flags)} steers upstream's own sampler; leave it out with --sampler, "
            "or leave --sampler out"
        )


def add_arguments(
    parser: argparse.ArgumentParser, names: Sequence[str], own: Sequence[str] = (), **defaults: Any
) -> None:
    """Adds the flags `names` to a parser, which then checks them whenever it parses.

    own        destinations of upstream's flags that are refused beside --sampler
    defaults   of our flags, where they are not None
    """
    group = parser.add_argument_group("few-step sampling")
    for name in names:
        group.add_argument(f"--{name}", *SPELLINGS.get(name, []), default=defaults.get(name), **FLAGS[name])
    parse = parser.parse_known_args

    def parse_and_check(*args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
        namespace, rest = parse(*args, **kwargs)

        def given(dests: Iterable[str]) -> list[str]:
            return [f"--{n}" for n in dests if getattr(namespace, n) != parser.get_default(n)]

        try:
            check(namespace.__dict__, given(names), given(own))
        except ValueError as error:
            parser.error(str(error))
        return namespace, rest

    parser.parse_known_args = parse_and_check  # type: ignore[method-assign]


def click_options(
    names: Sequence[str], own: Sequence[str] = (), samplers: Sequence[str] = tuple(SAMPLERS)
) -> Callable[[Callable], Callable]:
    """The same as a decorator of a click command, for the samplers that it offers."""
    import click

    def decorate(main: Callable) -> Callable:
        @functools.wraps(main)
        def run(**kwargs: Any) -> Any:
            context = click.get_current_context()
            typed = click.core.ParameterSource.COMMANDLINE

            def given(dests: Iterable[str]) -> list[str]:
                chosen = [p for p in context.command.params if p.name in dests]
                return [p.opts[0] for p in chosen if context.get_parameter_source(p.name) is typed]

            if kwargs["sampler"] and not given(["rho"]):
                kwargs["rho"] = None  # upstream's default is for its own time steps
            try:
                check(kwargs, given(names), given(own))
            except ValueError as error:
                raise click.UsageError(str(error)) from error
            return main(**kwargs)

        for name in reversed(names):
            spec = dict(FLAGS["discretization" if name == "grid" else name])  # the first is upstream's, on EDM
            if name == "sampler":
                spec |= {"choices": samplers, "metavar": "|".join(samplers)}
            if choices := spec.pop("choices", None):
                spec["type"] = click.Choice(choices)
            if spec.get("type") is time_grid:
                spec["type"] = typed(grid_option, click.BadParameter)
            run = click.option(f"--{name.replace('_', '-')}", **spec)(run)
        return trust_option(run)

    return decorate


def check_grid(schedule: Schedule, values: Mapping[str, Any]) -> None:
    """Ends the script where the schedule has fewer times than the sampler takes steps, or other ones than a file."""
    solver = solver_of(values)
    steps, grid = steps_for_nfe(solver["sampler"], solver["nfe"]), solver["discretisation"]
    own = isinstance(grid, Mapping)
    try:
        schedule.times(steps, grid if own else None)
    except ValueError as error:
        message = f"--grid: {error}" if own else f"--nfe: {error}; give a lower one"
        raise SystemExit(message if rank() == 0 else 2) from error


def normal(generators: Iterable[Generator], shape: Sequence[int]) -> Tensor:
    """Standard normal noise [N, *shape], each image's from its own generator."""
    return torch.stack([torch.randn(tuple(shape), generator=g) for g in generators])


def labels(generators: Iterable[Generator], classes: int) -> Tensor:
    """Uniform labels [N] below `classes`, each image's from its own generator."""
    return torch.stack([torch.randint(classes, (), generator=g) for g in generators])


def to_uint8(x: Tensor) -> np.ndarray:
    """Images [N, C, H, W] in [-1, 1] as uint8 [N, H, W, C].

    Truncated as in latent-diffusion's own script, whose files these equal bit for bit;
    `ogdm_core.images.to_uint8` rounds.
    """
    x = ((x + 1) * 127.5).clamp(0, 255).to(torch.uint8)
    return x.permute(0, 2, 3, 1).cpu().numpy()


def write_npz(path: str, images: np.ndarray, labels: np.ndarray | None = None) -> None:
    """arr_0 uint8 [N, H, W, 3] and, with labels, arr_1 int64 [N]; whole or not at all.

    Grey images become RGB, which is what an evaluator's network takes.
    """
    images = images.repeat(3, axis=3) if images.shape[3] == 1 else images
    with atomic_write(path) as file:
        np.savez(file, *([images] if labels is None else [images, labels.astype(np.int64)]))


class Collection:
    """The images of all ranks in one npz, in the order of `seeds`."""

    def __init__(self, path: str, seeds: list[int]):
        self.path, self.seeds = path, seeds
        self.made: dict[int, tuple[np.ndarray, int | None]] = {}

    def add(self, seeds: Tensor, images: np.ndarray, class_labels: Tensor | None) -> None:
        """Takes one batch: images uint8 [N, H, W, C], labels one-hot or None."""
        numbers = [None] * len(images) if class_labels is None else class_labels.argmax(1).tolist()
        self.made |= zip(seeds.tolist(), zip(images, numbers, strict=True), strict=True)

    def write(self) -> None:
        """Rank 0 writes what all ranks made; every rank must call."""
        made = {seed: image for part in gather(self.made) for seed, image in part.items()}
        images, numbers = zip(*(made[seed] for seed in self.seeds), strict=True)
        if rank() == 0:
            write_npz(self.path, np.stack(images), None if None in numbers else np.array(numbers))
        print_once(f'Wrote {len(images)} images to "{self.path}".')
