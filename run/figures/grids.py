"""Qualitative comparisons (appendix F): samples of every method, FID and recall in the caption."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from ogdm_core.nfe import steps_for_nfe

from . import style
from .samples import load_method, shared_noise


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


def run(args: argparse.Namespace, command: str) -> list[Path]:
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
