"""Samples of several methods from the same noise: the paper's Figure 1, appendix F's grids, and pairs by the pixel.

Figure 1: the same noise, solved with ever more network evaluations, should lead to the same image.
Drift is how far it does not: for features phi and NFE n, with n* the finest,

    drift(n) = mean_i |phi(x_i^n) - phi(x_i^{n*})|

and relative drift divides by the mean distance of two different samples, mean |phi(x_i^{n*}) -
phi(x_j^{n*})|: 0 is the same image, 1 is as far as any other.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
from torch import Tensor

from ogdm_core.images import load
from ogdm_core.nfe import steps_for_nfe

from . import style
from .flags import SAMPLERS
from .samples import Method, feature_net, load_method, shared_noise

SIDE, LABEL, LINE = 64, 130, 8  # pixels: of an image at least, of the room for names, between rows


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


def teaser(args: argparse.Namespace, command: str) -> list[Path]:
    """Prints the drift; writes drift.csv and fig1.png."""
    methods = [load_method(text, args.device) for text in args.method]
    specs = args.row or [f"{m.name}:{s}" for s in SAMPLERS for m in methods]
    rows = parse_rows(specs, methods, args.nfe)
    features = feature_net(args)
    noise = shared_noise(methods, max(args.drift_images, args.images), args.seed)
    cells = [[row.method.draw(noise, nfe, row.sampler) for nfe in row.nfes] for row in rows]
    shapes = {tuple(images.shape) for line in cells for images in line}
    if len(shapes) > 1:
        raise ValueError(f"the rows' images have different shapes: {sorted(shapes)}")
    numbers = [
        {"method": row.method.name, "sampler": row.sampler, "nfe": nfe, "finest_nfe": row.nfes[-1],
         "drift": absolute, "relative_drift": relative, "images": len(noise)}
        for row, images in zip(rows, cells, strict=True)
        for nfe, absolute, relative in zip(row.nfes, *drift(images, features), strict=True)
    ]  # fmt: skip
    print(f"{'method':20}{'sampler':12}{'NFE':>5}{'drift':>10}{'relative':>10}")
    for n in numbers:
        print("{method:20}{sampler:12}{nfe:5}{drift:10.3f}{relative_drift:10.3f}".format(**n))
    return [
        style.write_csv(args.out / "drift.csv", numbers),
        draw_teaser(rows, cells, numbers, args.out / "fig1.png", command, args.images),
    ]


def draw_teaser(
    rows: Sequence[Row],
    cells: Sequence[Sequence[Tensor]],
    numbers: Sequence[dict],
    path: Path,
    command: str,
    images: int,
) -> Path:
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


# ---- appendix F ---------------------------------------------------------------------------------


def load_results(path: str | Path) -> list[dict]:
    """Rows {"method", "sampler", "nfe", "fid", "recall"} of a results.json or a tableN.json.

    The first is {"rows": [such rows]}; a table's rows hold a cell per NFE instead, and are called
    by their own name ("cifar10-edm-ogdm-ft") and, where the table has one data set, by their method
    ("OGDM").
    """
    rows = json.loads(Path(path).read_text()).get("rows") or []
    if any("cells" in row for row in rows):
        names = ("row", "method") if len({row["dataset"] for row in rows}) == 1 else ("row",)
        rows = [
            cell | {"method": name, "sampler": row["sampler"]}
            for row in rows for name in dict.fromkeys(row[key] for key in names)
            for cell in row["cells"] if cell["fid"] is not None
        ]  # fmt: skip
    wanted = {"method", "sampler", "nfe", "fid", "recall"}
    if not rows or any(wanted - row.keys() for row in rows):
        raise ValueError(f"{path}: needs rows, each with {', '.join(sorted(wanted))}")
    return rows


def caption(rows: Sequence[dict], method: str, sampler: str, nfe: int) -> str:
    """FID and recall of one cell, the mean over its seeds; says so where the file has none."""
    if not rows:
        return ""
    key = (method.lower(), sampler, nfe)
    cell = [r for r in rows if (r["method"].lower(), r["sampler"], r["nfe"]) == key]
    if not cell:
        return "(FID, recall: not in the results file)"
    fids, recalls = [row["fid"] for row in cell], [row["recall"] for row in cell]
    spread = f" ± {stdev(fids):.2f}" if len(fids) > 1 else ""
    grid = cell[0].get("times", "linear")  # the quickstart's; a panel is on the model's own
    grid = "" if grid == "linear" else f", {grid} time grid"
    return f"(FID: {fmean(fids):.2f}{spread}, recall: {fmean(recalls):.3f}{grid})"


def grid(args: argparse.Namespace, command: str) -> list[Path]:
    """grid-nfeN.png: methods across, samplers down; every panel starts from the same noise."""
    for sampler in args.sampler:
        steps_for_nfe(sampler, args.nfe)
    rows = load_results(args.results) if args.results else []
    methods = [load_method(text, args.device) for text in args.method]
    noise = shared_noise(methods, args.images, args.seed)
    cells = [[m.draw(noise, args.nfe, sampler) for m in methods] for sampler in args.sampler]
    height = 4.6 * -(-len(noise) // args.columns) / args.columns + 0.62
    fig = style.plt.figure(figsize=(4.6 * len(methods) + 0.2, height * len(args.sampler) + 0.15))
    axes = style.grid(fig, cells, args.columns, gap=max(1, cells[0][0].shape[-1] // 16))
    for line, sampler in zip(axes, args.sampler, strict=True):
        for ax, method in zip(line, methods, strict=True):
            name = f"{method.name} + {style.sampler_name(sampler)} (NFE {args.nfe})"
            words = caption(rows, method.name, sampler, args.nfe)
            ax.set_xlabel(f"{name}\n{words}".strip(), fontsize=9)
    fig.tight_layout(rect=(0, 0.02, 1, 1))
    return [style.save(fig, args.out / f"grid-nfe{args.nfe}.png", command)]


# ---- exact pixels -------------------------------------------------------------------------------


def pairs(args: argparse.Namespace, command: str) -> list[Path]:
    """Writes pairs.png: a row of real images, then for each sampler and NFE a row per method.

    Samples are the first `images` of the noise; real images are spread evenly over the data set.
    """
    methods, real = [load_method(text, args.device) for text in args.method], load(args.real)
    noise = shared_noise(methods, args.images, args.seed)
    spread = torch.linspace(0, len(real) - 1, args.images).round().long()
    rows = [("real", real.pixels(spread))]
    for sampler, nfe in args.cells:
        for method in methods:
            name = f"{style.sampler_name(sampler)}, {nfe}\n{method.name}"
            rows.append((name, method.draw(noise, nfe, sampler)[: args.images]))
    zoom = -(-SIDE // rows[0][1].shape[2])
    tiles = [np.kron(style.tile(x.expand(-1, 3, -1, -1), args.images), np.ones((zoom, zoom, 1))) for _, x in rows]
    step = max(tile.shape[0] for tile in tiles) + LINE
    width, height, dpi = LABEL + max(tile.shape[1] for tile in tiles), step * len(tiles) + 2 * LINE, 130
    fig = style.plt.figure(figsize=(width / dpi, height / dpi), dpi=dpi)
    for i, ((name, _), tile) in enumerate(zip(rows, tiles, strict=True)):
        top = height - i * step
        fig.figimage(tile, LABEL, top - tile.shape[0], origin="upper")
        colour = style.method_colour(name.split("\n")[-1]) if i else style.BLACK
        fig.text(0.01, (top - tile.shape[0] / 2) / height, name, fontsize=6, va="center", color=colour)
    return [style.save(fig, args.out / "pairs.png", command)]
