"""A table from what is there: the paper's number and ours for every cell, as JSON, CSV, Markdown,
LaTeX, and a picture of FID over NFE. Several seeds give a mean and a standard deviation; a table
with controls has the change against them in place of the paper's numbers."""

import csv
import io
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ogdm_core.files import write_json, write_text
from run.provenance import commit, versions

from . import paper
from .jobs import Job, read_json
from .rows import Options, Row
from .scale import Scale
from .worker import LOG, PACKAGES

OPEN = "–"
DIGITS = {"fid": 2, "recall": 3}  # as the paper prints them
LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "–": "--", "±": r"$\pm$", "†": r"$\dagger$", "‡": r"$\ddagger$",
}  # fmt: skip
DATASETS = {"cifar10": "CIFAR-10", "celeba64": "CelebA", "lsun-church": "LSUN Church"}
KEPT = ("fid", "recall", "precision", "sfid", "reference_images", "sample_images")
CSV = ("row", "dataset", "method", "sampler", "nfe", "status", "fid", "paper_fid", "recall",
       "paper_recall", "reference_images", "sample_images", "failed_job", "title", "fid_sd",
       "recall_sd", "seeds", "change", "paper_change")  # fmt: skip


# ---- what is there ------------------------------------------------------------------------------


def about(number: int, scale: Scale, command: str) -> dict[str, Any]:
    """What a table's results begin with: its title, and where they come from."""
    title = f"Table {number}. {paper.CAPTIONS[number]}"
    return {
        "title": f"{scale.title} ({title})" if scale.title else title,
        "number": number,
        "scale": scale.name,
        "smoke": scale.name == "smoke",
        "controls": scale.controls,
        "command": command,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(PACKAGES),
    }


def collect(options: Options, rows: list[Row], command: str) -> dict[str, Any]:
    """One entry per row; the other files are written from it, and it is table<N>.json."""
    scale = options.scale
    results = about(options.number, scale, command) | {
        "samples": options.samples,
        "seeds": list(options.seeds),
        "rows": [_row(options, list(seeds)) for _, seeds in groupby(rows, key=lambda r: r.name)],
    }
    for _, group in _groups(results) if scale.controls else ():
        if len(group) == 2:
            _compare(*group)
    return results


def _row(options: Options, rows: Sequence[Row]) -> dict[str, Any]:
    """A row from its runs by one seed each."""
    row = rows[0]
    first = next(iter(row.cells.values()))
    nfes = dict.fromkeys([*row.cells, *row.scores, *row.others])
    return {
        "row": row.name,
        "dataset": dataset_of(first, options.scale.data if options.scale.controls else ""),
        "method": first.method,
        "sampler": row.sampler,
        "preset": row.preset.name,
        "projection": row.preset.projection,
        "k": row.preset.k,
        "gamma": row.preset.gamma,
        "checkpoint": row.checkpoint,
        "failed": next(filter(None, (failure(r.chain(pending=True)) for r in rows)), None),
        "cells": [_cell(rows, nfe) for nfe in sorted(nfes, reverse=True)],
    }


def dataset_of(cell: paper.Row, data: str = "") -> str:
    """As in CIFAR-10 (EDM cond.); `data` takes the paper's place."""
    conditional = " cond." if cell.conditional else ""
    return f"{data or DATASETS[cell.dataset]} ({cell.backbone.upper()}{conditional})"


def failure(pending: list[Job]) -> dict[str, str] | None:
    """The first of these jobs whose last attempt did not end well, with the reason."""
    for job in pending:
        state, log = job.state(), str(job.folder / LOG)
        if state:
            # No word about the end: killed, or running this very moment.
            reason = state.get("reason", f"begun on {state.get('host')} and not finished")
            status = "failed" if state.get("status") == "failed" else "stopped"
            return {"job": job.name, "status": status, "reason": reason, "log": log}
        if job.damaged():
            reason = f"{job.output} is damaged; the same command makes it again"
            return {"job": job.name, "status": "damaged", "reason": reason, "log": log}
    return None


def _cell(rows: Sequence[Row], nfe: int) -> dict[str, Any]:
    """The mean over the seeds that are there, with their standard deviation and each number."""
    reported = rows[0].cells.get(nfe)
    cell = {
        "nfe": nfe,
        "paper_fid": reported.fid_text if reported else None,
        "paper_recall": reported.recall_text if reported else None,
        "fid": None,
        "recall": None,
    }
    if nfe not in rows[0].scores:
        reason = "the sampler cannot spend exactly this many" if nfe in rows[0].others else ""
        return cell | {"status": "not asked for", "reason": reason}
    found = [(row.seed, _scores(row, nfe)) for row in rows]
    done = {seed: scores for seed, scores in found if scores["status"] == "done"}
    cell["status"] = next((s["status"] for _, s in found if s["status"] != "done"), "done")
    if not done:
        return cell
    cell = next(iter(done.values())) | cell
    if len(rows) > 1:
        cell["asked_seeds"] = len(rows)
        cell["seeds"] = {seed: {n: s.get(n) for n in DIGITS} for seed, s in done.items()}
        cell["commands"] = [command for s in done.values() for command in s["commands"]]
    for name in ("fid", "recall", "precision"):
        values = [s[name] for s in done.values() if s.get(name) is not None]
        cell[name] = fmean(values) if values else None
        if len(rows) > 1:
            cell[f"{name}_sd"] = stdev(values) if len(values) > 1 else None
    return cell


