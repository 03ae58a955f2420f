"""The data files against those that were compared with the paper's LaTeX, cell by cell; what rows mean."""

import hashlib

import pytest

from run.presets import PRESETS
from run.tables import paper

CHECKSUMS = {
    1: "605bbf69a286665596cada9576f6b28cd6df941e2cf1e911dc8b1aeb0cb7ef1e",
    2: "4a3df7cba06b4b5f6900c2879c9d6e065896d21c3f67b75cee4453c6b95e5029",
    3: "01f7c324e44ec7a1588dc62011cec58ade02a244e256eedcb3249e5fb8cb284a",
    4: "a1a3bdb1b1e1b131cf6ed87c0a66a64ee2e3ef29d6338ab450d02bd03063ab1c",
    7: "bcc570552448e69a5cf15ae7e49474f3f19f7ec2710f8e93342a7f91aa045de6",
    8: "25929b2caf47b51c466ae0b769f58de7d69e9239395c00418b98a78cffb868c8",
    9: "e31b5dc8d7b6c031e96dc1bbcd5c1e96c61fdafafad897f6f66c44bcd146d9a9",
}


@pytest.mark.parametrize("number", CHECKSUMS)
def test_data_files_are_the_checked_ones(number):
    file = paper.DATA / f"table{number}.csv"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert digest == CHECKSUMS[number], f"compare {file.name} with the paper"


@pytest.mark.parametrize("number", [1, 2, 3, 7, 9])
def test_rows_to_reproduce_are_presets(number):
    for row in paper.table(number).cells:
        preset = PRESETS[row.preset]
        assert (row.dataset, row.backbone, row.conditional) == (
            preset.dataset, preset.backbone, preset.conditional)  # fmt: skip
        assert row.trained_by == preset
        wanted = {"Baseline": "baseline", "OGDM": "scratch", "OGDM (ft)": "finetune"}
        assert preset.training == wanted[row.method.removesuffix(" + DG")]
        assert row.sampler in ("euler", "heun", "s-pndm", "f-pndm", "stochastic", "dg")


def test_dashes_are_none_and_numbers_keep_their_digits():
    cells = {row.nfe: row for row in paper.table(3).select("cifar10-adm-baseline-f-pndm")}
    assert cells[10].fid is None and cells[10].fid_text is None
    (cell,) = [row for row in paper.table(1).select("cifar10-adm-baseline") if row.nfe == 10]
    assert (cell.fid, cell.fid_text) == (15.2, "15.20")
