"""One look for every picture: colours that colour-blind readers tell apart, grids, how to save.

Importing this module sets matplotlib up, without a display.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import torch
from torch import Tensor

from ogdm_core.images import to_uint8
from ogdm_core.nfe import SAMPLERS

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

# Okabe and Ito's palette.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PURPLE, GREY = "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#767676"
PALETTE = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

# Methods keep their colour in every picture. Anything else takes the next of PALETTE.
METHOD_COLOURS = {"baseline": GREY, "control": BLACK, "ogdm": BLUE, "ogdm (ft)": RED}
# Samplers keep their line.
SAMPLER_LINES = {"euler": "-", "heun": "--", "s-pndm": "-.", "f-pndm": ":", "dpmpp-2m": (0, (5, 1)),
                 "unipc": (0, (3, 1, 1, 1, 1, 1)), "stochastic": (0, (1, 3))}  # fmt: skip

matplotlib.rcParams.update({
    "axes.grid": True, "axes.prop_cycle": matplotlib.cycler(color=PALETTE),
    "axes.spines.right": False, "axes.spines.top": False, "axes.titlesize": 10,
    "figure.dpi": 130, "font.size": 9, "grid.alpha": 0.25, "image.cmap": "gray",
    "image.interpolation": "nearest", "legend.frameon": False, "lines.linewidth": 1.6,
    "lines.markersize": 4.5, "savefig.dpi": 130, "savefig.facecolor": "white",
})  # fmt: skip


def figure(*shape: int, size: tuple[float, float], **options):
    """`plt.subplots` in the house style: figure(rows, columns, size=(inches, inches))."""
    return plt.subplots(*shape, figsize=size, **options)


def method_colour(method: str, index: int = 0) -> str:
    """The method's own colour, or the index-th of the palette for a method not known here."""
    return METHOD_COLOURS.get(method.lower(), PALETTE[index % len(PALETTE)])


def sampler_name(sampler: str) -> str:
    """The sampler's name as the paper prints it."""
    return SAMPLERS[sampler].title if sampler in SAMPLERS else {"dg": "DG"}.get(sampler, sampler)


def tile(images: Tensor, columns: int, gap: int = 1) -> np.ndarray:
    """One picture in [0, 1], [H', W'] or [H', W', 3], of the images side by side, white between.

    images   [N, C, H, W] with C 1 or 3: uint8, or floats in [-1, 1]
    """
    n, channels, height, width = images.shape
    if channels not in (1, 3):
        raise ValueError(f"pictures need images with 1 or 3 channels, these have {channels}")
    rows = -(-n // columns)
    shape = (rows * (height + gap) - gap, columns * (width + gap) - gap, channels)
    canvas = np.ones(shape, dtype=np.float32)
    pixels = images if images.dtype == torch.uint8 else to_uint8(images)
    for i, image in enumerate(pixels.permute(0, 2, 3, 1).numpy() / 255):
        top, left = (i // columns) * (height + gap), (i % columns) * (width + gap)
        canvas[top : top + height, left : left + width] = image
    return canvas[..., 0] if channels == 1 else canvas


def show(ax, images: Tensor, columns: int, gap: int = 1, interpolation: str = "nearest") -> None:
    """Draws `tile(images)` on an axes without ticks."""
    ax.imshow(tile(images, columns, gap), vmin=0, vmax=1, cmap="gray", interpolation=interpolation)
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    ax.spines[:].set_visible(False)


def grid(fig, cells: Sequence[Sequence[Tensor]], columns: int, gap: int = 1) -> np.ndarray:
    """Draws batches of images, cells [R][C], each as a `tile`; returns the axes [R, C].

    fig   a figure or a part of one (`fig.subfigures`)
    """
    axes = fig.subplots(len(cells), len(cells[0]), squeeze=False)
    for ax, images in zip(axes.flat, [cell for row in cells for cell in row], strict=True):
        show(ax, images, columns, gap)
    return axes


def write_csv(path: Path, rows: Sequence[dict]) -> Path:
    """Rows of one kind as csv, floats with 10 digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.10g}" if isinstance(v, float) else v for k, v in row.items()})
    return path


def save(fig: Figure, path: str | Path, command: str, small_print: bool = True) -> Path:
    """Writes a PNG with the command that made it, as metadata and, cut to the room, in small print.

    Nothing in the file depends on the time or the machine, so the same command gives the same file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if small_print:
        room = int(fig.get_figwidth() / 0.043)  # inches per character at this size
        text = command if len(command) <= room else f"{command[: room - 3]} ..."
        fig.text(0.005, 0.003, text, fontsize=5, color=GREY, ha="left", va="bottom")
    fig.savefig(path, metadata={"Command": command, "Software": None})
    plt.close(fig)
    return path
