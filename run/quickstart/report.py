"""Results of the quickstart as a table, three pictures and one self-contained page.

python -m run.quickstart.report RESULTS.json prints the table of docs/start.md.
"""

import base64
import html
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import LogLocator

from ogdm_core.cli import Parser, errors_in_one_line
from ogdm_core.files import write_json, write_text
from ogdm_core.images import load
from run.figures import style

FILES = ("results.json", "fid_vs_nfe.png", "samples.png", "trajectory.png", "report.html")
NAMES = {"control": "control", "ogdm": "OGDM"}
COLUMNS = (
    "sampler", "times", "NFE", "FID control", "FID OGDM", "change", "recall control", "recall OGDM",
)  # fmt: skip


def cells(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One dict per sampler and NFE: FID and recall of both methods, means over seeds."""
    table: dict[tuple[str, int], dict[str, list]] = {}
    times: dict[tuple[str, int], dict[str, None]] = {}  # the control's first, then OGDM's
    for row in results["rows"]:
        key = (row["sampler"], row["nfe"])
        cell = table.setdefault(key, {"control": [], "ogdm": []})
        cell[row["method"]].append((row["fid"], row["recall"]))
        times.setdefault(key, {})[row.get("times", "linear")] = None
    out = []
    for (sampler, nfe), cell in table.items():
        control, ogdm = np.mean(cell["control"], 0), np.mean(cell["ogdm"], 0)
        out.append({
            "sampler": sampler, "times": " / ".join(times[sampler, nfe]), "nfe": nfe,
            "control_fid": control[0], "ogdm_fid": ogdm[0],
            "change": 100 * (ogdm[0] / control[0] - 1),
            "by_seed": [100 * (o / c - 1) for (c, _), (o, _) in zip(*cell.values(), strict=True)],
            "control_recall": control[1], "ogdm_recall": ogdm[1],
        })  # fmt: skip
    return out


def lines(results: dict[str, Any]) -> list[list[str]]:
    """The table's lines, one text per column of COLUMNS."""
    return [
        [style.sampler_name(c["sampler"]), c["times"], str(c["nfe"]), f"{c['control_fid']:.2f}",
         f"{c['ogdm_fid']:.2f}", f"{c['change']:+.0f} %", f"{c['control_recall']:.3f}",
         f"{c['ogdm_recall']:.3f}"]
        for c in cells(results)
    ]  # fmt: skip


def markdown(results: dict[str, Any]) -> str:
    """The table with the change of every seed, as docs/start.md shows it."""
    table = [[*COLUMNS, "by seed"], ["---"] * (len(COLUMNS) + 1)]
    for line, cell in zip(lines(results), cells(results), strict=True):
        table.append([*line, ", ".join(f"{change:+.0f}" for change in cell["by_seed"])])
    return "".join(f"| {' | '.join(texts)} |\n" for texts in table)


def headline(results: dict[str, Any]) -> str:
    """The result in one sentence: Euler at NFE 10."""
    (c,) = (c for c in cells(results) if (c["sampler"], c["nfe"]) == ("euler", 10))
    word = "lower" if c["change"] < 0 else "higher"
    return (
        f"In 10 Euler steps, OGDM's FID is {abs(c['change']):.0f} % {word} than the control's "
        f"({c['ogdm_fid']:.2f} against {c['control_fid']:.2f}), and its recall is "
        f"{c['ogdm_recall']:.3f} against {c['control_recall']:.3f}."
    )


def print_table(results: dict[str, Any]) -> None:
    """Prints FID and recall by sampler and NFE, control against OGDM."""
    seeds = results["config"]["seeds"]
    mean = f", mean of {len(seeds)} seeds" if len(seeds) > 1 else ""
    print(f"FID and recall on {results['data']}{mean} (classifier features, not Inception)")
    head = zip(*(column.rpartition(" ")[::2] for column in COLUMNS), strict=True)  # "FID control" in two lines
    table = [*head, *lines(results)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    previous = ""
    for name, times, *numbers in table:
        left = [("" if name == previous else name).ljust(widths[0]), times.ljust(widths[1])]
        print(*left, *(text.rjust(width) for text, width in zip(numbers, widths[2:], strict=True)), sep="  ")
        previous = name
    print(headline(results), results["observer"]["words"], f"{results['wall_time_seconds']:.0f} s", sep="\n")


def plot_fid(results: dict[str, Any], path: Path) -> None:
    """FID over NFE, a panel per sampler, three in a line."""
    samplers = list(dict.fromkeys(c["sampler"] for c in cells(results)))
    shape = (-(-len(samplers) // 3), 3)
    fig, axes = style.figure(*shape, size=(8, 2.6 * shape[0]), sharey=True, squeeze=False)
    axes = axes.flatten()
    for ax in axes[len(samplers) :]:
        ax.set_axis_off()
    for ax, sampler in zip(axes, samplers, strict=False):
        rows = [c for c in cells(results) if c["sampler"] == sampler]
        nfes = [c["nfe"] for c in rows]
        for method, marker in (("control", "o"), ("ogdm", "s")):
            ax.plot(nfes, [c[f"{method}_fid"] for c in rows], marker=marker,
                    color=style.method_colour(method), label=NAMES[method])  # fmt: skip
        ax.set(title=style.sampler_name(sampler), xlabel="NFE", yscale="log")
        ax.set_xticks(nfes, map(str, nfes))
    for ax in axes[::3]:
        ax.set_ylabel("FID (lower is better)")
    axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].yaxis.set_minor_formatter("")
    axes[0].legend(fontsize=8)
    fig.tight_layout(rect=(0, 0.03, 1, 1))
    style.save(fig, path, results["command"])


def show(ax, images: torch.Tensor, columns: int) -> None:
    """Draws small images with black margins, smooth: strokes in place of pixels."""
    black = 0 if images.dtype == torch.uint8 else -1
    margin = torch.nn.functional.pad(images, (1, 1, 1, 1), value=black)
    style.show(ax, margin, columns, gap=0, interpolation="bicubic")


def plot_samples(results: dict[str, Any], folders: dict[str, Path], path: Path) -> None:
    """Euler's samples, OGDM's right below the control's of the same noise; then real images."""
    images, nfes, shown = load(results["data"]), (3, 5, 10), 12
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    drawn = []
    for method in NAMES:
        with np.load(folders[method] / "evaluation.npz") as kept:
            drawn.append([kept[f"euler-{nfe}"][:shown] for nfe in nfes])
    blocks = [torch.from_numpy(np.concatenate(pair)) for pair in zip(*drawn, strict=True)]
    fig, axes = style.figure(4, 1, size=(9, 6.6), height_ratios=(2, 2, 2, 1))
    for ax, nfe, block in zip(axes, nfes, blocks, strict=False):
        show(ax, block, shown)
        ax.set_title(f"{nfe} Euler steps")
        ax.set_yticks([(images.size + 2) * (i + 0.5) for i in range(2)], NAMES.values(), fontsize=10)
        ax.tick_params(length=0)
        for label, method in zip(ax.get_yticklabels(), NAMES, strict=True):
            label.set_color(style.method_colour(method))
    show(axes[-1], images.pixels(order[:shown]), shown)
    axes[-1].set_title("real images")
    fig.tight_layout(rect=(0, 0.02, 1, 1), h_pad=0.5)
    style.save(fig, path, results["command"])


def plot_trajectory(results: dict[str, Any], folders: dict[str, Path], path: Path) -> None:
    """The estimate of x_0 after each Euler step, from the same noise, control above OGDM."""
    fig, axes = style.figure(2, 1, size=(8, 2.1))
    for method, ax in zip(NAMES, axes, strict=True):
        with np.load(folders[method] / "evaluation.npz") as kept:
            estimates = torch.from_numpy(kept["trajectory"][0])
        show(ax, estimates, len(estimates))
        ax.set_ylabel(NAMES[method], fontsize=10, color=style.method_colour(method))
    axes[0].set_title(f"one sample's estimate of x_0, Euler, step 1 to {len(estimates)}")
    fig.tight_layout(rect=(0, 0.02, 1, 1), h_pad=0.4)
    style.save(fig, path, results["command"])


def write(out: Path, results: dict[str, Any], folders: dict[str, Path]) -> None:
    """Writes all of FILES; `folders` holds one run per method for the pictures of samples."""
    write_json(out / "results.json", results)
    plot_fid(results, out / "fid_vs_nfe.png")
    plot_samples(results, folders, out / "samples.png")
    plot_trajectory(results, folders, out / "trajectory.png")
    write_text(out / "report.html", page(results, out))


def page(results: dict[str, Any], out: Path) -> str:
    """The page: what was done, the pictures, the table, how to repeat it."""

    def picture(name: str) -> str:
        data = base64.b64encode((out / name).read_bytes()).decode()
        return f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'

    def row(texts: list[str] | tuple[str, ...], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>\n"

    config = {name: html.escape(str(value)) for name, value in results["config"].items()}
    seeds, data = html.escape(", ".join(map(str, results["config"]["seeds"]))), html.escape(results["data"])
    details = html.escape(json.dumps({k: v for k, v in results.items() if k != "rows"}, indent=2))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>OGDM quickstart: {data}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }}
img {{ width: 100%; }}
th, td {{ padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }}
pre {{ background: #f4f4f4; padding: .7rem; overflow-x: auto; }}
</style></head><body>
<h1>Few-step sampling on {data}: plain training against OGDM</h1>
<p><b>{html.escape(headline(results))}</b></p>
<p>Two fine-tunes start from one baseline: the control with the plain loss
({config["control_steps"]} steps), OGDM with the emission loss added ({config["steps"]} steps).
Both see the same images and noise and are sampled from the same initial noise at the same cost.
Seeds: {seeds}.</p>
<p>{html.escape(results["observer"]["words"])}</p>
<h2>FID over the number of network evaluations (NFE)</h2>
{picture("fid_vs_nfe.png")}
<h2>Samples</h2>
<p>The same noise is at the same place in every block. The last block holds real images.</p>
{picture("samples.png")}
<p>What the two models make of one noise on the way: the estimate of x_0 after each step.</p>
{picture("trajectory.png")}
<h2>Table</h2>
<p>FID and recall are taken in 64 features of a small classifier trained on this data
({100 * results["classifier_accuracy"]:.1f} % right on held-out images), with {config["samples"]}
images per cell. They are not Inception features: compare these numbers with each other only. One
half of the real images against the other half scores {results["half_fid"]:.2f}. "times" is the
sampler's time grid; on MNIST it is the best one of the control's first seed (for Euler, S-PNDM and
F-PNDM the better of linear and quadratic) and, behind a slash, of OGDM's where that is another.</p>
<table>{row(COLUMNS, "th")}{"".join(map(row, lines(results)))}</table>
<h2>How it was made</h2>
<pre>{html.escape(results["command"])}</pre>
<details><summary>Settings, versions, commit, time</summary><pre>{details}</pre></details>
</body></html>
"""


if __name__ == "__main__":
    p = Parser(prog="python -m run.quickstart.report", description=__doc__)
    p.add_argument("results", type=Path, help="results.json of a quickstart")
    with errors_in_one_line():
        print(markdown(json.loads(p.parse_args().results.read_text())), end="")
