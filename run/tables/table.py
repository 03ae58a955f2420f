"""A table from what is there: the paper's number and ours for every cell, as JSON, CSV, Markdown and a picture of FID
over NFE. Several seeds give a mean and a standard deviation; a table with controls has the change against them in
place of the paper's numbers. Tables 4 and 8 are assembled from the scores that Tables 1 to 3 have left."""

import csv
import io
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ogdm_core.files import write_json, write_text
from run import backbones
from run.figures.style import sampler_name
from run.provenance import commit, versions

from . import paper
from .jobs import Job, read_json
from .plot import groups_of, has_papers_numbers, plot
from .rows import Options, Row
from .scale import CLASSIFIER, Scale, get_scale
from .worker import LOG, PACKAGES

OPEN = "–"
DIGITS = {"fid": 2, "recall": 3}  # as the paper prints them
DATASETS = {"cifar10": "CIFAR-10", "celeba64": "CelebA", "lsun-church": "LSUN Church",
            "imagenet64": "ImageNet", "imagenet256": "ImageNet"}  # fmt: skip
KEPT = ("fid", "recall", "precision", "sfid", "floor", "features", "spectrum", "reference_images", "sample_images")
CSV = ("row", "dataset", "method", "sampler", "nfe", "status", "fid", "paper_fid", "recall",
       "paper_recall", "reference_images", "sample_images", "failed_job", "title", "fid_sd",
       "recall_sd", "seeds", "change", "paper_change")  # fmt: skip


# ---- what is there ------------------------------------------------------------------------------


