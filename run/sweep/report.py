"""A sweep's results: JSON, a table, and a heat map of the change of FID against the control."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from ogdm_core.files import write_json, write_text
from run.figures import style
from run.provenance import commit
from run.sweep.flags import combinations

PAPER = {"k": (0.1, 0.2), "gamma": (0.005, 0.025)}  # the ranges that the paper recommends


def collect(args: argparse.Namespace, arms: Iterable[tuple[Any, Any]], command: str) -> dict:
    """{"grid", "rows": [{"values", "sampler", "nfe", "control", "fid", "recall", "change"}], ...}.

    Means over the seeds that are done; "change" is in percent of the control's FID. A combination
    of values that is not done has no rows.
    """
    fids: dict[tuple, list[dict]] = {}
    for arm, job in arms:
        for row in json.loads(job.output.read_text())["rows"] if job.record() else ():
            key = (*arm.values.values(), row["sampler"], row["nfe"])
            fids.setdefault(key, []).append(row | {"seed": arm.seed})
    rows = []
    for (*values, sampler, nfe), found in fids.items():
        controls = {row["seed"]: row["fid"] for row in fids.get((sampler, nfe), ())}
        pairs = [(row, controls[row["seed"]]) for row in found if row["seed"] in controls]
        if values and pairs:
            control = fmean(fid for _, fid in pairs)
            fid, recall = (fmean(row[name] for row, _ in pairs) for name in ("fid", "recall"))
            rows.append({
                "values": dict(zip(args.grid, values, strict=True)), "sampler": sampler, "nfe": nfe,
                "control": control, "fid": fid, "recall": recall, "seeds": len(pairs),
                "change": 100 * (fid / control - 1),
            })  # fmt: skip
    kept = ("grid", "model", "data", "steps", "samples", "seeds", "cells")
    return {name: getattr(args, name) for name in kept} | {
        "command": command, "commit": commit(), "rows": rows,
    }  # fmt: skip


def cells(results: dict) -> tuple[dict[tuple[str, int], float], dict[tuple, dict]]:
    """The control's FID by (sampler, NFE), and the rows by (sampler, NFE, *values)."""
    rows = results["rows"]
    controls = {(row["sampler"], row["nfe"]): row["control"] for row in rows}
    return controls, {(r["sampler"], r["nfe"], *r["values"].values()): r for r in rows}


def to_markdown(results: dict) -> str:
    """One line per combination: FID at each sampler and NFE, and its change."""
    controls, found = cells(results)
    blank = [""] * (len(results["grid"]) - 1)
    lines = [
        [*results["grid"], *(f"{style.sampler_name(s)} {nfe}" for s, nfe in controls)],
        ["---"] * len([*results["grid"], *controls]),
        ["control", *blank, *(f"{fid:.2f}" for fid in controls.values())],
    ]
    for values in combinations(results["grid"]):
        rows = [found.get((*panel, *values.values())) for panel in controls]
        texts = [f"{r['fid']:.2f} ({r['change']:+.0f} %)" if r else "–" for r in rows]
        lines.append([*values.values(), *texts])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(results: dict, out: Path) -> list[Path]:
    """sweep.json, sweep.md and sweep.png in `out`."""
    files = [out / f"sweep.{kind}" for kind in ("json", "md", "png")]
    write_json(files[0], results)
    title = f"FID, and its change against a plain fine-tune of {results['steps']:,} steps"
    write_text(files[1], f"# {title}\n\n    {results['command']}\n\n{to_markdown(results)}\n")
    return [*files[:2], plot(results, files[2])]


def plot(results: dict, path: Path) -> Path:
    """Panels: samplers and NFEs across, settings beyond the first two down. Blue is a lower FID.

    The frame is the paper's range of k and gamma, where these are the first two.
    """
    grid = results["grid"]
    across, down, *others = grid
    controls, found = cells(results)
    rest = combinations({name: grid[name] for name in others})
    limit = max(10.0, *(abs(row["change"]) for row in results["rows"]))
    width, height = 0.8 * len(grid[across]) + 1.1, 0.55 * len(grid[down]) + 1.1
    size = (width * len(controls) + 0.9, height * len(rest) + 0.5)
    shape = (len(rest), len(controls))
    fig, axes = style.figure(*shape, size=size, squeeze=False, layout="constrained")
    for line, fixed in zip(axes, rest, strict=True):
        for ax, ((sampler, nfe), control) in zip(line, controls.items(), strict=True):
            rows = [
                [found.get((sampler, nfe, x, y, *fixed.values())) for x in grid[across]]
                for y in grid[down]
            ]  # fmt: skip
            changes = [[r["change"] if r else float("nan") for r in row] for row in rows]
            picture = ax.imshow(changes, cmap="RdBu_r", vmin=-limit, vmax=limit, origin="lower",
                                aspect="auto")  # fmt: skip
            for y, row in enumerate(rows):
                for x, r in enumerate(row):
                    text = f"{r['change']:+.0f} %\n{r['fid']:.2f}" if r else "–"
                    dark = r is not None and abs(r["change"]) > 0.6 * limit
                    ax.text(x, y, text, ha="center", va="center", fontsize=7,
                            color="white" if dark else "black")  # fmt: skip
            words = "".join(f", {name} {value}" for name, value in fixed.items())
            title = f"{style.sampler_name(sampler)}\nNFE {nfe}{words}"
            ax.set(title=f"{title}\ncontrol: FID {control:.2f}", xlabel=across, ylabel=down)
            ax.set_xticks(range(len(grid[across])), grid[across])
            ax.set_yticks(range(len(grid[down])), grid[down])
            ax.grid(False)
            frame(ax, grid, across, down)
    fig.get_layout_engine().set(rect=(0, 0.04, 1, 0.96))  # the command stands below
    fig.colorbar(picture, ax=axes, label="change of FID, %")
    return style.save(fig, path, results["command"])


def frame(ax: Any, grid: dict[str, list[str]], across: str, down: str) -> None:
    """A line around the cells that are in the paper's ranges of k and gamma."""
    if {across, down} != set(PAPER):
        return
    spans = []
    for name in (across, down):
        low, high = PAPER[name]
        inside = [i for i, value in enumerate(grid[name]) if low <= float(value) <= high]
        if not inside or inside != list(range(inside[0], inside[-1] + 1)):
            return
        spans.append((inside[0] - 0.5, len(inside)))
    (x, width), (y, height) = spans
    ax.add_patch(style.plt.Rectangle((x, y), width, height, fill=False, lw=2, ec=style.BLACK))
