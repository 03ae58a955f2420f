"""Figure 1 of the paper for any pair of models, and the number that it shows by eye.

The same noise, solved with ever more network evaluations, should lead to the same image. Drift is
how far it does not: for features phi and NFE n, with n* the finest,

    drift(n) = mean_i |phi(x_i^n) - phi(x_i^{n*})|

and relative drift divides by the mean distance of two different samples, mean |phi(x_i^{n*}) -
phi(x_j^{n*})|: 0 is the same image, 1 is as far as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import style
from .features import Features
from .images import show
from .sources import Method


@dataclass(frozen=True)
class Row:
    """One line of the picture: a method, a sampler, and its NFEs, ascending."""

    method: Method
    sampler: str
    nfes: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.method.name} +\n{style.sampler_name(self.sampler)}"


def parse_rows(specs: Sequence[str], methods: Sequence[Method], nfes: Sequence[int]) -> list[Row]:
    """METHOD:SAMPLER[:NFE,NFE,...] each; without its own NFEs a row takes the picture's."""
    from ogdm_core.samplers import steps_for_nfe

    known = {method.name: method for method in methods}
    rows = []
    for spec in specs:
        name, sampler, *own = spec.split(":")
        if name not in known:
            raise ValueError(f"--row {spec!r}: no --method {name!r}; there is {', '.join(known)}")
        chosen = tuple(map(int, own[0].split(","))) if own else tuple(nfes)
        if len(chosen) < 2 or list(chosen) != sorted(set(chosen)):
            raise ValueError(f"--row {spec!r}: NFEs must be two or more and ascend, not {chosen}")
        if len(chosen) != len(nfes):
            raise ValueError(f"--row {spec!r}: give {len(nfes)} NFEs, as many as --nfe has")
        for nfe in chosen:
            steps_for_nfe(sampler, nfe)
        rows.append(Row(known[name], sampler, chosen))
    return rows


def draw_rows(rows: Sequence[Row], noise: Tensor) -> list[list[Tensor]]:
    """Images [row][nfe] of the same noise."""
    cells = [[row.method.draw(noise, nfe, row.sampler) for nfe in row.nfes] for row in rows]
    shapes = {tuple(images.shape) for line in cells for images in line}
    if len(shapes) > 1:
        raise ValueError(f"the rows' images have different shapes: {sorted(shapes)}")
    return cells


def drift(images: Sequence[Tensor], features: Features) -> tuple[list[float], list[float]]:
    """Drift and relative drift of each of `images` (NFE ascending) from the last."""
    phi = [features(x).double() for x in images]
    finest = phi[-1]
    if len(finest) < 2:
        raise ValueError("drift needs at least 2 images")
    spread = torch.pdist(finest).mean()
    absolute = [float((x - finest).norm(dim=1).mean()) for x in phi]
    return absolute, [value / float(spread) for value in absolute]


def drift_rows(rows: Sequence[Row], cells: Sequence[Sequence[Tensor]], features: Features):
    """One dict per row and NFE, for csv."""
    out = []
    for row, images in zip(rows, cells, strict=True):
        for nfe, absolute, relative in zip(row.nfes, *drift(images, features), strict=True):
            out.append({
                "method": row.method.name, "sampler": row.sampler, "nfe": nfe,
                "finest_nfe": row.nfes[-1], "drift": absolute, "relative_drift": relative,
                "images": len(images[0]),
            })  # fmt: skip
    return out


def draw(
    rows: Sequence[Row],
    cells: Sequence[Sequence[Tensor]],
    numbers: Sequence[dict],
    path: Path,
    command: str,
    images: int = 2,
) -> Path:
    """The picture: a strip of NFEs per row and noise, drift beside it."""
    columns = len(rows[0].nfes)
    _, _, height, width = cells[0][0].shape
    strip = 0.95 * columns * (width + 1) / height
    same = len({row.nfes for row in rows}) == 1
    gap = 0.06 if same else 0.32  # rows with NFEs of their own are labelled one by one
    fig = style.plt.figure(figsize=(strip * images + 4.6, 0.9 * (1 + gap) * len(rows) + 0.95))
    outer = fig.add_gridspec(1, 2, width_ratios=[strip * images, 3.4], wspace=0.12, left=0.075,
                             right=0.985, top=0.86, bottom=0.17)  # fmt: skip
    inner = outer[0].subgridspec(len(rows), images, hspace=gap, wspace=0.07)
    for r, row in enumerate(rows):
        for i in range(images):
            ax = fig.add_subplot(inner[r, i])
            show(ax, torch.stack([x[i] for x in cells[r]]), columns)
            if i == 0:
                ax.set_ylabel(row.label, fontsize=8, color=style.method_colour(row.method.name, r))
            if r == 0 or not same:
                centres = np.arange(columns) * (width + 1) + (width - 1) / 2
                ax.xaxis.tick_top()
                ax.set_xticks(centres, [str(nfe) for nfe in row.nfes])
                ax.tick_params(length=0, pad=1, labelsize=8)
            if r == 0 and i == 0:
                ax.set_title("NFE", loc="left", fontsize=8, pad=14)
    _drift_panel(fig.add_subplot(outer[1]), rows, numbers)
    return style.save(fig, path, command)


def _drift_panel(ax, rows: Sequence[Row], numbers: Sequence[dict]) -> None:
    numbers = iter(numbers)
    for r, row in enumerate(rows):
        line = [next(numbers) for _ in row.nfes][:-1]  # the finest is 0 by definition
        ax.plot(
            [n["nfe"] for n in line], [n["relative_drift"] for n in line],
            color=style.method_colour(row.method.name, r),
            ls=style.SAMPLER_LINES.get(row.sampler, "-"), marker=style.MARKERS[r % 7],
            label=row.label.replace("\n", " "),
        )  # fmt: skip
    ticks = rows[0].nfes[:-1]  # other rows' NFEs lie close to these, and would print over them
    ax.set_xscale("log")
    ax.set_xticks(ticks, [str(nfe) for nfe in ticks])
    ax.xaxis.set_minor_locator(style.matplotlib.ticker.NullLocator())
    finest = {row.nfes[-1] for row in rows}
    ax.set(
        title=f"drift from NFE {'/'.join(map(str, sorted(finest)))} (1: another image)",
        xlabel="NFE",
        ylim=(0, None),
    )
    ax.legend(fontsize=8)
