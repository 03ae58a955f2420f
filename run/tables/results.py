"""docs/results.md: tables that were made here, beside the paper's.

    python -m run.tables.results OUT/table1.json   keeps the table in docs/results/, writes the page
    python -m run.tables.results                   writes the page from docs/results/

The page's own words stay. A table stands between `<!-- table1-cpu -->` and `<!-- end -->`; a table
that the page does not have yet is added at its end.
"""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

from ogdm_core.cli import Parser, errors_in_one_line
from ogdm_core.files import read_json, write_json, write_text
from run.presets import get_preset
from run.provenance import ROOT

from . import paper, table

PAGE, KEPT = ROOT / "docs" / "results.md", ROOT / "docs" / "results"
LOCAL = {"checkpoint", "images", "commands", "failed", "portable"}


def without_local_paths(results: dict[str, Any]) -> dict[str, Any]:
    """The results without the paths of the machine that made them."""
    return _without_local(results) | {"command": results.get("portable", results["command"])}


def _without_local(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _without_local(value) for name, value in part.items() if name not in LOCAL}
    return [_without_local(value) for value in part] if isinstance(part, list) else part


def section(results: dict[str, Any]) -> str:
    """A table under its command, and the paper's below it."""
    number, seeds = results["number"], ", ".join(map(str, results["seeds"]))
    made = f"commit {results['commit'][:10]}, torch {results['versions']['torch']}"
    return "\n".join([
        "```bash", results["command"], "```", "",
        textwrap.fill(f"{results['title']}.", 120), "", *table.best_lines(results), *table.lines(results), "",
        textwrap.fill(f"{table.legend(results)} {results['samples']:,} samples per cell, seeds {seeds}; {made}.", 120),
        "", *table.further(results), *papers(number, results["rows"]),
    ])  # fmt: skip


def papers(number: int, rows: list[dict[str, Any]]) -> list[str]:
    """The paper's numbers: the baseline in place of a control, and OGDM's. Nothing for a table of ours."""
    theirs = paper.table(number)
    if theirs.ours:
        return []
    found = [["dataset (backbone)", "method", *(f"NFE {nfe}" for nfe in theirs.nfes)]]
    for row in rows:
        of = get_preset(row["preset"]).baseline if row["method"] == "control" else row["row"]
        cells = {c.nfe: c for c in theirs.cells
                 if of in (c.row, c.preset) and c.sampler == row["sampler"]}  # fmt: skip
        if not cells:  # a sampler that the paper does not have
            continue
        first = next(iter(cells.values()))
        found_cells = [cells.get(nfe) for nfe in theirs.nfes]
        texts = [table.pair(c and c.fid_text, c and c.recall_text) for c in found_cells]
        found.append([table.dataset_of(first), table.method_of({"rows": rows}, row | {
            "method": first.method}), *texts])  # fmt: skip
    return [f"The paper's Table {number}, for the same rows at full size:", "", *table.aligned(found)]


def page(text: str, sections: dict[str, str]) -> str:
    """The page with these tables in their places."""
    for name, content in sections.items():
        block = f"<!-- {name} -->\n{content}\n<!-- end -->"
        pattern = re.compile(rf"<!-- {name} -->\n.*?<!-- end -->", re.DOTALL)
        if pattern.search(text):
            text = pattern.sub(lambda _, block=block: block, text)
        else:
            text += f"\n{block}\n"
    return text


def sections() -> dict[str, str]:
    """Every table in docs/results/, by name."""
    files = sorted(KEPT.glob("table*.json"))
    return {file.stem: section(json.loads(file.read_text())) for file in files}


def read(file: Path) -> dict[str, Any]:
    """A table's results; ValueError if the file holds something else."""
    results = read_json(file)
    if not {"number", "scale", "seeds", "rows"} <= results.keys():
        raise ValueError(f"{file} is no table that was run: give the tableN.json of "
                         "run/reproduce_table1.sh, 2, 3, 7 or 9")  # fmt: skip
    return results


@errors_in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Keeps the tables that are given, and writes the page."""
    p = Parser(prog="python -m run.tables.results", description=__doc__)
    p.add_argument("tables", metavar="TABLE.json", type=Path, nargs="*", help="tables to keep")
    for results in [without_local_paths(read(file)) for file in p.parse_args(argv).tables]:
        write_json(KEPT / f"table{results['number']}-{results['scale']}.json", results)
    write_text(PAGE, page(PAGE.read_text(), sections()))
    print(PAGE)


if __name__ == "__main__":
    main()
