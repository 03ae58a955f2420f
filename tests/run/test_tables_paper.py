"""The data files against the paper: cell by cell where its LaTeX is at hand, else by checksum."""

import hashlib
import os
import re
from pathlib import Path

import pytest

from run.tables import paper
from run.train.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]
BESIDE = ROOT.parent / "shared" / "seed" / "ogdm-paper.tex"  # a folder beside the clone, if any
LATEX = Path(os.environ.get("OGDM_PAPER") or BESIDE)
CHECKSUMS = {
    1: "605bbf69a286665596cada9576f6b28cd6df941e2cf1e911dc8b1aeb0cb7ef1e",
    2: "4a3df7cba06b4b5f6900c2879c9d6e065896d21c3f67b75cee4453c6b95e5029",
    3: "01f7c324e44ec7a1588dc62011cec58ade02a244e256eedcb3249e5fb8cb284a",
    4: "a1a3bdb1b1e1b131cf6ed87c0a66a64ee2e3ef29d6338ab450d02bd03063ab1c",
    7: "bcc570552448e69a5cf15ae7e49474f3f19f7ec2710f8e93342a7f91aa045de6",
    8: "25929b2caf47b51c466ae0b769f58de7d69e9239395c00418b98a78cffb868c8",
    9: "e31b5dc8d7b6c031e96dc1bbcd5c1e96c61fdafafad897f6f66c44bcd146d9a9",
}
LABELS = {1: "quant_euler", 2: "quant_heun", 3: "quant_pndm", 4: "comparison", 7: "dg", 8: "ddgan",
          9: "stochastic"}  # fmt: skip
DATASETS = {"CIFAR-10": "cifar10", "CelebA": "celeba64", "LSUN Church": "lsun-church"}
DAGGER, STAR = r"$\dagger$", "*"


# ---------------------------------------------------------------- reading the LaTeX


@pytest.fixture(scope="module")
def latex():
    if not LATEX.is_file():
        pytest.skip(
            "the paper's LaTeX source is not at hand; OGDM_PAPER=/path/to/paper.tex run/test.sh "
            "compares every cell with it"
        )
    return re.sub(r"(?<!\\)%.*", "", LATEX.read_text())


def grid(latex: str, number: int) -> list[list[str]]:
    """The table's lines as cells, rules left out, cells spanning several lines repeated."""
    (part,) = [t for t in re.findall(r"\\begin{table\*}.*?\\end{table\*}", latex, re.DOTALL)
               if rf"\label{{tab:{LABELS[number]}}}" in t]  # fmt: skip
    body = re.search(r"\\begin{tabular}{\w+}(.*)\\end{tabular}", part, re.DOTALL)[1]
    body = re.sub(r"\\cmidrule\(lr\){[\d-]+}|\\hline|\\(top|mid|bottom)rule", "", body)
    lines, hanging = [], {}
    for line in body.split(r"\\"):
        cells = [" ".join(cell.replace("~", " ").split()) for cell in re.split(r"(?<!\\)&", line)]
        if not any(cells):
            continue
        for column, cell in enumerate(cells):
            if span := re.fullmatch(r"\\multirow{(\d+)}{\*}{?(.*?)}?", cell):
                hanging[column] = (int(span[1]), span[2])
            if column in hanging and not (cell and not span):
                left, text = hanging.pop(column)
                cells[column] = text
                if left > 1:
                    hanging[column] = (left - 1, text)
        lines.append(cells)
    return lines


def header(line: list[str]) -> list[int]:
    """The integers of a line of column heads."""
    plain = [re.sub(r"\\multicolumn{\d+}{c}{(.*)}", r"\1", cell) for cell in line]
    return [int(cell) for cell in plain if cell.isdigit()]


def value(cell: str) -> tuple[str | None, bool]:
    """The printed number, None for a dash, and whether it is bold."""
    number = re.fullmatch(r"(\\B )?(\d+\.\d+|--)", cell)
    assert number, cell
    return None if number[2] == "--" else number[2], bool(number[1])


def where(cell: str) -> tuple[str, str, bool]:
    """'CIFAR-10 (EDM cond.)' -> ('cifar10', 'edm', True)."""
    dataset, backbone, conditional = re.fullmatch(r"(.*) \((\w+)( cond\.)?\)", cell).groups()
    return DATASETS[dataset], backbone.lower(), bool(conditional)


