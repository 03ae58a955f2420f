"""A table's results for a terminal, as Markdown, CSV, JSON, LaTeX, and as a picture."""

from __future__ import annotations

import csv
import io
import json
from itertools import groupby
from pathlib import Path

from .stages import write_text

FORMATS = ("json", "csv", "md", "tex", "png")
OPEN = "–"
DIGITS = {"fid": 2, "recall": 3}  # as the paper prints them


def write_all(results: dict, out: Path) -> list[Path]:
    """Writes table<N>.json, .csv, .md, .tex and .png into `out`; returns their paths."""
    stem = f"table{results['number']}"
    texts = {
        "json": json.dumps(results, indent=1) + "\n",
        "csv": to_csv(results),
        "md": to_markdown(results, f"{stem}.png"),
        "tex": to_latex(results),
    }
    for suffix, text in texts.items():
        write_text(out / f"{stem}.{suffix}", text)
    plot(results, out / f"{stem}.png")
    return [out / f"{stem}.{suffix}" for suffix in FORMATS]


def number(value: float | None, digits: int) -> str:
    """With the digits that the paper prints."""
    return OPEN if value is None else f"{value:.{digits}f}"


def nfes_of(results: dict) -> list[int]:
    """The columns: every NFE that the paper has or that was asked for, large ones first."""
    return sorted({cell["nfe"] for row in results["rows"] for cell in row["cells"]}, reverse=True)


def cell_of(row: dict, nfe: int) -> dict:
    """A row's cell; an empty one where the row has none."""
    empty = {"fid": None, "recall": None, "paper_fid": None, "paper_recall": None, "status": ""}
    return next((cell for cell in row["cells"] if cell["nfe"] == nfe), empty)


def ours(cell: dict, name: str, digits: int) -> str:
    """Our number, or in a word why there is none."""
    if cell["status"] in ("failed", "stopped"):
        return cell["status"]
    return number(cell[name], digits)


def failures(results: dict) -> list[str]:
    """One line a row that stopped."""
    return [
        f"{row['row']}: stage {row['failed']['stage']} {row['failed']['status']}: "
        f"{row['failed']['reason']}"
        for row in results["rows"] if row["failed"]
    ]  # fmt: skip


def method_of(row: dict, several_samplers: bool) -> str:
    """The method, with its sampler where a table has more than one; a mark if it stopped."""
    sampler = f", {_sampler(row)}" if several_samplers else ""
    return f"{row['method']}{sampler}{' (stopped)' if row['failed'] else ''}"


def _sampler(row: dict) -> str:
    from run.figures.style import sampler_name

    return sampler_name(row["sampler"])


def _several(results: dict) -> bool:
    return len({row["sampler"] for row in results["rows"]}) > 1


# ---- terminal, Markdown, CSV --------------------------------------------------------------------


def to_terminal(results: dict):
    """A rich table, FID / recall: ours, and the paper's below in brackets."""
    from rich import box
    from rich.table import Table

    table = Table(title=results["title"], title_style="bold", box=box.SIMPLE_HEAD,
                  caption="FID / recall: ours, and the paper's in brackets")  # fmt: skip
    table.add_column("dataset (backbone)")
    table.add_column("method")
    nfes = nfes_of(results)
    for nfe in nfes:
        table.add_column(f"NFE {nfe}", justify="right", no_wrap=True)
    groups = groupby(results["rows"], key=lambda row: (row["dataset"], row["sampler"]))
    for (dataset, _), rows in groups:
        table.add_section()
        for i, row in enumerate(rows):
            words = [dataset if i == 0 else "", method_of(row, _several(results))]
            for nfe in nfes:
                cell = cell_of(row, nfe)
                words.append(_pair(ours(cell, "fid", 2), ours(cell, "recall", 3)))
                words[-1] += f"\n[dim]({_pair(cell['paper_fid'], cell['paper_recall'])})[/]"
            table.add_row(*words, style="red" if row["failed"] else None)
    return table


def _pair(fid: str | None, recall: str | None) -> str:
    """One word if both say the same, such as that there is no number."""
    return f"{fid} / {recall}" if fid != recall else (fid or OPEN)


