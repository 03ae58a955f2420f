"""One look for every picture: colours that colour-blind readers tell apart, and how to save.

Importing this module sets matplotlib up, without a display.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path

import matplotlib

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
SAMPLER_LINES = {
    "euler": "-",
    "heun": "--",
    "s-pndm": "-.",
    "f-pndm": ":",
    "stochastic": (0, (1, 3)),
}
SAMPLER_NAMES = {
    "euler": "Euler",
    "heun": "Heun",
    "s-pndm": "S-PNDM",
    "f-pndm": "F-PNDM",
    "stochastic": "stochastic",
}

RC = {
    "axes.grid": True,
    "axes.prop_cycle": matplotlib.cycler(color=PALETTE),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.dpi": 130,
    "font.size": 9,
    "grid.alpha": 0.25,
    "image.cmap": "gray",
    "image.interpolation": "nearest",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "savefig.dpi": 130,
    "savefig.facecolor": "white",
}
matplotlib.rcParams.update(RC)

LARGEST = 300_000  # bytes: what a picture in the repository may weigh


def figure(*shape: int, size: tuple[float, float], **options):
    """`plt.subplots` in the house style: figure(rows, columns, size=(inches, inches))."""
    return plt.subplots(*shape, figsize=size, **options)


def method_colour(method: str, index: int = 0) -> str:
    """The method's own colour, or the index-th of the palette for a method not known here."""
    return METHOD_COLOURS.get(method.lower(), PALETTE[index % len(PALETTE)])


def sampler_name(sampler: str) -> str:
    """The sampler's name as the paper prints it."""
    return SAMPLER_NAMES.get(sampler, sampler)


def command_line(script: str, arguments: Sequence[str]) -> str:
    """The command that repeats a picture, as one line that a shell understands."""
    return shlex.join([script, *arguments])


def save(fig: Figure, path: str | Path, command: str, small_print: bool = True) -> Path:
    """Writes a PNG that carries the command that made it: as metadata, and in small print, cut
    where there is no room.

    Nothing in the file depends on the time or the machine, so the same command gives the same file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if small_print:
        room = int(fig.get_figwidth() / 0.043)  # inches a character takes at this size
        text = command if len(command) <= room else f"{command[: room - 3]} ..."
        fig.text(0.005, 0.003, text, fontsize=5, color=GREY, ha="left", va="bottom")
    fig.savefig(path, metadata={"Command": command, "Software": None})
    plt.close(fig)
    if path.stat().st_size > LARGEST:
        warnings.warn(
            f"{path} has {path.stat().st_size // 1000} KB; the repository takes pictures up to "
            f"{LARGEST // 1000} KB. Use fewer images to commit it.",
            stacklevel=2,
        )
    return path