def from_latex(latex: str, number: int) -> list[tuple]:
    """(dataset, backbone, conditional, method, sampler, steps, nfe, fid, recall, marks) a cell."""
    lines = grid(latex, number)
    if number == 4:
        return comparison(lines)
    heads = header(lines[0])
    found = []
    for cells in lines[2:]:
        cost = cells.pop() if number == 7 else None
        sampler = cells.pop(0).lower() if number == 3 else None
        place = ("cifar10", None, False) if number == 8 else where(cells.pop(0))
        name = cells.pop(0)
        method = re.sub(r"\\cite{\w+}", "", name).replace(DAGGER, "").strip()
        assert len(cells) == 2 * len(heads), cells
        for head, fid, recall in zip(heads, cells[::2], cells[1::2], strict=True):
            steps = head if number == 7 else None
            nfe = {None: head, "$2n-1$": 2 * head - 1, "$3n-2$": 3 * head - 2}[cost]
            found.append((*place, method, sampler, steps, nfe, value(fid), value(recall),
                          DAGGER in name))  # fmt: skip
    return found


def comparison(lines: list[list[str]]) -> list[tuple]:
    datasets = [DATASETS[cell] for cell in re.findall(r"{(C[\w-]+)}", " ".join(lines[0]))]
    heads = header(lines[1])
    found = []
    for name, *cells in lines[2:]:
        method = re.sub(r"\\cite{\w+}", "", name).replace(DAGGER, "").replace(STAR, "")
        method = " ".join(method.replace(r"\etal", "et al.").split())
        cells = [cell for cell in cells if cell]
        assert len(cells) == len(heads) == 8, cells
        for column, (nfe, cell) in enumerate(zip(heads, cells, strict=True)):
            found.append((datasets[column // 4], None, False, method,
                          "ddim" if STAR in name else None, None, nfe, value(cell), (None, False),
                          DAGGER in name))  # fmt: skip
    return found


# ---------------------------------------------------------------- the data


def from_data(number: int) -> list[tuple]:
    """Our rows in the same words."""
    return [
        (row.dataset, None if number == 8 else row.backbone, row.conditional, row.method,
         row.sampler if number in (3, 4) else None, row.steps, row.nfe,
         (row.fid_text, row.fid_best), (row.recall_text, row.recall_best),
         row.source == paper.COPIED)
        for row in paper.table(number).rows
    ]  # fmt: skip


@pytest.mark.parametrize("number", paper.CAPTIONS)
def test_every_cell_is_the_papers(latex, number):
    theirs = from_latex(latex, number)
    ours = from_data(number)
    assert len(ours) == len(theirs)
    if number == 4:  # the paper sets the two data sets side by side, we one after the other
        theirs.sort(key=lambda cell: cell[0], reverse=True)
    assert ours == theirs


def test_numbers_count_the_papers_tables(latex):
    labels = re.findall(r"\\begin{table\*}.*?\\label{tab:(\w+)}", latex, re.DOTALL)
    assert {n: labels[n - 1] for n in LABELS} == LABELS


@pytest.mark.parametrize("number", paper.CAPTIONS)
def test_data_files_are_the_checked_ones(number):
    file = paper.DATA / f"table{number}.csv"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert digest == CHECKSUMS[number], f"compare {file.name} with the paper"


# ---------------------------------------------------------------- what rows mean


@pytest.mark.parametrize("number", paper.CAPTIONS)
def test_a_row_names_one_experiment(number):
    table = paper.table(number)
    experiments = {}
    for row in table.rows:
        same = (row.dataset, row.backbone, row.conditional, row.method, row.sampler, row.preset)
        assert experiments.setdefault(row.row, same) == same
    assert len(set(experiments.values())) == len(experiments)
    assert table.names == tuple(experiments)
    for name in table.names:
        nfes = [row.nfe for row in table.select(name)]
        assert len(set(nfes)) == len(nfes)


@pytest.mark.parametrize("number", [1, 2, 3, 7, 9])
def test_rows_to_reproduce_are_presets(number):
    for row in paper.table(number).rows:
        preset = PRESETS[row.preset]
        assert (row.dataset, row.backbone, row.conditional) == (
            preset.dataset, preset.backbone, preset.conditional)  # fmt: skip
        assert row.trained_by == preset
        wanted = {"Baseline": "baseline", "OGDM": "scratch", "OGDM (ft)": "finetune"}
        assert preset.training == wanted[row.method.removesuffix(" + DG")]
        assert row.sampler in ("euler", "heun", "s-pndm", "f-pndm", "stochastic", "dg")


@pytest.mark.parametrize("name", ["cifar10-edm-baseline", "cifar10-edm-ogdm-ft-heun"])
def test_table_7_repeats_table_2(name):
    """What Tables 4 and 8 repeat is tested beside `run.tables.assembled`."""
    seven, two = ({c.nfe: c.fid for c in paper.table(n).select(name)} for n in (7, 2))
    assert (seven[25], seven[15]) == (two[25], two[15])


def test_dashes_are_none_and_numbers_keep_their_digits():
    cells = {row.nfe: row for row in paper.table(3).select("cifar10-adm-baseline-f-pndm")}
    assert cells[10].fid is None and cells[10].fid_text is None
    (cell,) = [row for row in paper.table(1).select("cifar10-adm-baseline") if row.nfe == 10]
    assert (cell.fid, cell.fid_text) == (15.2, "15.20")
