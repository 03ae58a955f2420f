"""What `run/solvers.sh` runs."""

import argparse
import hashlib
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ogdm_core.cli import errors_in_one_line
from ogdm_core.fewstep import write_npz
from ogdm_core.files import read_json, sha256, write_json, write_text
from ogdm_core.images import to_uint8
from ogdm_core.lock import exclusive
from ogdm_core.nfe import SAMPLERS, steps_for_nfe
from ogdm_core.random import generator_of
from run.evaluate import torch_evaluator
from run.evaluate.features import Features, load_features
from run.evaluate.sources import Source, open_source, planned
from run.provenance import commit, versions
from run.sampling import Network, device_here, open_network

from . import report
from .flags import evaluator, parse
from .search import TEACHER, distance_to_many_steps, grid_of, improve

FORMAT = 1  # of the cached samples


def key_of(*made_of: Any) -> str:
    """A hash of what a cached file was made of."""
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Subject:
    """A model: its name in the table, its network, and a hash of its files."""

    name: str
    network: Network
    digest: str


@dataclass(frozen=True)
class Cell:
    """One number of the table; `times` are those of the grid, whatever its name."""

    subject: Subject
    solver: str
    nfe: int
    grid: str
    times: tuple[float, ...]


def open_subject(path: Path, name: str, args: argparse.Namespace) -> Subject:
    """The model at `path`; raises ValueError for what is none."""
    network = open_network(path, args.device, args.native, args.third_party)
    if path.is_dir():
        files = sorted(p for part in ("unet", "scheduler") for p in (path / part).glob("*"))
        return Subject(name, network, key_of([sha256(p) for p in files or sorted(path.glob("*.*"))]))
    return Subject(name, network, key_of(sha256(path), args.native))


def cells_of(subject: Subject, args: argparse.Namespace) -> Iterator[Cell]:
    """Every solver on every grid; of grids with the same times the first."""
    for solver, nfe in args.cells:
        seen = set()
        for grid in args.grids:
            times = tuple(subject.network.schedule.times(steps_for_nfe(solver, nfe), grid))
            if times not in seen:
                yield Cell(subject, solver, nfe, grid, times)
            seen.add(times)


class Scorer:
    """FID and recall of cells; samples, features and scores are kept under hashes of what they are made of."""

    def __init__(self, args: argparse.Namespace, reference: Source, net: Features):
        self.args, self.reference, self.net, self.digest = args, reference, net, reference.digest()
        self.left, self.done, self.started = 0, 0, time.time()

    def samples(self, cell: Cell) -> Path:
        """Where the cell's samples are, or will be."""
        solver = [cell.solver, SAMPLERS[cell.solver].order, cell.nfe, cell.times]
        key = key_of(FORMAT, cell.subject.digest, solver, self.args.count, self.args.seed, self.args.batch)
        return self.args.out / "samples" / f"{key}.npz"

    def file(self, cell: Cell) -> Path:
        """Where its score is, or will be."""
        return self.args.out / "scores" / f"{key_of(self.samples(cell).stem, self.digest, self.net.key)}.json"

    def draw(self, cell: Cell) -> Path:
        """The npz with the cell's samples."""
        file, network = self.samples(cell), cell.subject.network
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            noise = torch.randn((self.args.count, *network.shape), generator=generator_of(self.args.seed, "samples"))
            x = network.draw(noise, cell.solver, cell.nfe, batch=self.args.batch,
                             discretisation=grid_of(network.schedule, cell.times))  # fmt: skip
            write_npz(str(file), to_uint8(x).permute(0, 2, 3, 1).numpy())
        return file

    def score(self, cell: Cell) -> dict[str, Any]:
        """The row of a cell."""
        file = self.file(cell)
        if not file.exists():
            found = torch_evaluator.in_features_of(
                self.net, self.reference, open_source(self.draw(cell)), evaluator(self.args), keep=True
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {name: found[name] for name in ("fid", "recall", "precision", "notes")})
        where = {"model": cell.subject.name, "solver": cell.solver, "grid": cell.grid, "nfe": cell.nfe}
        return where | {"times": list(cell.times)} | read_json(file)

    def all(self, cells: list[Cell]) -> list[dict[str, Any]]:
        """The rows of cells; says after each that is new how long the others will take."""
        rows, self.left = [], self.left + sum(c.nfe for c in cells if not self.file(c).exists())
        for i, cell in enumerate(cells, start=1):
            new = not self.file(cell).exists()
            rows.append(self.score(cell))
            if new:
                self.left, self.done = self.left - cell.nfe, self.done + cell.nfe
                minutes = (time.time() - self.started) / self.done * self.left / 60
                what = f"{cell.subject.name}, {cell.solver} on {cell.grid}, NFE {cell.nfe}: FID {rows[-1]['fid']:.3f}"
                print(f"{i}/{len(cells)}  {what}  ({minutes:.0f} min left)", file=sys.stderr, flush=True)
        return rows


