"""The results as a page with a table, and as a picture."""

from pathlib import Path

from run.figures import style

from .flags import CASES

COLUMNS = ("case", "time", "quartiles", "memory", "operations", "denoiser", "D", "what it is")


def markdown(results: dict, columns: int = len(COLUMNS)) -> str:
    """The report as a page, with the table's first `columns`; a dash is what was not measured."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    setup, b = results["setup"], results["baseline"]
    memory = "1.00" if "peak_bytes" in b else "-"
    table = [COLUMNS, ["---"] * len(COLUMNS)]
    table.append(["baseline", "1.00", "", memory, "1.00", "1.00", "0.00", "the plain step"])
    for name, case in results["cases"].items():
        ratios = [number(case.get(key)) for key in ("memory_ratio", "flops_ratio")]
        evaluations = [number(case["evaluations"][key]) for key in ("denoiser_forward", "d_forward")]
        quartiles = "-".join(map(number, case.get("quartiles", [])))
        table.append([name, number(case.get("ratio")), quartiles, *ratios, *evaluations, CASES[name].words])
    plain = [f"{b['seconds']:.2f} s"] if "seconds" in b else []
    plain += [f"{b['flops'] / 1e9:.0f} GFLOP"]
    plain += [f"{b['peak_bytes'] / 2**20:,.0f} MiB"] if "peak_bytes" in b else []
    words = (
        f"{setup['network']}, {setup['parameters'] / 1e6:.1f} M parameters, batch {setup['batch']}, "
        f"{setup['resolution']}x{setup['resolution']}, {setup['device']}, {setup['threads']} threads. The plain step "
        f"takes {', '.join(plain)}. Time, memory (on a GPU) and operations of a whole training step are ratios to the "
        "plain step's; denoiser and D are evaluations per image."
    )
    lines = "\n".join(f"| {' | '.join(line[:columns])} |" for line in table)
    return f"`{results['command']}`\n\n{words}\n\n{lines}\n"


def picture(results: dict, path: Path) -> Path:
    """Time, operations and, where it was measured, memory of each case, in plain steps."""
    cases = {name: case for name, case in results["cases"].items() if "ratio" in case}
    bars = [("ratio", "time (line: quartiles)", style.BLUE), ("flops_ratio", "operations", style.SKY)]
    if "peak_bytes" in results["baseline"]:
        bars.append(("memory_ratio", "peak memory", style.ORANGE))
    fig, ax = style.figure(size=(7.6, 0.9 + 0.5 * len(cases)), layout="constrained")
    for i, (key, label, colour) in enumerate(bars):
        for row, case in enumerate(cases.values()):
            y, value = row + 0.26 * (i - (len(bars) - 1) / 2), case[key]
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
