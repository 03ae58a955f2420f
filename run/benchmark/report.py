"""The results as a page with a table, and as a picture."""

from pathlib import Path

from run.figures import style

from .cases import CASES

COLUMNS = ("case", "time", "quartiles", "memory", "operations", "denoiser", "D", "what it is")


def markdown(results: dict, columns: int = len(COLUMNS)) -> str:
    """The report as a page, its table's first `columns`; a dash is what was not measured."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    table = [COLUMNS, ["---"] * len(COLUMNS)]
    table.append(["baseline", "1.00", "", "1.00", "1.00", "1.00", "0.00", "the plain step"])
    for name, case in results["cases"].items():
        table.append([
            name, number(case.get("ratio")), "-".join(map(number, case.get("quartiles", []))),
            number(case.get("memory_ratio")), number(case["flops_ratio"]),
            number(case["evaluations"]["denoiser_forward"]),
            number(case["evaluations"]["d_forward"]), CASES[name].words,
        ])  # fmt: skip
    setup, b = results["setup"], results["baseline"]
    plain = f"{b['flops'] / 1e9:.0f} GFLOP"
    if "seconds" in b:
        plain = f"{b['seconds']:.2f} s, {plain}, {b['peak_bytes'] / 2**20:,.0f} MiB"
    words = (
        f"{setup['network']}, {setup['parameters'] / 1e6:.1f} M parameters, batch "
        f"{setup['batch']}, {setup['resolution']}x{setup['resolution']}, {setup['device']}, "
        f"{setup['threads']} threads. The plain step takes {plain}. Time, memory and operations "
        "of a whole training step are ratios to the plain step's; denoiser and D are evaluations "
        "per image."
    )
    lines = "\n".join(f"| {' | '.join(line[:columns])} |" for line in table)
    return f"`{results['command']}`\n\n{words}\n\n{lines}\n"


def picture(results: dict, path: Path) -> Path:
    """Time, operations and memory of each case, in plain steps."""
    cases = {name: case for name, case in results["cases"].items() if "ratio" in case}
    fig, ax = style.figure(size=(7.6, 0.9 + 0.5 * len(cases)), layout="constrained")
    for i, (key, label, colour) in enumerate((
        ("ratio", "time (line: quartiles)", style.BLUE),
        ("flops_ratio", "operations", style.SKY),
        ("memory_ratio", "peak memory", style.ORANGE),
    )):  # fmt: skip
        for row, case in enumerate(cases.values()):
            y, value = row + 0.26 * (i - 1), case[key]
            ax.barh(y, value, height=0.24, color=colour, label=None if row else label)
            if key == "ratio":
                ax.plot(case["quartiles"], [y, y], color=style.BLACK, linewidth=1)
            end = max(value, *case["quartiles"]) if key == "ratio" else value
            ax.text(end + 0.03, y, f"{value:.2f}", va="center", fontsize=7)
    ax.set_yticks(range(len(cases)), list(cases))
    ax.invert_yaxis()
    ax.axvline(1, color=style.BLACK, linewidth=0.6, linestyle=":")
    ax.set_xlabel("a training step with observation, in plain steps")
    ax.grid(axis="y", visible=False)
    fig.legend(loc="outside upper center", ncols=3, fontsize=8)
    return style.save(fig, path, results["command"], small_print=False)
