"""Results of the quickstart as a table, two pictures and one self-contained page."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path

import numpy as np
import torch

from ogdm_core.files import write_json

FILES = ("results.json", "fid_vs_nfe.png", "samples.png", "report.html")


def cells(results: dict) -> list[dict]:
    """One dict per sampler and NFE: FID and recall of both methods, means over seeds."""
    table: dict[tuple[str, int], dict] = {}
    for row in results["rows"]:
        cell = table.setdefault((row["sampler"], row["nfe"]), {"control": [], "ogdm": []})
        cell[row["method"]].append((row["fid"], row["recall"]))
    out = []
    for (sampler, nfe), cell in table.items():
        control, ogdm = np.mean(cell["control"], 0), np.mean(cell["ogdm"], 0)
        out.append({
            "sampler": sampler, "nfe": nfe,
            "control_fid": control[0], "ogdm_fid": ogdm[0],
            "change": 100 * (ogdm[0] / control[0] - 1),
            "control_recall": control[1], "ogdm_recall": ogdm[1],
        })  # fmt: skip
    return out


def print_table(results: dict) -> None:
    """Sampler by NFE, control against OGDM."""
    from rich.console import Console
    from rich.table import Table

    from run.figures.style import sampler_name

    seeds = results["config"]["seeds"]
    mean = f", mean of {len(seeds)} seeds" if len(seeds) > 1 else ""
    table = Table(title=f"FID and recall on {results['data']}{mean} (classifier features, not "
                        "Inception)")  # fmt: skip
    for column in ("sampler", "NFE", "FID control", "FID OGDM", "change", "recall control",
                   "recall OGDM"):  # fmt: skip
        table.add_column(column, justify="left" if column == "sampler" else "right")
    previous = None
    for c in cells(results):
        if previous not in (None, c["sampler"]):
            table.add_section()
        name = "" if previous == c["sampler"] else sampler_name(c["sampler"])
        previous = c["sampler"]
        colour = "green" if c["change"] < 0 else "red"
        table.add_row(
            name, str(c["nfe"]), f"{c['control_fid']:.2f}", f"{c['ogdm_fid']:.2f}",
            f"[{colour}]{c['change']:+.0f} %[/]", f"{c['control_recall']:.3f}",
            f"{c['ogdm_recall']:.3f}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    console.print(headline(results), highlight=False)
    console.print(results["observer"]["words"], highlight=False)
    console.print(f"{results['wall_time_seconds']:.0f} s", highlight=False)


def plot_fid(results: dict, path: Path) -> None:
    """FID over NFE, a panel per sampler."""
    from matplotlib.ticker import LogLocator

    from run.figures import style

    samplers = list(dict.fromkeys(c["sampler"] for c in cells(results)))
    fig, axes = style.figure(1, len(samplers), size=(2.6 * len(samplers), 2.8), sharey=True)
    for ax, sampler in zip(axes, samplers, strict=True):
        rows = [c for c in cells(results) if c["sampler"] == sampler]
        for method, marker in (("control", "o"), ("ogdm", "s")):
            ax.plot([c["nfe"] for c in rows], [c[f"{method}_fid"] for c in rows], marker=marker,
                    color=style.method_colour(method),
                    label="control: plain loss" if method == "control" else "OGDM")  # fmt: skip
        ax.set(title=style.sampler_name(sampler), xlabel="NFE", yscale="log")
        ax.set_xticks([c["nfe"] for c in rows], [str(c["nfe"]) for c in rows])
    axes[0].set_ylabel("FID (lower is better)")
    axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].yaxis.set_minor_formatter("")
    axes[0].legend(fontsize=8)
    fig.tight_layout(rect=(0, 0.03, 1, 1))
    style.save(fig, path, results["command"])


def plot_samples(results: dict, kept: dict[str, dict], path: Path, columns: int = 6) -> None:
    """The same noise down a column, NFE across, control over OGDM, for Euler and S-PNDM."""
    from run.figures import style
    from run.figures.images import show

    nfes = (5, 10, 15, 20, 25)
    rows = [(s, m) for s in ("euler", "s-pndm") for m in ("control", "ogdm")]
    fig, axes = style.figure(len(rows), len(nfes), size=(10, 0.6 + 0.68 * len(rows)))
    for line, (sampler, method) in zip(axes, rows, strict=True):
        for ax, nfe in zip(line, nfes, strict=True):
            images = kept[method][f"{sampler}-{nfe}"][: 2 * columns]
            show(ax, torch.from_numpy(images), columns)
            if method == "control" and sampler == "euler":
                ax.set_title(f"NFE {nfe}")
        label = "OGDM" if method == "ogdm" else "control"
        line[0].set_ylabel(f"{label}\n{style.sampler_name(sampler)}", fontsize=8,
                           color=style.method_colour(method))  # fmt: skip
    fig.tight_layout(rect=(0, 0.02, 1, 1), h_pad=0.4, w_pad=1.2)
    style.save(fig, path, results["command"])


def headline(results: dict) -> str:
    """The result in one sentence: Euler at NFE 10."""
    (c,) = (c for c in cells(results) if (c["sampler"], c["nfe"]) == ("euler", 10))
    word = "lower" if c["change"] < 0 else "higher"
    return (
        f"In 10 Euler steps, OGDM's FID is {abs(c['change']):.0f} % {word} than the control's "
        f"({c['ogdm_fid']:.2f} against {c['control_fid']:.2f}), and its recall "
        f"{c['ogdm_recall']:.3f} against {c['control_recall']:.3f}."
    )


def write(out: Path, results: dict, folders: dict[str, Path]) -> None:
    """All files of FILES; `folders` holds one run per method for the sample picture."""
    kept = {}
    for method, folder in folders.items():
        with np.load(folder / "evaluation.npz") as archive:
            kept[method] = {name: archive[name] for name in archive.files}
    write_json(out / "results.json", results)
    plot_fid(results, out / "fid_vs_nfe.png")
    plot_samples(results, kept, out / "samples.png")
    (out / "report.html").write_text(page(results, out))


def page(results: dict, out: Path) -> str:
    """The page: what was done, the table, the pictures, how to repeat it."""
    from run.figures.style import sampler_name

    def picture(name: str, alt: str) -> str:
        data = base64.b64encode((out / name).read_bytes()).decode()
        image = f'<img alt="{alt}" src="data:image/png;base64,{data}">'
        return f'<div class="scroll">{image}</div>'

    config = results["config"]
    body = "".join(
        f"<tr><td>{sampler_name(c['sampler'])}</td><td>{c['nfe']}</td>"
        f"<td>{c['control_fid']:.2f}</td><td>{c['ogdm_fid']:.2f}</td>"
        f'<td class="{"better" if c["change"] < 0 else "worse"}">{c["change"]:+.0f}&nbsp;%</td>'
        f"<td>{c['control_recall']:.3f}</td><td>{c['ogdm_recall']:.3f}</td></tr>"
        for c in cells(results)
    )
    details = {k: v for k, v in results.items() if k != "rows"}
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>OGDM quickstart: {html.escape(results["data"])}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem;
       color: #1a1a1a; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.15rem; margin-top: 2rem; }}
img {{ width: 100%; min-width: 44rem; height: auto; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child:not(.sub), td:first-child {{ text-align: left; }}
th[colspan] {{ text-align: center; }}
.better {{ color: #00694c; font-weight: 600; }} .worse {{ color: #a63c00; font-weight: 600; }}
code, pre {{ background: #f4f4f4; padding: .1rem .3rem; }}
pre {{ padding: .7rem; overflow-x: auto; }}
.lead {{ font-size: 1.1rem; font-weight: 600; }}
@media (max-width: 40rem) {{ table {{ font-size: .8rem; }} th, td {{ padding: .25rem .3rem; }} }}
</style></head><body>
<h1>Few-step sampling on {html.escape(results["data"])}: plain training against OGDM</h1>
<p class="lead">{html.escape(headline(results))}</p>
<p>Two fine-tunes of {config["steps"]} steps from one baseline: the control with the plain loss,
OGDM with the observation's loss added. Both saw the same images and noise, and are sampled from
the same initial noise at the same cost. Seeds: {", ".join(map(str, config["seeds"]))}.</p>
<p>{html.escape(results["observer"]["words"])}</p>
<h2>FID over the number of network evaluations (NFE)</h2>
{picture("fid_vs_nfe.png", "FID over NFE for each sampler, control and OGDM")}
<h2>Samples</h2>
<p>The same noise at the same place in every block.</p>
{picture("samples.png", "Samples of control and OGDM at several NFEs")}
<h2>Table</h2>
<p>FID and recall in 64 features of a small classifier trained on this data
({100 * results["classifier_accuracy"]:.1f} % right on held-out images). They are not Inception
features: compare these numbers with each other only. {config["samples"]} images a cell.</p>
<div class="scroll"><table><thead><tr><th rowspan="2">sampler</th><th rowspan="2">NFE</th>
<th colspan="3">FID</th><th colspan="2">recall</th></tr><tr><th class="sub">control</th>
<th>OGDM</th><th>change</th><th>control</th><th>OGDM</th></tr></thead>
<tbody>{body}</tbody></table></div>
<h2>How it was made</h2>
<pre>{html.escape(results["command"])}</pre>
<details><summary>Settings, versions, commit, time</summary>
<pre>{html.escape(json.dumps(details, indent=2))}</pre></details>
</body></html>
"""
