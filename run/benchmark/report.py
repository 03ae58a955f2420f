"""The results as JSON, as a table in Markdown and in the terminal, and as a picture."""

from __future__ import annotations

from pathlib import Path

from .cases import CASES
from .rounds import PHASE_NAMES, PHASES

COLUMNS = ("case", "time", "quartiles", "memory", "operations", "denoiser", "D", "what it is")


def rows(results: dict) -> list[list[str]]:
    """One row a case; what was not measured is a dash."""

    def number(value: float | None, form: str = "{:.2f}") -> str:
        return "-" if value is None else form.format(value)

    table = []
    if "baseline" in results:
        table.append(["baseline", "1.00", "", "1.00", "1.00", "1.00", "0.00", "the plain step"])
    for name, case in results.get("cases", {}).items():
        evaluations = case.get("evaluations", {})
        spread = case.get("quartiles")
        table.append([
            name, number(case.get("ratio")),
            "-" if spread is None else f"{spread[0]:.2f}-{spread[1]:.2f}",
            number(case.get("memory_ratio")), number(case.get("flops_ratio")),
            number(evaluations.get("denoiser_forward")), number(evaluations.get("d_forward")),
            CASES[name].words,
        ])  # fmt: skip
    return table


def extra_lines(results: dict) -> list[str]:
    """The rest of the results in one sentence each."""
    lines = []
    if "baseline" in results:
        b = results["baseline"]
        lines.append(
            f"The baseline's step takes {b['seconds']:.2f} s (quartiles {b['quartiles'][0]:.2f} "
            f"to {b['quartiles'][1]:.2f})" + (
                f", {b['flops'] / 1e9:.0f} GFLOP and {b['peak_bytes'] / 2**20:.0f} MiB"
                if "flops" in b else ""
            ) + "."
        )  # fmt: skip
    if "sampling" in results:
        s = results["sampling"]
        lines.append(
            f"Sampling with an OGDM-trained network takes {s['ratio']:.3f} of a plain one's time "
            f"(quartiles {s['quartiles'][0]:.3f} to {s['quartiles'][1]:.3f}), with "
            f"{s['evaluations']['ogdm']['denoiser']} evaluations against "
            f"{s['evaluations']['plain']['denoiser']}, and {s['evaluations']['ogdm']['d']} of D."
        )
    if "bookkeeping" in results:
        b = results["bookkeeping"]
        lines.append(
            f"Lookahead, projection, losses and statistics take {1000 * b['seconds']:.2f} ms, "
            f"{100 * b['share_of_step']:.2f} % of a baseline's step."
        )
    if "checkpoint" in results:
        c = results["checkpoint"]
        lines.append(
            f"The observer's checkpoint ({c['parameters'] / 1e6:.1f} M parameters, "
            f"{c['bytes'] / 2**20:.0f} MiB) is written in {c['seconds']:.2f} s."
        )
    if "import" in results:
        seconds = results["import"]["seconds_beyond_torch"]
        lines.append(f"import ogdm_core takes {seconds:.3f} s beyond torch's own import.")
    return lines


def growth_rows(results: dict) -> list[list[str]]:
    """One row a size: batch, resolution, channels, ratios; a dash where nothing was timed."""

    def text(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    names = _growth_names(results)
    return [
        [str(g["batch"]), str(g["resolution"]), str(g["channels"]), text(g.get("baseline_seconds")),
         *(text(g["cases"].get(n, {}).get("ratio")) for n in names),
         *(text(g["cases"].get(n, {}).get("flops_ratio")) for n in names)]
        for g in results.get("growth", [])
    ]  # fmt: skip


def growth_columns(results: dict) -> list[str]:
    """Headings of `growth_rows`."""
    names = _growth_names(results)
    return ["batch", "resolution", "channels", "baseline, s",
            *(f"{n}, time" for n in names), *(f"{n}, operations" for n in names)]  # fmt: skip


def _growth_names(results: dict) -> list[str]:
    """The cases of any size: sizes that were measured at different times may differ in them."""
    return list(dict.fromkeys(name for g in results.get("growth", []) for name in g["cases"]))


def markdown(results: dict) -> str:
    """The whole report as a page."""
    setup = results["setup"]
    head = (
        f"{setup['network']}, {setup['parameters'] / 1e6:.1f} M parameters, batch "
        f"{setup['batch']}, {setup['resolution']}x{setup['resolution']}, {setup['device']}, "
        f"{setup['threads']} threads. Time, memory and operations of a whole training step, as "
        "ratios to the baseline's; evaluations an image of the denoiser and of D."
    )
    parts = [f"`{results['command']}`", head, _grid(list(COLUMNS), rows(results))]
    parts += ["\n".join(f"- {line}" for line in extra_lines(results))]
    if results.get("growth"):
        parts.append(_grid(growth_columns(results), growth_rows(results)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _grid(columns: list[str], table: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *table]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(results: dict, console) -> None:
    """The table in a terminal."""
    from rich.table import Table

    table = Table(title="a training step, in steps of the baseline")
    for column in COLUMNS[:-1]:  # the words need more room than a terminal has; FILE.md has them
        table.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    for row in rows(results):
        table.add_row(*row[:-1])
    console.print(table)
    for line in extra_lines(results):
        console.print(line, highlight=False, soft_wrap=True)
    if results.get("growth"):
        grown = Table(*growth_columns(results), title="growth")
        for row in growth_rows(results):
            grown.add_row(*row)
        console.print(grown)


def picture(results: dict, path: Path) -> Path:
    """Where the time goes: one bar a case, stacked by phase, in steps of the baseline."""
    from run.figures import style

    colours = dict(zip(PHASES, (style.GREY, style.BLUE, style.SKY, style.RED, style.ORANGE,
                                style.BLACK), strict=True))  # fmt: skip
    bars = {"baseline": results["baseline"]["phases"]}
    bars |= {name: c["phases"] for name, c in results["cases"].items() if "phases" in c}
    fig, ax = style.figure(size=(7.6, 0.9 + 0.36 * len(bars)), layout="constrained")
    left = [0.0] * len(bars)
    for phase in PHASES:
        widths = [shares.get(phase, 0.0) for shares in bars.values()]
        ax.barh(list(bars), widths, left=left, color=colours[phase], label=PHASE_NAMES[phase],
                height=0.7)  # fmt: skip
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, (name, total) in enumerate(zip(bars, left, strict=True)):
        spread = results["cases"].get(name, {}).get("quartiles")
        if spread:
            ax.plot(spread, [i, i], color=style.BLACK, linewidth=1)
        ax.text(max(total, *(spread or [0])) + 0.03, i, f"{total:.2f}", va="center", fontsize=8)
    ax.invert_yaxis()
    ax.axvline(1, color=style.BLACK, linewidth=0.6, linestyle=":")
    ax.set_xlim(0, max(left) * 1.1)
    ax.set_xlabel("time of a training step, in steps of the baseline (line: quartiles)")
    ax.grid(axis="y", visible=False)
    fig.legend(loc="outside upper center", ncols=3, fontsize=8)
    return style.save(fig, path, results["command"], small_print=False)
