"""A table's picture: FID over NFE, a panel for each data set, backbone and sampler."""

import textwrap
from itertools import groupby
from pathlib import Path

from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from run.figures.style import GREY, MARKERS, PALETTE, figure, method_colour, sampler_name, save


def groups_of(rows: list[dict]) -> list[tuple[tuple[str, str], list[dict]]]:
    """The rows of each data set and sampler, which stand together."""
    by_place = groupby(rows, lambda row: (row["dataset"], row["sampler"]))
    return [(place, list(rows)) for place, rows in by_place]


def has_papers_numbers(results: dict) -> bool:
    """Whether the paper has a cell of the table."""
    return any(cell["paper_fid"] is not None for row in results["rows"] for cell in row["cells"])


def plot(results: dict, path: Path) -> Path:
    """FID over NFE: a panel for each data set, backbone and sampler; the paper's lines dashed."""
    groups = groups_of(results["rows"])
    width = min(len(groups), 3)
    height = -(-len(groups) // width)
    size = (max(3.3 * width, 5.0), 2.6 * height + 0.9)
    fig, axes = figure(height, width, size=size, squeeze=False, layout="constrained")
    methods = list(dict.fromkeys(row["method"] for row in results["rows"]))
    lines = [("fid", "-", "")]
    with_paper = not results["controls"] and has_papers_numbers(results)
    if with_paper:
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
    if with_paper:
        dots = {"color": GREY, "marker": "o"}
        keys += [Line2D([], [], **dots, label="ours"),
                 Line2D([], [], **dots, ls="--", mfc="white", label="the paper's")]  # fmt: skip
    fig.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), int(size[0] / 1.2)))
    fig.suptitle("\n".join(textwrap.wrap(results["title"], int(size[0] * 13))), fontsize=10)
    return save(fig, path, results["command"], small_print=False)