def about(number: int, scale: Scale, command: str, net: str = "") -> dict[str, Any]:
    """What a table's results begin with: its title, with the feature net (empty: Inception) where there are controls,
    and where they come from."""
    title = f"Table {number}. {paper.CAPTIONS[number]}"
    of = f"{'a small classifier' if net == CLASSIFIER else net}, not Inception's" if net else "Inception"
    of_net = f", FID and recall in the features of {of}: they compare with each other only" if scale.controls else ""
    return {
        "title": f"{scale.title}{of_net} ({title})" if scale.title else title,
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
    names = options.net.split(",")
    results = about(options.number, scale, command, names[0]) | {
        "samples": options.samples,
        "seeds": list(options.seeds),
    }
    first, *others = [{"features": name, "rows": _rows(options, rows, net)} for net, name in enumerate(names)]
    return results | {"rows": first["rows"]} | ({"also": others} if others else {})


def _rows(options: Options, rows: list[Row], net: int) -> list[dict[str, Any]]:
    """The table's rows in the features of one of the nets."""
    found = [_row(options, list(seeds), net) for _, seeds in groupby(rows, key=lambda r: r.name)]
    for _, group in groups_of(found) if options.scale.controls else ():
        if len(group) == 2:
            _compare(*group)
    return found


def _row(options: Options, rows: Sequence[Row], net: int) -> dict[str, Any]:
    """A row from its runs by one seed each."""
    row = rows[0]
    first = next(iter(row.cells.values()))
    nfes = dict.fromkeys([*row.cells, *row.scores, *row.others])
    return {
        "row": row.name,
        "dataset": dataset_of(first, options.scale.images_of),
        "method": first.method,
        "sampler": row.sampler,
        "preset": row.preset.name,
        "projection": row.preset.projection,
        "k": row.preset.k,
        "gamma": row.preset.gamma,
        "checkpoint": row.checkpoint,
        "failed": next(filter(None, (failure(r.chain(pending=True)) for r in rows)), None),
        "cells": [_cell(rows, nfe, net) for nfe in sorted(nfes, reverse=True)],
    }


def dataset_of(cell: paper.Cell, data: str = "") -> str:
    """As in CIFAR-10 (EDM cond.); `data` takes the paper's place."""
    conditional = " cond." if cell.conditional else ""
    title = cell.backbone and (backbones.get(cell.backbone).title or cell.backbone.upper())
    return f"{data or DATASETS[cell.dataset]} ({title}{conditional})"


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


def _cell(rows: Sequence[Row], nfe: int, net: int) -> dict[str, Any]:
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
    found = [(row.seed, _scores(row, nfe, net)) for row in rows]
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
    if spectra := [s["spectrum"] for s in done.values() if s.get("spectrum")]:
        cell["spectrum"] = [fmean(band) for band in zip(*spectra, strict=True)]
    return cell


def _scores(row: Row, nfe: int, net: int) -> dict[str, Any]:
    """What one seed's jobs left, in the features of one of the nets."""
    score, sample = row.scores[nfe], row.samples[nfe]
    record = score.record()
    if record is None:
        found = failure([job for job in (sample, score) if job.record() is None])
        return {"status": found["status"] if found else "open"}
    made = [job for job in (sample.record(), record) if job]  # samples may be deleted since
    scores = read_json(score.output)
    scores |= scores.get("also", [])[net - 1] if net else {}
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
    """Writes table<N>.json, .csv, .md and .png into `out`; returns their paths."""
    stem = out / f"table{results['number']}"
    files = [stem.with_suffix(f".{kind}") for kind in ("json", "csv", "md", "png")]
    write_json(files[0], results)
    write_text(files[1], to_csv(results))
    write_text(files[2], to_markdown(results))
    plot(results, files[3])
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
    real = next((c["floor"] for row in results["rows"] for c in row["cells"] if c.get("floor")), None)
    floor = f" As many real images have {real:.2f} against the other real ones." if real else ""
    papers = ", and in brackets the paper's, against the baseline, on its own data" * has_papers_numbers(results)
    return f"FID / recall{spread}; change: OGDM's FID against the control's{papers}.{floor}"


def failures(results: dict) -> list[str]:
    """One line per row that stopped."""
    found = [(row["row"], row["failed"]) for row in results["rows"] if row.get("failed")]
    return [f"{row}: {f['job']} {f['status']}: {f['reason']}" for row, f in found]


def method_of(results: dict, row: dict) -> str:
    """The method, with its sampler where the table has more than one; a mark if it stopped."""
    several = len({row["sampler"] for row in results["rows"]}) > 1
    sampler = f", {sampler_name(row['sampler'])}" if several else ""
    return f"{row['method']}{sampler}{' (stopped)' if row.get('failed') else ''}"


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
            texts = [per_cent(cell.get("change")) for cell in cells]
            if has_papers_numbers(results):
                texts = [f"{a} ({per_cent(c.get('paper_change'))})" for a, c in zip(texts, cells, strict=True)]
            rows.append([row["dataset"], "change", *texts])
    return aligned(rows)


def best_lines(results: dict) -> list[str]:
    """Best with best: at each NFE a control's lowest FID with any of the table's samplers, OGDM's, and the change."""
    nfes, rows = nfes_of(results), []
    for dataset in dict.fromkeys(row["dataset"] for row in results["rows"]):
        of_it = [row for row in results["rows"] if row["dataset"] == dataset]
        found = {m: [_best([r for r in of_it if r["method"] == m], nfe) for nfe in nfes] for m in ("control", "OGDM")}
        if len({row["sampler"] for row in of_it}) > 1:
            rows += [[dataset, m, *(f"{fid:.4g} ({by})" if fid else OPEN for fid, by in c)] for m, c in found.items()]
            pairs = zip(*found.values(), strict=True)
            rows.append([dataset, "change", *(per_cent(_change(a, b)) for (a, _), (b, _) in pairs)])
    head = ["dataset (backbone)", "best sampler of", *(f"NFE {nfe}" for nfe in nfes)]
    title = "Best with best: FID with the best of the table's samplers at each NFE."
    return [title, "", *aligned([head, *rows]), ""] if results["controls"] and rows else []


def _best(rows: list[dict], nfe: int) -> tuple[float | None, str]:
    """The lowest FID of these rows at an NFE, and its sampler."""
    there = [(cell_of(row, nfe)["fid"], sampler_name(row["sampler"])) for row in rows]
    return min((cell for cell in there if cell[0] is not None), default=(None, ""))


def spectrum_lines(results: dict) -> list[str]:
    """Power in four bands relative to real images, coarse to fine, where it was measured."""
    nfes, rows = nfes_of(results), []
    for row in results["rows"]:
        cells = [cell_of(row, nfe).get("spectrum") for nfe in nfes]
        texts = [" ".join(f"{band:.2f}" for band in cell) if cell else OPEN for cell in cells]
        rows += [[row["dataset"], method_of(results, row), *texts]] if any(cells) else []
    return aligned([["dataset (backbone)", "method", *(f"NFE {nfe}" for nfe in nfes)], *rows]) if rows else []


def further(results: dict) -> list[str]:
    """What stands below the table: the other feature nets, the spectrum."""
    parts = []
    for other in results.get("also", ()):
        view = results | {"rows": other["rows"]}
        parts.append((f"The same in the features of {other['features']}. {legend(view)}", lines(view)))
    parts.append(
        ("Power spectrum relative to real images, in four bands from coarse to fine.", spectrum_lines(results))
    )
    return [line for title, table in parts if table for line in (title, "", *table, "")]


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
        *best_lines(results), *lines(results), "", *further(results), *notes,
        *(["Rows that stopped:", "", *stopped, ""] if stopped else []),
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


# ---- Tables 4 and 8 ------------------------------------------------------------------------------

COPIED, ELSEWHERE = "†", "‡"
NOTES = {
    COPIED: "the paper copied these values from other papers",
    ELSEWHERE: "the paper's authors measured these values with a codebase that is not part of this project",
}


@cache
def repeats() -> dict[tuple[int, str, int], tuple[int, str]]:
    """{(table, row, NFE): the table and the row whose number it repeats}."""
    with (paper.DATA / "repeats.csv").open(newline="") as file:
        lines = [[int(n) if n.isdigit() else n for n in line.values()] for line in csv.DictReader(file)]
    return {tuple(line[:3]): tuple(line[3:]) for line in lines}


def source(cell: paper.Cell, number: int) -> tuple[int, str] | None:
    """The table and the row whose number this cell repeats; None for other methods and dashes."""
    return repeats().get((number, cell.row, cell.nfe))


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


def assemble(number: int, out: Path, scale: str, command: str) -> dict[str, Any]:
    """As `collect`, from the scores that are in `out`."""
    by_row = groupby(paper.table(number).cells, key=lambda cell: cell.row)
    rows = [_assembled_row(list(cells), number, out) for _, cells in by_row]
    methods = "".join(row["method"] for row in rows)
    notes = [f"{mark} {text}" for mark, text in NOTES.items() if mark in methods]
    net = get_scale(scale).features.partition(",")[0]
    return about(number, get_scale(scale), command, net) | {"notes": notes, "rows": rows}


def _assembled_row(cells: list[paper.Cell], number: int, out: Path) -> dict[str, Any]:
    first = cells[0]
    open_row = all(cell.fid is None for cell in cells)
    mark = "" if open_row or any(source(cell, number) for cell in cells) else ELSEWHERE
    mark = COPIED if first.source == paper.COPIED else mark
    return {
        "row": first.row, "dataset": DATASETS[first.dataset],
        "method": f"{first.method} {mark}".strip(), "sampler": "samplers as in the paper",
        "failed": None, "cells": [_assembled_cell(cell, number, out) for cell in cells],
    }  # fmt: skip


def _assembled_cell(reported: paper.Cell, number: int, out: Path) -> dict[str, Any]:
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
    return [f"{OPEN} is made by", *lines] if lines else []
