"""The numbers that the paper reports, Tables 1, 2, 3, 4, 7, 8 and 9, one `data/tableN.csv` each. Table 10 is ours.

A line of a file is one cell of the paper: one experiment at one number of network evaluations. It
holds the digits as printed; `Cell.trained_by` is what Table 5 says about the training. Tables 5 and
6 themselves are `run.presets`.
"""

import csv
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from run.presets import Preset, get_preset

CAPTIONS = {
    1: "FID and recall over NFE: Euler projection, Euler sampler",
    2: "FID and recall over NFE: Heun projection, Heun sampler",
    3: "FID and recall over NFE: Euler projection, PNDM samplers",
    4: "FID over NFE beside other methods",
    7: "FID and recall over NFE: Heun's method and discriminator guidance (DG)",
    8: "FID and recall over NFE: DDGAN and OGDM on CIFAR-10",
    9: "FID and recall over NFE: Euler projection, stochastic sampler",
    10: "not in the paper, FID and recall over NFE: EDM2 and SiT, Euler projection",
}
COPIED = "copied from other papers"
DATA = Path(__file__).with_name("data")


@dataclass(frozen=True)
class Cell:
    """One cell of the paper: an experiment (`row`) at one NFE. None: the paper leaves it open."""

    row: str  # short stable name of the experiment, unique in its table; --rows selects by it
    dataset: str  # cifar10 | celeba64 | lsun-church
    backbone: str | None  # adm | edm | ldm
    conditional: bool  # trained with class labels
    method: str  # as the paper calls it: Baseline, OGDM, OGDM (ft), DDGAN, ...
    preset: str | None  # the row of Table 5 that trains it, a name in run.presets
    sampler: str | None  # euler | heun | s-pndm | f-pndm | stochastic | dg | ddim
    steps: int | None  # discretisation steps, where the paper gives those too (Table 7)
    nfe: int
    fid_text: str | None  # the digits as printed
    fid_best: bool  # bold in the paper
    recall_text: str | None
    recall_best: bool
    source: str  # "measured by the authors" or COPIED

    @property
    def fid(self) -> float | None:
        return None if self.fid_text is None else float(self.fid_text)

    @property
    def trained_by(self) -> Preset | None:
        return get_preset(self.preset) if self.preset else None


@dataclass(frozen=True)
class Table:
    """One table of the paper, cells in its order, each experiment's NFEs together."""

    number: int
    cells: tuple[Cell, ...]

    @property
    def ours(self) -> bool:
        """Not in the paper, so that every cell is open."""
        return all(cell.fid is None for cell in self.cells)

    @property
    def names(self) -> tuple[str, ...]:
        """The experiments' names, in order."""
        return tuple(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def nfes(self) -> tuple[int, ...]:
        """The numbers of network evaluations, in the paper's order."""
        return tuple(dict.fromkeys(cell.nfe for cell in self.cells))

    def select(self, name: str) -> tuple[Cell, ...]:
        """One experiment's cells."""
        return tuple(cell for cell in self.cells if cell.row == name)


@cache
def table(number: int) -> Table:
    """Table `number` of the paper."""
    with (DATA / f"table{number}.csv").open(newline="") as file:
        return Table(number, tuple(map(_cell, csv.DictReader(file))))


def _cell(line: dict[str, str]) -> Cell:
    """A line of the file; empty is None, and `yes` is true."""
    plain = {"": None, "yes": True, "no": False}
    cell: dict[str, Any] = {name: plain.get(text, text) for name, text in line.items()}
    cell |= {name: int(cell[name]) for name in ("steps", "nfe") if cell[name]}
    return Cell(fid_text=cell.pop("fid"), recall_text=cell.pop("recall"), **cell)


def with_controls(table: Table, nfes: Mapping[str, Sequence[int]], datasets: Collection[str]) -> Table:
    """The table's fine-tunes on these data sets, each below its control, at these NFEs of its sampler.

    A control has the numbers of the paper's baseline. Where a table has a training from scratch
    only (Table 9), its fine-tune takes that one's place.
    """
    rows = []
    tuned = {(c.dataset, c.backbone, c.sampler) for c in table.cells
             if c.trained_by.training == "finetune"}  # fmt: skip
    for name in table.names:
        cells = {cell.nfe: cell for cell in table.select(name)}
        first = next(iter(cells.values()))
        preset, place = first.trained_by, (first.dataset, first.backbone, first.sampler)
        scratch = preset.training == "scratch"
        if not preset.ogdm or first.dataset not in datasets or (scratch and place in tuned):
            continue
        preset = get_preset(preset.name + "-ft" * scratch)
        before = {c.nfe: c for c in table.cells if c.preset == preset.baseline
                  and c.sampler == first.sampler}  # fmt: skip
        control = name.replace("ogdm-ft", "ogdm").replace("ogdm", "control")
        empty = replace(first, fid_text=None, recall_text=None, steps=None)
        for row, method, trained_by, theirs in (
            (control, "control", preset.control.name, before),
            (name, "OGDM", preset.name, cells),
        ):
            rows += [replace(theirs.get(nfe, empty), row=row, method=method, preset=trained_by,
                             nfe=nfe) for nfe in nfes.get(first.sampler, ())]  # fmt: skip
    return Table(table.number, tuple(rows))
