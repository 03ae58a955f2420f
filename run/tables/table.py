"""A table from what is there: the paper's number and ours for every cell, as JSON, CSV, Markdown,
LaTeX, and a picture of FID over NFE."""

from __future__ import annotations

import csv
import io
import json
import textwrap
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from ogdm_core.files import write_json, write_text
from run.provenance import commit, versions

from . import paper
from .job import LOG, PACKAGES
from .jobs import Job, Options, Row

OPEN = "–"
DIGITS = {"fid": 2, "recall": 3}  # as the paper prints them
DATASETS = {"cifar10": "CIFAR-10", "celeba64": "CelebA", "lsun-church": "LSUN Church"}
SMOKE_TITLE = (
    "SMOKE RUN: tiny networks, a few steps, a few digits. These numbers mean nothing but that the "
    "pipeline works"
)
CSV = ("row", "dataset", "method", "sampler", "nfe", "status", "fid", "paper_fid", "recall",
       "paper_recall", "reference_images", "sample_images", "failed_job", "title")  # fmt: skip


# ---- what is there ------------------------------------------------------------------------------


def collect(options: Options, rows: list[Row], command: str) -> dict[str, Any]:
    """One entry per row; the other files are written from it, and it is table<N>.json."""
    table = paper.table(options.number)
    title = f"Table {table.number}. {table.caption}"
    return {
        "title": f"{SMOKE_TITLE} ({title})" if options.smoke else title,
        "number": table.number,
        "smoke": options.smoke,
        "samples": options.samples,
        "seed": options.seed,
        "command": command,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(PACKAGES),
        "rows": [_row(row) for row in rows],
    }


def _row(row: Row) -> dict[str, Any]:
    first = next(iter(row.cells.values()))
    nfes = dict.fromkeys([*row.cells, *row.scores, *row.others])
    conditional = " cond." if first.conditional else ""
    return {
        "row": row.name,
        "dataset": f"{DATASETS[first.dataset]} ({first.backbone.upper()}{conditional})",
        "method": first.method,
        "sampler": row.sampler,
        "preset": row.preset.name,
        "projection": first.projection,
        "k": first.k,
        "gamma": first.gamma,
        "checkpoint": row.checkpoint,
        "failed": failure(row.chain(pending=True)),
        "cells": [_cell(row, nfe) for nfe in sorted(nfes, reverse=True)],
    }


def failure(pending: list[Job]) -> dict[str, str] | None:
    """The first of these jobs whose last attempt did not end well, with the reason."""
    for job in pending:
        if state := job.state():
            # No word about the end: killed, or running this very moment.
            reason = state.get("reason", f"begun on {state.get('host')} and not finished")
            status = "failed" if state.get("status") == "failed" else "stopped"
            return {"job": job.name, "status": status, "reason": reason,
                    "log": str(job.folder / LOG)}  # fmt: skip
    return None


def _cell(row: Row, nfe: int) -> dict[str, Any]:
    reported = row.cells.get(nfe)
    cell = {
        "nfe": nfe,
        "paper_fid": reported.fid_text if reported else None,
        "paper_recall": reported.recall_text if reported else None,
        "fid": None,
        "recall": None,
    }
    if nfe not in row.scores:
        reason = "the sampler cannot spend exactly this many" if nfe in row.others else ""
        return cell | {"status": "not asked for", "reason": reason}
    score, sample = row.scores[nfe], row.samples[nfe]
    record = score.record()
    if record is None:
        found = failure([job for job in (sample, score) if job.record() is None])
        return cell | {"status": found["status"] if found else "open"}
    scores = json.loads(score.output.read_text())
    kept = ("fid", "recall", "precision", "sfid", "reference_images", "sample_images")
    made = [job for job in (sample.record(), record) if job]  # samples may be deleted since
    return cell | {
        "status": "done",
        **{name: scores.get(name) for name in kept},
        "images": str(sample.output),
        "commands": [job["command"] for job in made],
    }


# ---- files --------------------------------------------------------------------------------------


def write_all(results: dict[str, Any], out: Path) -> list[Path]:
    """Writes table<N>.json, .csv, .md, .tex and .png into `out`; returns their paths."""
    files = [
        out / f"table{results['number']}.{kind}" for kind in ("json", "csv", "md", "tex", "png")
    ]
    write_json(files[0], results)
    for file, text in zip(files[1:], (to_csv, to_markdown, to_latex), strict=False):
        write_text(file, text(results))
    plot(results, files[4])
    return files