def searched(cell: Cell, args: argparse.Namespace) -> Cell:
    """The cell's solver on a grid of its own, which is written to a file; tried again only if something changed."""
    network = cell.subject.network
    key = key_of(cell.subject.digest, cell.solver, cell.nfe, cell.times, args.search, args.seed)
    file = args.out / "grids" / f"{cell.subject.name}-{cell.solver}-{cell.nfe}.json"
    if not file.exists() or read_json(file).get("key") != key:
        print(
            f"{cell.subject.name}: {args.search} grids for {cell.solver}, NFE {cell.nfe}", file=sys.stderr, flush=True
        )
        distance = distance_to_many_steps(network, cell.solver, cell.nfe, args.seed)
        times, after, before = improve(network.schedule, cell.times, distance, args.search, args.seed)
        notes = {"sampler": cell.solver, "nfe": cell.nfe, "from": cell.grid, "to_many_steps": TEACHER,
                 "distance": [before, after], "key": key}  # fmt: skip
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, grid_of(network.schedule, times, **notes))
    grid = read_json(file)
    before, after = grid["distance"]
    print(f"{file}: distance to many steps {before:.4f} on {cell.grid}, {after:.4f} on its own", flush=True)
    return Cell(cell.subject, cell.solver, cell.nfe, "searched", tuple(grid["times"]))


def work(args: argparse.Namespace, command: str) -> None:
    """Scores what is not there yet, prints the tables and writes the files."""
    with errors_in_one_line():
        reference = open_source(args.reference)
        torch_evaluator.check(reference, reference, evaluator(args))  # before a model is opened
        subjects = [open_subject(path, name, args) for path, name in zip(args.models, args.names, strict=True)]
        if len({s.network.shape for s in subjects}) > 1:
            raise ValueError(f"the models make x of different shapes, {[s.network.shape for s in subjects]}")
        for subject in subjects:
            samples = planned(Path(subject.name), args.count, subject.network.image_shape())
            torch_evaluator.check(reference, samples, evaluator(args))
        cells = [cell for subject in subjects for cell in cells_of(subject, args)]
        net = load_features(args.features, args.weights, args.device or device_here(), args.out / "features")
    left_out = {s: [n for n in args.nfe if (s, n) not in args.cells] for s in args.solvers}
    for solver, nfes in left_out.items():
        if nfes:
            many = " or ".join(map(str, nfes))
            print(f"left out: {solver} cannot run in exactly {many} evaluations", file=sys.stderr)
    scorer = Scorer(args, reference, net)
    rows = scorer.all(cells)
    if args.search:
        by = {(c.subject.name, c.solver, c.grid, c.nfe): c for c in cells}
        bests = [min((r for r in rows if (r["model"], r["nfe"]) == (s.name, n)), key=lambda r: r["fid"])
                 for s in subjects for n in args.nfe]  # fmt: skip
        found = [searched(by[r["model"], r["solver"], r["grid"], r["nfe"]], args) for r in bests]
        rows += scorer.all(found)
    results = {
        "models": args.names, "paths": [str(p) for p in args.models], "reference": str(args.reference),
        "features": net.name, "count": args.count, "seed": args.seed, "command": command, "commit": commit(),
        "versions": versions(("torch", "numpy", "ogdm")), "rows": rows,
    }  # fmt: skip
    write_json(args.out / "results.json", results)
    text = report.markdown(results)
    write_text(args.out / "table.md", text)
    print(text, end="")
    for note in sorted({note for row in rows for note in row["notes"]}):
        print(f"note: {note}", file=sys.stderr)
    for path in (args.out / "table.md", args.out / "results.json", report.picture(results, args.out / "solvers.png")):
        print(path)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 2 where the user can mend it, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    try:
        with exclusive(args.out / ".lock", f"working in {args.out}"):
            work(args, shlex.join(["run/solvers.sh", *argv]))
    except KeyboardInterrupt:
        print("\nstopped; the same command continues from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
