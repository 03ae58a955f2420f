"""Tables 4 and 8: numbers of Tables 1 to 3 beside other methods'.

They have no experiments of their own, so nothing runs here: run/reproduce_table4.sh and
run/reproduce_table8.sh read the scores that the other tables' jobs have left in --out, and name the
commands that make the rest.
"""

import argparse
import shlex
from itertools import groupby
from pathlib import Path
from typing import Any

from . import paper, table
from .jobs import read_json
from .scale import get_scale

# Row of the table -> the table and row that it repeats; by NFE where the paper took the best.
_OGDM = {25: (2, "cifar10-edm-ogdm-ft-heun"), 20: (1, "cifar10-edm-ogdm-ft"),
         15: (3, "cifar10-edm-ogdm-ft-s-pndm"), 10: (3, "cifar10-edm-ogdm-ft-s-pndm"),
         8: (3, "cifar10-edm-ogdm-ft-s-pndm")}  # fmt: skip
SOURCES: dict[int, dict[str, dict[int, tuple[int, str]] | tuple[int, str]]] = {
    4: {
        "cifar10-adm": (1, "cifar10-adm-baseline"),
        "cifar10-edm": (2, "cifar10-edm-baseline"),
        "cifar10-s-pndm": (3, "cifar10-edm-baseline-s-pndm"),
        "cifar10-f-pndm": (3, "cifar10-adm-baseline-f-pndm"),
        "cifar10-ogdm": _OGDM,
        "celeba64-adm": (1, "celeba64-adm-baseline"),
        "celeba64-s-pndm": (3, "celeba64-adm-baseline-s-pndm"),
        "celeba64-f-pndm": (3, "celeba64-adm-baseline-f-pndm"),
        "celeba64-ogdm": (3, "celeba64-adm-ogdm-s-pndm"),
    },
    8: {"cifar10-ogdm": _OGDM},
}
COPIED, ELSEWHERE = "†", "‡"
NOTES = {
    COPIED: "the paper copied these values from other papers",
    ELSEWHERE: "the paper's authors measured these values with a codebase that is not part of this project",
}


def main(args: argparse.Namespace, typed: str, out: Path) -> int:
    """Exit status 0 also where numbers are missing."""
    number = args.number
    if args.list:
        for name in paper.table(number).names:
            sources = [source(cell, number) for cell in paper.table(number).select(name)]
            repeated = [f"Table {s[0]}: {s[1]}" for s in dict.fromkeys(sources) if s]
            print(name, *repeated, sep="\n  ")
        return 0
    words = ["--out", str(args.out)] * bool(args.out)
    words += ["--scale", args.scale] * (args.scale != "paper")
    results = collect(number, out.absolute(), args.scale, typed)
    results["notes"] += missing(results, words)
    if args.dry_run:
        print(*missing(results, words), sep="\n")
        return 0
    files = table.write_all(results, out)
    print(results["title"], *table.lines(results), *results["notes"], sep="\n")
    print(f"{files[0].with_suffix('')}.{{json,csv,md,tex,png}}")
    return 0


def source(cell: paper.Row, number: int) -> tuple[int, str] | None:
    """The table and the row whose number this cell repeats; None for other methods and dashes."""
    found = SOURCES[number].get(cell.row)
    if cell.fid is None:
        return None
    return found.get(cell.nfe) if isinstance(found, dict) else found


def scores(out: Path, number: int, row: str, nfe: int) -> dict[str, Any]:
    """The scores of a row of Tables 1 to 3 at one NFE, the newest in the folder; {} if none."""
    first = paper.table(number).select(row)[0]
    pattern = f"{first.preset}.{first.sampler}-{nfe}.score-*/done.json"
    done = sorted((out / "stages").glob(pattern), key=lambda file: file.stat().st_mtime)
    for file in reversed(done):
        record = read_json(file)
        found = read_json(file.with_name("scores.json"))  # also in a folder that was moved
        if record and found:
            return found | {"commands": [record["command"]]}
    return {}


def collect(number: int, out: Path, scale: str, command: str) -> dict[str, Any]:
    """As `table.collect`, from the scores that are in `out`."""
    by_row = groupby(paper.table(number).rows, key=lambda cell: cell.row)
    rows = [_row(list(cells), number, out) for _, cells in by_row]
    methods = "".join(row["method"] for row in rows)
    notes = [f"{mark} {text}" for mark, text in NOTES.items() if mark in methods]
    return table.about(number, get_scale(scale), command) | {"notes": notes, "rows": rows}


def _row(cells: list[paper.Row], number: int, out: Path) -> dict[str, Any]:
    first = cells[0]
    open_row = all(cell.fid is None for cell in cells)
    mark = "" if first.row in SOURCES[number] or open_row else ELSEWHERE
    mark = COPIED if first.source == paper.COPIED else mark
    return {
        "row": first.row, "dataset": table.DATASETS[first.dataset],
        "method": f"{first.method} {mark}".strip(), "sampler": "samplers as in the paper",
        "failed": None, "cells": [_cell(cell, number, out) for cell in cells],
    }  # fmt: skip


def _cell(reported: paper.Row, number: int, out: Path) -> dict[str, Any]:
    cell = {"nfe": reported.nfe, "paper_fid": reported.fid_text, "fid": None, "recall": None,
            "paper_recall": reported.recall_text, "status": "not ours"}  # fmt: skip
    origin = source(reported, number)
    if origin is None:
        return cell
    found = scores(out, *origin, reported.nfe)
    cell |= {"table": origin[0], "of_row": origin[1], "status": "done" if found else "open"}
    kept = ("fid", "recall", "reference_images", "sample_images", "commands")
    return cell | {name: found[name] for name in kept if name in found}


def missing(results: dict[str, Any], words: list[str]) -> list[str]:
    """The commands that make what is missing, one per row of Tables 1 to 3, ending in `words`."""
    wanted: dict[tuple[int, str], list[int]] = {}
    for cell in (cell for row in results["rows"] for cell in row["cells"]):
        if cell["status"] == "open":
            wanted.setdefault((cell["table"], cell["of_row"]), []).append(cell["nfe"])
    lines = []
    for (number, row), nfes in sorted(wanted.items()):
        command = [f"run/reproduce_table{number}.sh", "--rows", row]
        lines.append("    " + shlex.join([*command, "--nfes", ",".join(map(str, nfes)), *words]))
    return [f"{table.OPEN} is made by", *lines] if lines else []