def nfes_of(results: dict) -> list[int]:
    """The columns: every NFE that the paper has or that was asked for, large ones first."""
    return sorted({cell["nfe"] for row in results["rows"] for cell in row["cells"]}, reverse=True)


def cell_of(row: dict, nfe: int) -> dict:
    """A row's cell; an empty one where the row has none."""
    empty = {"fid": None, "recall": None, "paper_fid": None, "paper_recall": None, "status": ""}
    return next((cell for cell in row["cells"] if cell["nfe"] == nfe), empty)


def ours(cell: dict, name: str) -> str:
    """Our number with the paper's digits, or in a word why there is none."""
    if cell["status"] in ("failed", "stopped"):
        return cell["status"]
    return OPEN if cell[name] is None else f"{cell[name]:.{DIGITS[name]}f}"


def failures(results: dict) -> list[str]:
    """One line per row that stopped."""
    found = [(row["row"], row["failed"]) for row in results["rows"] if row["failed"]]
    return [f"{row}: {f['job']} {f['status']}: {f['reason']}" for row, f in found]


def method_of(results: dict, row: dict) -> str:
    """The method, with its sampler where the table has more than one; a mark if it stopped."""
    from run.figures.style import sampler_name

    several = len({row["sampler"] for row in results["rows"]}) > 1
    sampler = f", {sampler_name(row['sampler'])}" if several else ""
    return f"{row['method']}{sampler}{' (stopped)' if row['failed'] else ''}"


def lines(results: dict) -> list[str]:
    """The table in Markdown, with columns that line up in a terminal, too."""
    nfes = nfes_of(results)
    rows = [["dataset (backbone)", "method", *(f"NFE {nfe}" for nfe in nfes)]]
    for row in results["rows"]:
        rows.append([row["dataset"], method_of(results, row)])
        for cell in (cell_of(row, nfe) for nfe in nfes):
            pairs = [(ours(cell, "fid"), ours(cell, "recall")),
                     (cell["paper_fid"] or OPEN, cell["paper_recall"] or OPEN)]  # fmt: skip
            # One word if both say the same, such as that there is no number.
            mine, theirs = (a if a == b else f"{a} / {b}" for a, b in pairs)
            rows[-1].append(f"{mine} ({theirs})")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return [text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]]


def to_markdown(results: dict) -> str:
    """The table, what stopped, and where the numbers come from."""
    stopped = [f"- {line}" for line in failures(results)]
    notes = [text for line in results.get("notes", ()) for text in (line, "")]
    made = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    settings = ("{samples:,} samples per cell, seed {seed}. " if "seed" in results else "").format(
        **results
    )
    return "\n".join([
        f"# {results['title']}", "", "FID / recall: ours, and the paper's in brackets.", "",
        *lines(results), "", *notes, *(["Rows that stopped:", "", *stopped, ""] if stopped else []),
        f"![FID over NFE, ours and the paper's](table{results['number']}.png)", "",
        f"{settings}Made by", "",
        f"    {results['command']}", "",
        f"at {results['written']}, commit {results['commit']}, {made}.", "",
    ])  # fmt: skip


