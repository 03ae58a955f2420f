"""Figure 1 of the paper for any pair of models, and the number that it shows by eye.

The same noise, solved with ever more network evaluations, should lead to the same image. Drift is
how far it does not: for features phi and NFE n, with n* the finest,

    drift(n) = mean_i |phi(x_i^n) - phi(x_i^{n*})|

and relative drift divides by the mean distance of two different samples, mean |phi(x_i^{n*}) -
phi(x_j^{n*})|: 0 is the same image, 1 is as far as any other.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ogdm_core.nfe import steps_for_nfe

from . import style
from .samples import Method, feature_net, load_method, shared_noise


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


def drift(images: Sequence[Tensor], features: Callable[[Tensor], Tensor]) -> tuple[list[float], list[float]]:
    """Drift and relative drift of each of `images` (NFE ascending) from the last."""
    phi = [features(x).double() for x in images]
    finest = phi[-1]
    if len(finest) < 2:
        raise ValueError("drift needs at least 2 images")
    spread = float(torch.pdist(finest).mean())
    absolute = [float((x - finest).norm(dim=1).mean()) for x in phi]
    return absolute, [value / spread for value in absolute]


def run(args: argparse.Namespace, command: str) -> list[Path]:
    """Prints the drift; writes drift.csv and fig1.png."""
    methods = [load_method(text, args.device) for text in args.method]
    specs = args.row or [f"{m.name}:{s}" for s in ("euler", "s-pndm") for m in methods]
    rows = parse_rows(specs, methods, args.nfe)
    features = feature_net(args)
    noise = shared_noise(methods, max(args.drift_images, args.images), args.seed)
    cells = [[row.method.draw(noise, nfe, row.sampler) for nfe in row.nfes] for row in rows]
    shapes = {tuple(images.shape) for line in cells for images in line}
    if len(shapes) > 1:
        raise ValueError(f"the rows' images have different shapes: {sorted(shapes)}")
    numbers = [
        {"method": row.method.name, "sampler": row.sampler, "nfe": nfe,
         "finest_nfe": row.nfes[-1], "drift": absolute, "relative_drift": relative,
         "images": len(noise)}
        for row, images in zip(rows, cells, strict=True)
        for nfe, absolute, relative in zip(row.nfes, *drift(images, features), strict=True)
    ]  # fmt: skip
    print(f"{'method':20}{'sampler':12}{'NFE':>5}{'drift':>10}{'relative':>10}")
    for n in numbers:
        print("{method:20}{sampler:12}{nfe:5}{drift:10.3f}{relative_drift:10.3f}".format(**n))
    return [
        style.write_csv(args.out / "drift.csv", numbers),
        draw(rows, cells, numbers, args.out / "fig1.png", command, args.images),
    ]


def draw(
    rows: Sequence[Row], cells: Sequence[Sequence[Tensor]], numbers: Sequence[dict], path: Path,
    command: str, images: int,
) -> Path:  # fmt: skip
    """The picture: a strip of NFEs per row and noise, drift beside it."""
    columns = len(rows[0].nfes)
    _, _, height, width = cells[0][0].shape
    strip = 0.95 * columns * (width + 1) / height * images
    fig = style.plt.figure(figsize=(strip + 4.6, 1.15 * len(rows) + 0.8), layout="constrained")
    fig.get_layout_engine().set(rect=(0, 0.04, 1, 0.96), wspace=0.06)
    left, right = fig.subfigures(1, 2, width_ratios=[strip + 0.8, 3.8])
    strips = [[torch.stack([x[i] for x in line]) for i in range(images)] for line in cells]
    centres = np.arange(columns) * (width + 1) + (width - 1) / 2
    ax = right.subplots()
    for r, (row, line) in enumerate(zip(rows, style.grid(left, strips, columns), strict=True)):
        colour = style.method_colour(row.method.name, r)
        line[0].set_ylabel(row.label, fontsize=8, color=colour)
        if r == 0 or row.nfes != rows[r - 1].nfes:
            for strip_ax in line:
                strip_ax.xaxis.tick_top()
                strip_ax.set_xticks(centres, [str(nfe) for nfe in row.nfes])
                strip_ax.tick_params(length=0, pad=1, labelsize=8)
        if r == 0:
            line[0].set_title("NFE", loc="left", fontsize=8)
        shown = numbers[r * columns : (r + 1) * columns - 1]  # the finest is 0 by definition
        ax.plot(
            row.nfes[:-1], [n["relative_drift"] for n in shown], color=colour,
            ls=style.SAMPLER_LINES.get(row.sampler, "-"), marker=style.MARKERS[r % 7],
            label=row.label.replace("\n", " "),
        )  # fmt: skip
    ticks = rows[0].nfes[:-1]  # other rows' NFEs lie close to these, and would print over them
    ax.set_xscale("log")
    ax.set_xticks(ticks, [str(nfe) for nfe in ticks])
    ax.xaxis.set_minor_locator(style.matplotlib.ticker.NullLocator())
    finest = "/".join(map(str, sorted({row.nfes[-1] for row in rows})))
    ax.set(title=f"drift from NFE {finest} (1: another image)", xlabel="NFE", ylim=(0, None))
    ax.legend(fontsize=8)
    return style.save(fig, path, command)
