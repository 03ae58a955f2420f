"""The tables and pictures of docs/beyond.md on the observation's settings, from the FIDs in
docs/results/beyond-observation.json: python -m run.sweep.beyond POINT PICTURE.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

from ogdm_core.flags import Parser
from run.figures import style
from run.provenance import ROOT

RESULTS = ROOT / "docs" / "results" / "beyond-observation.json"
CELL = "Euler 10"  # of the picture of cost


def to_markdown(arms: list[dict]) -> str:
    """One line per arm: mean FID (lowest-highest seed) at each sampler and NFE, and the cost."""
    cells = list(arms[0]["fids"])
    lines = [["", "cost", *cells], ["---"] * (len(cells) + 2)]
    for arm in arms:
        fids = [arm["fids"][cell] for cell in cells]
        texts = [f"{fmean(f):.2f} ({min(f):.2f}-{max(f):.2f})" for f in fids]
        lines.append([arm["name"], f"{total(arm, arms):.2f}", *texts])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def total(arm: dict, arms: list[dict]) -> float:
    """Operations of the whole training over those of the first arm's."""
    return arm["cost"] * arm["steps"] / arms[0]["steps"]


def draw_cells(arms: list[dict], ax) -> None:
    """FID over the first arm's of the same seed, for each sampler and NFE."""
    cells = list(arms[0]["fids"])
    for i, arm in enumerate(arms[1:]):
        pairs = [zip(arm["fids"][c], arms[0]["fids"][c], strict=True) for c in cells]
        ratios = [[fid / control for fid, control in pair] for pair in pairs]
        x = [j + 0.12 * (i - len(arms) / 2 + 1) for j in range(len(cells))]
        y = [fmean(r) for r in ratios]
        ends = [[m - min(r) for m, r in zip(y, ratios, strict=True)],
                [max(r) - m for m, r in zip(y, ratios, strict=True)]]  # fmt: skip
        ax.errorbar(x, y, ends, fmt=style.MARKERS[i], capsize=2, label=arm["name"])
    ax.axhline(1, color=style.BLACK, linewidth=0.8)
    ax.set_xticks(range(len(cells)), cells)
    ax.set(ylabel=f"FID over that of the {arms[0]['name']}", ylim=0)
    ax.legend(fontsize=7)


def draw_cost(arms: list[dict], ax) -> None:
    """FID at CELL over the cost of the training; a line joins the controls."""
    for i, arm in enumerate(arms):
        fids, control = arm["fids"][CELL], arm["name"].startswith("control")
        y = fmean(fids)
        colour = style.BLACK if control else style.PALETTE[i % 6]
        ax.errorbar(total(arm, arms), y, [[y - min(fids)], [max(fids) - y]], fmt="o",
                    color=colour, capsize=2)  # fmt: skip
        ax.annotate(arm["name"], (total(arm, arms), y), (5, 5 if i % 2 else -9),
                    textcoords="offset points", fontsize=7)  # fmt: skip
    plain = [arm for arm in arms if arm["name"].startswith("control")]
    ax.plot([total(arm, arms) for arm in plain], [fmean(arm["fids"][CELL]) for arm in plain],
            color=style.BLACK)  # fmt: skip
    ax.set(xlabel="operations of the training over the control's", ylabel=f"FID, {CELL}", ylim=0,
           xlim=(0.9, 2.5))  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Prints the table of a point, and draws its picture."""
    p = Parser(prog="python -m run.sweep.beyond", description=__doc__)
    p.add_argument("point", type=int, choices=(1, 2, 4), help="1 gamma, 2 lookahead, 4 cost")
    p.add_argument("picture", type=Path, help="PNG to write")
    args = p.parse_args(argv)
    found = json.loads(RESULTS.read_text())["arms"]
    arms = [arm for arm in found if args.point in arm["points"]]
    print(to_markdown(arms))
    fig, ax = style.figure(size=(6.5, 3.4), layout="constrained")
    fig.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))  # the small print is below
    (draw_cost if args.point == 4 else draw_cells)(arms, ax)
    style.save(fig, args.picture, f"python -m run.sweep.beyond {args.point} {args.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