def to_markdown(results: dict, picture: str) -> str:
    """The table, what stopped, and where the numbers come from."""
    nfes = nfes_of(results)
    lines = [f"# {results['title']}", "", "Ours, and the paper's in brackets.", ""]
    header = [f"NFE {nfe}: {name}" for nfe in nfes for name in ("FID", "recall")]
    lines.append("| " + " | ".join(["dataset (backbone)", "method", *header]) + " |")
    lines.append("|" + "---|" * 2 + "---:|" * len(header))
    for row in results["rows"]:
        words = [row["dataset"], method_of(row, _several(results))]
        for nfe in nfes:
            cell = cell_of(row, nfe)
            words.append(f"{ours(cell, 'fid', 2)} ({cell['paper_fid'] or OPEN})")
            words.append(f"{ours(cell, 'recall', 3)} ({cell['paper_recall'] or OPEN})")
        lines.append("| " + " | ".join(words) + " |")
    if stopped := failures(results):
        lines += ["", "Rows that stopped:", "", *(f"- {line}" for line in stopped)]
    versions = ", ".join(f"{name} {v}" for name, v in results["versions"].items())
    lines += [
        "",
        f"![FID over NFE, ours and the paper's]({picture})",
        "",
        f"{results['samples']:,} samples a cell, seed {results['seed']}. Made by",
        "",
        f"    {results['command']}",
        "",
        f"at {results['written']}, commit {results['commit']}, {versions}.",
        "",
    ]
    return "\n".join(lines)


def to_csv(results: dict) -> str:
    """One line a cell."""
    out = io.StringIO()
    names = ["row", "dataset", "method", "sampler", "nfe", "status", "fid", "paper_fid"]
    names += [
        "recall",
        "paper_recall",
        "reference_images",
        "sample_images",
        "failed_stage",
        "title",
    ]
    writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in results["rows"]:
        failed = row["failed"]["stage"] if row["failed"] else ""
        for cell in row["cells"]:
            writer.writerow(row | cell | {"failed_stage": failed, "title": results["title"]})
    return out.getvalue()


# ---- LaTeX --------------------------------------------------------------------------------------


def to_latex(results: dict) -> str:
    r"""The paper's layout, with its own numbers in grey below ours.

    Needs \usepackage{booktabs,multirow,xcolor}; the best of a group is bold, as in the paper.
    """
    nfes, samplers = nfes_of(results), _several(results)
    columns = len(nfes) * 2 + 2
    lines = [
        f"% {results['command']}",
        f"% commit {results['commit']}, {results['written']}",
        r"\begin{table*}[t]",
        r"    \centering",
        rf"    \caption{{{_escape(results['title'])}. In grey: the paper's numbers.}}",
        rf"    \begin{{tabular}}{{cl{'cc' * len(nfes)}}}",
        r"    \toprule",
        r"    \multicolumn{2}{c}{NFEs} & "
        + " & ".join(rf"\multicolumn{{2}}{{c}}{{{nfe}}}" for nfe in nfes) + r" \\",
        "    " + "".join(rf"\cmidrule(lr){{{3 + 2 * i}-{4 + 2 * i}}}" for i in range(len(nfes))),
        "    Dataset~(Backbone) & Method"
        + r" & FID$\downarrow$ & Rec.$\uparrow$" * len(nfes) + r" \\",
        r"    \midrule",
    ]  # fmt: skip
    groups = groupby(results["rows"], key=lambda row: (row["dataset"], row["sampler"]))
    for i, ((dataset, _), rows) in enumerate(groups):
        rows = list(rows)
        if i:
            lines.append(rf"    \cmidrule(lr){{1-{columns}}}")
        lines.append(rf"    \multirow{{{2 * len(rows)}}}{{*}}{{{_escape(dataset)}}}")
        best = _best(rows, nfes)
        for row in rows:
            lines += _latex_rows(row, nfes, best, samplers)
    lines += [r"    \bottomrule", r"    \end{tabular}", r"\end{table*}"]
    lines += [f"% {line}" for line in failures(results)]
    return "\n".join(lines) + "\n"


