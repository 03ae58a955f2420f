"""Is it working? A grid of samples, of the same noise each time, as a PNG and, where it is there, for TensorBoard."""

import contextlib
import os
from pathlib import Path

import torch
from torch import Tensor

from .files import atomic_write
from .images import to_uint8
from .random import generator_of
from .samplers import sample
from .schedule import Schedule
from .solvers import EpsFn

SIDE = 4  # images per row and column


def labels(classes: int) -> Tensor:
    """A label for each image of a grid, [SIDE^2], below `classes`."""
    return torch.arange(SIDE**2) % classes


@torch.no_grad()
def write(
    folder: str | os.PathLike, step: int, eps_fn: EpsFn, schedule: Schedule, shape: tuple[int, int, int], nfe: int,
    device: torch.device | str = "cpu",
) -> None:  # fmt: skip
    """Writes folder/grids/STEP.png, Euler's samples of shape [C, H, W] in `nfe` evaluations of the network.

    Draws from a generator of its own, so that a training goes on as it would have.
    """
    from PIL import Image

    noise = torch.randn((SIDE**2, *shape), generator=generator_of("grid")).to(device)
    x = to_uint8(sample(eps_fn, schedule.prior(noise), schedule, sampler="euler", nfe=nfe))
    rows = x.unflatten(0, (SIDE, SIDE)).permute(0, 3, 1, 4, 2).flatten(0, 1).flatten(1, 2)  # SIDE H, SIDE W, C
    grid = rows.numpy()
    with atomic_write(Path(folder, "grids", f"{step:06d}.png")) as file:
        Image.fromarray(grid[..., 0] if grid.shape[2] == 1 else grid).save(file, format="PNG")
    with contextlib.suppress(ImportError):
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(Path(folder, "tensorboard")) as board:
            board.add_image(f"samples, Euler {nfe}", grid, step, dataformats="HWC")