def _scores(row: Row, nfe: int) -> dict[str, Any]:
    """What one seed's jobs left."""
    score, sample = row.scores[nfe], row.samples[nfe]
    record = score.record()
    if record is None:
        found = failure([job for job in (sample, score) if job.record() is None])
        return {"status": found["status"] if found else "open"}
    made = [job for job in (sample.record(), record) if job]  # samples may be deleted since
    scores = read_json(score.output)
    return {
        "status": "done",
        **{name: scores.get(name) for name in KEPT},
        "images": str(sample.output),
        "commands": [job["command"] for job in made],
    }


def _compare(control: dict, row: dict) -> None:
    """Adds the change of FID against the control in per cent: ours, of the means over the seeds
    that both have, and the paper's."""
    for cell, before in zip(row["cells"], control["cells"], strict=True):
        a, b = _fids(before), _fids(cell)
        both = a.keys() & b.keys()
        cell["change"] = _change(*(fmean(f[s] for s in both) if both else None for f in (a, b)))
        cell["paper_change"] = _change(before["paper_fid"], cell["paper_fid"])


def _change(before: float | str | None, after: float | str | None) -> float | None:
    return None if None in (before, after) else 100 * (float(after) / float(before) - 1)


def _fids(cell: dict) -> dict[int, float]:
    """FID by seed; of a single seed under 0."""
    seeds = cell.get("seeds", {0: cell})
    return {seed: c["fid"] for seed, c in seeds.items() if c["fid"] is not None}


# ---- files --------------------------------------------------------------------------------------


def write_all(results: dict[str, Any], out: Path) -> list[Path]:
    """Writes table<N>.json, .csv, .md, .tex and .png into `out`; returns their paths."""
    stem = out / f"table{results['number']}"
    files = [stem.with_suffix(f".{kind}") for kind in ("json", "csv", "md", "tex", "png")]
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
    """Our number with the paper's digits, ± its spread, and how many seeds there are if some are
    missing; or in a word why there is none."""
    if cell[name] is None:
        return cell["status"] if cell["status"] in ("failed", "stopped", "damaged") else OPEN
    digits = 3 if cell[name] < 1 else DIGITS[name]  # FIDs of small networks
    spread = cell.get(f"{name}_sd")
    text = f"{cell[name]:.{digits}f}" + (f" ± {spread:.{digits}f}" if spread is not None else "")
    there, asked = len(cell.get("seeds", ())), cell.get("asked_seeds", 0)
    return f"{text} ({there} of {asked} seeds)" if there < asked else text


def pair(fid: str | None, recall: str | None) -> str:
    """FID / recall, or one word if both say the same, such as that there is no number."""
    return fid or OPEN if fid == recall else f"{fid or OPEN} / {recall or OPEN}"


def per_cent(value: float | None) -> str:
    """A change of FID."""
    return OPEN if value is None else f"{value:+.0f} %"


def legend(results: dict) -> str:
    """What the numbers of a cell are."""
    if not results["controls"]:
        return "FID / recall: ours, and the paper's in brackets."
    n = len(results["seeds"])
    spread = f", mean ± standard deviation of {n} seeds" if n > 1 else ""
    return (
        f"FID / recall{spread}; change: OGDM's FID against the control's, and in brackets the "
        "paper's, against the baseline, on its own data."
    )


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
        cells = [cell_of(row, nfe) for nfe in nfes]
        mine = [pair(ours(cell, "fid"), ours(cell, "recall")) for cell in cells]
        theirs = [pair(cell["paper_fid"], cell["paper_recall"]) for cell in cells]
        if not results["controls"]:
            mine = [f"{a} ({b})" for a, b in zip(mine, theirs, strict=True)]
        rows.append([row["dataset"], method_of(results, row), *mine])
        if any("change" in cell for cell in cells):
            changes = [(cell.get("change"), cell.get("paper_change")) for cell in cells]
            texts = [f"{per_cent(a)} ({per_cent(b)})" for a, b in changes]
            rows.append([row["dataset"], "change", *texts])
    return aligned(rows)


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows of Markdown, the first one the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return [text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]]


