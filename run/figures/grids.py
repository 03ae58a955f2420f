"""Qualitative comparisons (appendix F): samples of every method, FID and recall in the caption."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from torch import Tensor

from . import style
from .samples import Method


def load_results(path: str | Path) -> list[dict]:
    """Rows {"method", "sampler", "nfe", "fid", "recall"} of a results.json or a tableN.json.

    The first is {"rows": [such rows]}; a table's rows hold a cell per NFE instead, and are called
    by their own name ("cifar10-edm-ogdm-ft") and, where that is clear, by their method ("OGDM").
    """
    rows = json.loads(Path(path).read_text()).get("rows") or []
    if any("cells" in row for row in rows):
        rows = _from_table(rows)
    wanted = {"method", "sampler", "nfe", "fid", "recall"}
    if not rows or any(wanted - row.keys() for row in rows):
        raise ValueError(f"{path}: needs rows, each with {', '.join(sorted(wanted))}")
    return rows


def _from_table(rows: Sequence[dict]) -> list[dict]:
    """One row per finished cell, by the row's name, and by its method if its data set is the only
    one in the table."""
    alone = len({row["dataset"] for row in rows}) == 1
    return [
        {"method": name, "sampler": row["sampler"]}
        | {key: cell[key] for key in ("nfe", "fid", "recall")}
        for row in rows for cell in row["cells"] if cell["fid"] is not None
        for name in dict.fromkeys([row["row"], row["method"]] if alone else [row["row"]])
    ]  # fmt: skip


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
    return f"(FID: {fmean(fids):.2f}{spread}, recall: {fmean(recalls):.3f})"


def draw(
    methods: Sequence[Method], samplers: Sequence[str], nfe: int, noise: Tensor,
    rows: Sequence[dict], path: Path, command: str, columns: int = 10,
) -> Path:  # fmt: skip
    """Methods across, samplers down; every panel starts from the same noise."""
    cells = [[method.draw(noise, nfe, sampler) for method in methods] for sampler in samplers]
    height = 4.6 * -(-len(noise) // columns) / columns + 0.62
    fig = style.plt.figure(figsize=(4.6 * len(methods) + 0.2, height * len(samplers) + 0.15))
    axes = style.grid(fig, cells, columns, gap=max(1, cells[0][0].shape[-1] // 16))
    for line, sampler in zip(axes, samplers, strict=True):
        for ax, method in zip(line, methods, strict=True):
            name = f"{method.name} + {style.sampler_name(sampler)} (NFE {nfe})"
            ax.set_xlabel(f"{name}\n{caption(rows, method.name, sampler, nfe)}".strip(), fontsize=9)
    fig.tight_layout(rect=(0, 0.02, 1, 1))
    return style.save(fig, path, command)
