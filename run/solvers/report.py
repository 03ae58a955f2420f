"""What run/solvers.sh prints and writes: tables, what they say of two models, a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from ogdm_core.nfe import SAMPLERS
from run.figures.style import MARKERS, PALETTE, figure, save

Row = dict[str, Any]  # model, solver, grid, nfe, fid, recall
Cell = tuple[str, str]  # solver and grid


def by_cell(rows: Sequence[Row], model: str, nfe: int) -> dict[Cell, Row]:
    """A model's rows at an NFE, the lowest FID first."""
    found = [row for row in rows if row["model"] == model and row["nfe"] == nfe]
    return {(row["solver"], row["grid"]): row for row in sorted(found, key=lambda row: row["fid"])}


def change(before: float, after: float) -> str:
    """How much lower or higher, in per cent."""
    return f"{100 * (after / before - 1):+.0f} %"


def table(rows: Sequence[Row], models: Sequence[str], nfe: int) -> list[str]:
    """Lines of Markdown: a row for each solver and grid, the last model's best first, best ones in bold."""
    found = [by_cell(rows, model, nfe) for model in models]
    best = [next(iter(of.values()))["fid"] for of in found]
    cells = [*found[-1], *(cell for cell in found[0] if cell not in found[-1])]
    two = len(models) == 2
    recall = [f"recall, {m}" if two else "recall" for m in models]
    head = ["solver", "grid", *models, *(["change"] if two else []), *recall]
    lines = [head, ["---"] * len(head)]
    for solver, grid in cells:
        there = [of.get((solver, grid)) for of in found]
        fids = ["" if r is None else f"**{r['fid']:.3f}**" if r["fid"] == b else f"{r['fid']:.3f}"
                for r, b in zip(there, best, strict=True)]  # fmt: skip
        changed = [change(there[0]["fid"], there[1]["fid"]) if all(there) else ""] if two else []
        recalls = ["" if r is None or r["recall"] is None else f"{r['recall']:.3f}" for r in there]
        lines.append([SAMPLERS[solver].title, grid, *fids, *changed, *recalls])
    return [f"| {' | '.join(line)} |" for line in lines]


def verdict(rows: Sequence[Row], models: Sequence[str], nfe: int) -> str:
    """Best with best, and cell by cell; for one model its best cell."""
    found = [by_cell(rows, model, nfe) for model in models]
    best = [next(iter(of.values())) for of in found]
    said = [f"{row['fid']:.3f} ({SAMPLERS[row['solver']].title}, {row['grid']})" for row in best]
    if len(models) == 1:
        return f"NFE {nfe}: the best is {said[0]}."
    ratios = [found[1][cell]["fid"] / row["fid"] for cell, row in found[0].items() if cell in found[1]]
    return (
        f"NFE {nfe}, best with best: {models[0]} {said[0]}, {models[1]} {said[1]}: "
        f"{change(best[0]['fid'], best[1]['fid'])}. Cell by cell: {models[1]} is better in "
        f"{sum(r < 1 for r in ratios)} of {len(ratios)}, median change {change(1, median(ratios))}."
    )


def markdown(results: Mapping[str, Any]) -> str:
    """All tables, each below its verdict."""
    rows, models = results["rows"], results["models"]
    parts = []
    for nfe in sorted({row["nfe"] for row in rows}):
        parts.append("\n".join([verdict(rows, models, nfe), "", *table(rows, models, nfe)]))
    return "\n\n".join(parts) + "\n"


def picture(results: Mapping[str, Any], path: Path) -> Path:
    """FID over NFE, a panel for each model: each solver on its best grid, a star at the best of all."""
    rows, models = results["rows"], results["models"]
    nfes = sorted({row["nfe"] for row in rows})
    solvers = [name for name in SAMPLERS if any(row["solver"] == name for row in rows)]
    fig, axes = figure(1, len(models), size=(4.2 * len(models) + 1.8, 4.0), squeeze=False, sharey=True,
                       layout="constrained")  # fmt: skip
    n = len(PALETTE)
    looks = {s: (PALETTE[i % n], MARKERS[(i + i // n) % len(MARKERS)], "--" if i >= n else "-")
             for i, s in enumerate(solvers)}  # fmt: skip
    for ax, model in zip(axes.flat, models, strict=True):
        for solver, (colour, marker, line) in looks.items():
            of = {nfe: [r["fid"] for r in rows if (r["model"], r["solver"], r["nfe"]) == (model, solver, nfe)]
                  for nfe in nfes}  # fmt: skip
            points = [(nfe, min(fids)) for nfe, fids in of.items() if fids]
            ax.plot(*zip(*points, strict=True), color=colour, marker=marker, ls=line)
        for nfe in nfes:
            ax.plot(nfe, next(iter(by_cell(rows, model, nfe).values()))["fid"], "*", ms=13, mfc="none", mec="black")
        ax.set(title=model, xlabel="network evaluations", yscale="log")
        ax.set_xticks(nfes, [str(nfe) for nfe in nfes])
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_locator(NullLocator())
    axes[0, 0].set_ylabel("FID, on each solver's best time grid")
    keys = [Line2D([], [], color=c, marker=m, ls=ls, label=SAMPLERS[s].title) for s, (c, m, ls) in looks.items()]
    keys.append(Line2D([], [], color="black", marker="*", mfc="none", ms=11, ls="", label="the best"))
    fig.legend(handles=keys, loc="outside right center")
    return save(fig, path, results["command"], small_print=False)