def to_markdown(results: dict) -> str:
    """The table, what stopped, and where the numbers come from."""
    stopped = [f"- {line}" for line in failures(results)]
    notes = [text for line in results.get("notes", ()) for text in (line, "")]
    made = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    settings = ""
    if "seeds" in results:
        seeds = ", ".join(map(str, results["seeds"]))
        settings = f"{results['samples']:,} samples per cell, seed {seeds}. "
    return "\n".join([
        f"# {results['title']}", "", legend(results), "",
        *lines(results), "", *notes, *(["Rows that stopped:", "", *stopped, ""] if stopped else []),
        f"![FID over NFE](table{results['number']}.png)", "",
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
            seeds = len(cell["seeds"]) if "seeds" in cell else ""
            more = {"failed_job": failed, "title": results["title"], "seeds": seeds}
            writer.writerow(row | cell | more)
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
    measures = r" & FID$\downarrow$ & Rec.$\uparrow$" * len(nfes)
    rules = "".join(rf"\cmidrule(lr){{{3 + 2 * i}-{4 + 2 * i}}}" for i in range(len(nfes)))
    text = [
        f"% {results['command']}",
        f"% commit {results['commit']}, {results['written']}",
        r"\begin{table*}[t]",
        r"    \centering",
        rf"    \caption{{{_escape(results['title'])}."
        rf"{'' if results['controls'] else ' In grey: the paper' + chr(39) + 's numbers.'}}}",
        rf"    \begin{{tabular}}{{cl{'cc' * len(nfes)}}}",
        r"    \toprule",
        rf"    \multicolumn{{2}}{{c}}{{NFEs}} & {heads} \\",
        f"    {rules}",
        rf"    Dataset~(Backbone) & Method{measures} \\",
    ]
    for i, ((dataset, _), rows) in enumerate(_groups(results)):
        text.append(rf"    \cmidrule(lr){{1-{2 * len(nfes) + 2}}}" if i else r"    \midrule")
        height = len(rows) * (1 if results["controls"] else 2)
        text.append(rf"    \multirow{{{height}}}{{*}}{{{_escape(dataset)}}}")
        for row in rows:
            mine = [_bold(rows, row, nfe, name) for nfe in nfes for name in DIGITS]
            theirs = [cell_of(row, nfe)[f"paper_{name}"] or "--" for nfe in nfes for name in DIGITS]
            grey = [rf"\textcolor{{gray}}{{{number}}}" for number in ("the paper's", *theirs)]
            text.append(" & ".join(["    ", _escape(method_of(results, row)), *mine]) + r" \\")
            text += [] if results["controls"] else [" & ".join(["    ", *grey]) + r" \\"]
    text += [r"    \bottomrule", r"    \end{tabular}", r"\end{table*}"]
    text += [f"% {line}" for line in (*results.get("notes", ()), *failures(results))]
    return "\n".join(text) + "\n"


def _bold(rows: list[dict], row: dict, nfe: int, name: str) -> str:
    """Our number, bold if it is the lowest FID or the highest recall of two rows at the least."""
    cell, cells = cell_of(row, nfe), [cell_of(r, nfe) for r in rows]
    text = _escape(ours(cell, name))
    values = [c[name] for c in cells if c["status"] == "done" and c[name] is not None]
    best = (min if name == "fid" else max)(values, default=None)
    bold = len(values) > 1 and cell["status"] == "done" and cell[name] == best
    return rf"\textbf{{{text}}}" if bold else text


def _escape(text: str) -> str:
    return text.translate(str.maketrans(LATEX))


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
    lines = [("fid", "-", "")]
    if not results["controls"]:
        lines.insert(0, ("paper_fid", "--", "white"))
    looks = {}  # colour and marker; markers differ where there are more methods than colours
    for i, method in enumerate(methods):
        marker = MARKERS[(i + i // 7) % 7] if len(methods) > len(PALETTE) else "o"
        looks[method] = (method_colour(method, i), marker)
    for ax, ((dataset, sampler), rows) in zip(axes.flat, groups, strict=False):
        for row in rows:
            colour, marker = looks[row["method"]]
            for name, line, face in lines:
                cells = [c for c in row["cells"] if c[name] is not None]
                at = [c["nfe"] for c in cells], [float(c[name]) for c in cells]
                spread = [c.get(f"{name}_sd") or 0.0 for c in cells]
                if cells:
                    ax.errorbar(*at, spread if any(spread) else None, fmt=line + marker,
                                color=colour, mfc=face or colour)  # fmt: skip
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
    if not results["controls"]:
        dots = {"color": GREY, "marker": "o"}
        keys += [Line2D([], [], **dots, label="ours"),
                 Line2D([], [], **dots, ls="--", mfc="white", label="the paper's")]  # fmt: skip
    fig.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), int(size[0] / 1.2)))
    fig.suptitle("\n".join(textwrap.wrap(results["title"], int(size[0] * 13))), fontsize=10)
    return save(fig, path, results["command"], small_print=False)