def _latex_rows(row: dict, nfes: list[int], best: dict, samplers: bool) -> list[str]:
    mine, theirs = [], []
    for nfe in nfes:
        cell = cell_of(row, nfe)
        for name, digits in DIGITS.items():
            text = ours(cell, name, digits).replace(OPEN, "--")
            bold = cell[name] is not None and round(cell[name], digits) == best[nfe, name]
            mine.append(rf"\textbf{{{text}}}" if bold else text)
            theirs.append(rf"\textcolor{{gray}}{{{cell[f'paper_{name}'] or '--'}}}")
    method = _escape(method_of(row, samplers))
    return [
        f"    & {method} & " + " & ".join(mine) + r" \\",
        r"    & \textcolor{gray}{the paper's} & " + " & ".join(theirs) + r" \\",
    ]


def _best(rows: list[dict], nfes: list[int]) -> dict[tuple[int, str], float | None]:
    """The lowest FID and the highest recall of a group as printed, if there are two at least."""
    best = {}
    for nfe in nfes:
        for name, choose in (("fid", min), ("recall", max)):
            values = [v for row in rows if (v := cell_of(row, nfe)[name]) is not None]
            best[nfe, name] = round(choose(values), DIGITS[name]) if len(values) > 1 else None
    return best


def _escape(text: str) -> str:
    return "".join(f"\\{c}" if c in "&%$#_{}" else c for c in text).replace("–", "--")


# ---- picture ------------------------------------------------------------------------------------


def plot(results: dict, path: Path) -> Path:
    """FID over NFE: a panel for each data set, backbone and sampler; the paper's lines dashed."""
    from matplotlib.lines import Line2D

    from run.figures.style import GREY, figure, method_colour, save

    groups = [
        (key, list(rows))
        for key, rows in groupby(results["rows"], key=lambda row: (row["dataset"], _sampler(row)))
    ]
    width = min(len(groups), 3)
    height = -(-len(groups) // width)
    size = (max(3.3 * width, 5.0), 2.6 * height + 0.9)
    fig, axes = figure(height, width, size=size, squeeze=False, layout="constrained")
    methods = list(dict.fromkeys(row["method"] for row in results["rows"]))
    for ax, ((dataset, sampler), rows) in zip(axes.flat, groups, strict=False):
        for row in rows:
            colour = method_colour(row["method"], methods.index(row["method"]))
            for name, style in (("paper_fid", "--o"), ("fid", "-o")):
                points = [(c["nfe"], float(c[name])) for c in row["cells"] if c[name] is not None]
                face = "white" if name == "paper_fid" else colour
                ax.plot(
                    *zip(*points, strict=True), style, color=colour, mfc=face
                ) if points else None
        ax.set(title=f"{dataset}, {sampler}", xlabel="NFE", ylabel="FID", yscale="log")
        nfes = sorted({c["nfe"] for row in rows for c in row["cells"]})
        ax.set_xticks(nfes, [str(nfe) for nfe in nfes])
        _plain_log_ticks(ax)
    for ax in list(axes.flat)[len(groups) :]:
        ax.set_axis_off()
    keys = [Line2D([], [], color=method_colour(m, i), label=m) for i, m in enumerate(methods)]
    line = {"color": GREY, "marker": "o"}
    keys.append(Line2D([], [], **line, label="ours"))
    keys.append(Line2D([], [], **line, ls="--", mfc="white", label="the paper's"))
    fig.legend(handles=keys, loc="outside lower center", ncols=len(keys))
    fig.suptitle(_wrap(results["title"], int(size[0] * 13)), fontsize=10)
    return save(fig, path, results["command"], small_print=False)


def _plain_log_ticks(ax) -> None:
    """Plain numbers at a few round places, however many powers of ten a panel spans."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    low, high = ax.get_ylim()
    subs = (1, 2, 5) if high / low < 100 else (1,)
    major = MaxNLocator(5) if high / low < 10 else LogLocator(subs=subs)
    ax.yaxis.set_major_locator(major)
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.yaxis.set_minor_locator(NullLocator())


def _wrap(text: str, width: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))
