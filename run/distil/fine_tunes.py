"""A quickstart's fine-tunes, and a table of what was measured on them."""

import json
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any


def fine_tunes(quickstart: Path, data: str) -> tuple[dict[Path, tuple[str, int]], Path]:
    """{folder: (method, seed)} of a quickstart's fine-tunes on `data`, and its classifier."""
    folder, runs, others = quickstart / "runs", {}, set()
    for run in sorted(folder.glob("*-seed*")):
        name, file = re.fullmatch(r"(\w+)-seed(\d+).*", run.name), run / "training.json"
        finished = name and file.is_file() and (run / "unet").is_dir()
        if finished and (of := json.loads(file.read_text())["settings"]["data"]) != data:
            others.add(of)
        elif finished:
            runs[run] = (name[1], int(name[2]))
    found = sorted(quickstart.glob(f"classifier-{data}-*.pt"))
    if not runs or not found:
        make = f"run/quickstart.sh --data {data} --out {quickstart}"
        advice = f"give --data {min(others)}" if others else make
        raise FileNotFoundError(f"{quickstart} holds no fine-tunes on {data}; {advice}")
    (method, seed), count = Counter(runs.values()).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"{method}-seed{seed} stands for several fine-tunes in {folder}; remove the folders of "
            "those that are not meant, or give a quickstart's folder with one run per seed"
        )
    return runs, found[-1]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per sampler, NFE, model and weight; mean ± standard deviation over seeds."""
    lines = ["| sampler | model | NFE in all | FID | recall |", "|---|---|---|---|---|"]
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["sampler"], row["nfe"], row["method"], row["weight"], row["cost"])
        groups.setdefault(key, []).append(row)
    for (sampler, nfe, method, weight, cost), group in sorted(groups.items()):
        cells = []
        for name in ("fid", "recall"):
            values = [row[name] for row in group]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.3f} ± {spread:.3f}")
        model = f"{method} + guide, w = {weight:g}" if weight else method
        lines.append(f"| {sampler} {nfe} | {model} | {cost} | {' | '.join(cells)} |")
    return "\n".join(lines)