def to_csv(results: dict) -> str:
    """One line per cell."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in results["rows"]:
        failed = row["failed"]["job"] if row["failed"] else ""
        for cell in row["cells"]:
            writer.writerow(row | cell | {"failed_job": failed, "title": results["title"]})
    return out.getvalue()


def _groups(results: dict) -> list[tuple[tuple[str, str], list[dict]]]:
    key = lambda row: (row["dataset"], row["sampler"])  # noqa: E731
    return [(place, list(rows)) for place, rows in groupby(results["rows"], key)]


def to_latex(results: dict) -> str:
    r"""The paper's layout, with its own numbers in grey below ours; the best of a group is bold.

    Needs \usepackage{booktabs,multirow,xcolor}.
    """
    nfes = nfes_of(results)
    heads = " & ".join(rf"\multicolumn{{2}}{{c}}{{{nfe}}}" for nfe in nfes)
    rules = "".join(rf"\cmidrule(lr){{{3 + 2 * i}-{4 + 2 * i}}}" for i in range(len(nfes)))
    text = [
        f"% {results['command']}",
        f"% commit {results['commit']}, {results['written']}",
        r"\begin{table*}[t]",
        r"    \centering",
        rf"    \caption{{{_escape(results['title'])}. In grey: the paper's numbers.}}",
        rf"    \begin{{tabular}}{{cl{'cc' * len(nfes)}}}",
        r"    \toprule",
        rf"    \multicolumn{{2}}{{c}}{{NFEs}} & {heads} \\",
        f"    {rules}",
        "    Dataset~(Backbone) & Method"
        + r" & FID$\downarrow$ & Rec.$\uparrow$" * len(nfes)
        + r" \\",
    ]
    for i, ((dataset, _), rows) in enumerate(_groups(results)):
        text.append(rf"    \cmidrule(lr){{1-{2 * len(nfes) + 2}}}" if i else r"    \midrule")
        text.append(rf"    \multirow{{{2 * len(rows)}}}{{*}}{{{_escape(dataset)}}}")
        for row in rows:
            mine = [_bold(rows, row, nfe, name) for nfe in nfes for name in DIGITS]
            theirs = [cell_of(row, nfe)[f"paper_{name}"] or "--" for nfe in nfes for name in DIGITS]
            grey = [rf"\textcolor{{gray}}{{{number}}}" for number in ("the paper's", *theirs)]
            text.append(" & ".join(["    ", _escape(method_of(results, row)), *mine]) + r" \\")
            text.append(" & ".join(["    ", *grey]) + r" \\")
    text += [r"    \bottomrule", r"    \end{tabular}", r"\end{table*}"]
    text += [f"% {line}" for line in (*results.get("notes", ()), *failures(results))]
    return "\n".join(text) + "\n"


def _bold(rows: list[dict], row: dict, nfe: int, name: str) -> str:
    """Our number, bold if it is the lowest FID or the highest recall of two rows at the least."""
    text = ours(cell_of(row, nfe), name).replace(OPEN, "--")
    values = [ours(cell_of(r, nfe), name) for r in rows if cell_of(r, nfe)[name] is not None]
    best = (min if name == "fid" else max)(values, key=float) if len(values) > 1 else None
    return rf"\textbf{{{text}}}" if text == best else text


def _escape(text: str) -> str:
    text = "".join(f"\\{c}" if c in "&%$#_{}" else c for c in text)
    return text.replace("–", "--").replace("†", r"$\dagger$").replace("‡", r"$\ddagger$")


def plot(results: dict, path: Path) -> Path:
    """FID over NFE: a panel for each data set, backbone and sampler; the paper's lines dashed."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    from run.figures.style import GREY, MARKERS, PALETTE, figure, method_colour, sampler_name, save

    groups = _groups(results)
    width = min(len(groups), 3)
    height = -(-len(groups) // width)
    size = (max(3.3 * width, 5.0), 2.6 * height + 0.9)
    fig, axes = figure(height, width, size=size, squeeze=False, layout="constrained")
    methods = list(dict.fromkeys(row["method"] for row in results["rows"]))
    looks = {}  # colour and marker; markers differ where there are more methods than colours
    for i, method in enumerate(methods):
        marker = MARKERS[(i + i // 7) % 7] if len(methods) > len(PALETTE) else "o"
        looks[method] = (method_colour(method, i), marker)
    for ax, ((dataset, sampler), rows) in zip(axes.flat, groups, strict=False):
        for row in rows:
            colour, marker = looks[row["method"]]
            for name, line, face in (("paper_fid", "--", "white"), ("fid", "-", colour)):
                points = [(c["nfe"], float(c[name])) for c in row["cells"] if c[name] is not None]
                if points:
                    ax.plot(*zip(*points, strict=True), line + marker, color=colour, mfc=face)
        title = f"{dataset}, {sampler_name(sampler)}"
        ax.set(title=title, xlabel="NFE", ylabel="FID", yscale="log")
        nfes = sorted({c["nfe"] for row in rows for c in row["cells"]})
        ax.set_xticks(nfes, [str(nfe) for nfe in nfes])
        low, high = ax.get_ylim()  # plain numbers at a few round places, whatever a panel spans
        many = LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,))
        ax.yaxis.set_major_locator(MaxNLocator(5) if high / low < 10 else many)
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.yaxis.set_minor_locator(NullLocator())
    for ax in list(axes.flat)[len(groups) :]:
        ax.set_axis_off()
    keys = [Line2D([], [], color=c, marker=m if m != "o" else None, label=method)
            for method, (c, m) in looks.items()]  # fmt: skip
    keys.append(Line2D([], [], color=GREY, marker="o", label="ours"))
    keys.append(Line2D([], [], color=GREY, marker="o", ls="--", mfc="white", label="the paper's"))
    fig.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), int(size[0] / 1.2)))
    fig.suptitle("\n".join(textwrap.wrap(results["title"], int(size[0] * 13))), fontsize=10)
    return save(fig, path, results["command"], small_print=False)
