"""The files of a table, from rows as if they had run; the images that smoke runs are made of."""

import csv
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from run.data import lsun_reference
from run.data.__main__ import main as prepare
from run.tables import __main__ as cli
from run.tables import flags, paper, stand_in, table
from run.tables import results as report
from run.tables.jobs import chain
from run.tables.rows import Options, Planner, Row
from run.tables.scale import get_scale


@pytest.fixture
def options(tmp_path) -> Options:
    return Options(1, out=tmp_path / "out", data=tmp_path / "data")


def finished(options: Options, stop: str = "") -> list[Row]:
    """Rows as if they had run, but for the job called `stop` and what needs it."""
    rows = Planner(options).rows()
    done = set()
    for i, job in enumerate(chain(job for row in rows for job in row.scores.values())):
        job.folder.mkdir(parents=True, exist_ok=True)
        if job.name == stop:
            failed = {"status": "failed", "reason": "exit status 9"}
            (job.folder / "state.json").write_text(json.dumps(failed))
        if job.name == stop or not {need.key for need in job.needs} <= done:
            continue
        done.add(job.key)
        job.output.parent.mkdir(parents=True, exist_ok=True)
        scores = {"fid": 10 + i / 7, "recall": 0.5 + i / 1000, "sample_images": 50_000}
        job.output.write_text(json.dumps(scores))
        job.marker.write_text(json.dumps({"output": str(job.output), "command": "native"}))
    return rows


def results(options: Options, stop: str = "") -> dict:
    rows = finished(options, stop)
    return table.collect(options, rows, "run/reproduce_table1.sh --rows x")


@pytest.mark.parametrize("number", [n for n in flags.REPRODUCED if n < 10])
def test_every_table_is_written_in_every_format(options, number):
    found = results(replace(options, number=number))
    files = table.write_all(found, options.out)
    assert [file.suffix for file in files] == [".json", ".csv", ".md", ".png"]
    cells = [cell for row in found["rows"] for cell in row["cells"]]
    lines = list(csv.DictReader((options.out / f"table{number}.csv").open()))
    assert len(lines) == len(cells) == len(paper.table(number).cells)
    for row, line in zip(paper.table(number).cells, lines, strict=True):
        assert (line["row"], line["nfe"], line["paper_fid"]) == (
            row.row, str(row.nfe), row.fid_text or "")  # fmt: skip
        assert (line["status"] == "done") == (row.fid is not None)
    markdown = files[2].read_text()
    assert sum(line.startswith("|") for line in markdown.splitlines()) == 2 + len(found["rows"])
    assert "run/reproduce_table1.sh --rows x" in markdown and found["commit"] in markdown
    assert files[3].read_bytes().startswith(b"\x89PNG") and files[3].stat().st_size > 10_000
    assert json.loads(files[0].read_text())["rows"] == found["rows"]


def test_a_failed_job_is_named_in_the_table(options):
    found = results(replace(options, rows=("cifar10-adm-*",)), "cifar10-adm-ogdm.train")
    failed = {row["row"]: row["failed"] for row in found["rows"]}
    assert failed["cifar10-adm-ogdm"]["job"] == "cifar10-adm-ogdm.train"
    assert failed["cifar10-adm-baseline"] is None
    for text in (table.to_markdown(found), table.to_csv(found)):
        assert "cifar10-adm-ogdm.train" in text
    assert "exit status 9" in table.to_markdown(found)
    assert "OGDM (stopped)" in table.to_markdown(found)


def test_a_table_is_written_without_samples_that_were_deleted(options):
    options = replace(options, rows=("cifar10-adm-baseline",), nfes=(10,))
    rows = finished(options)
    rows[0].samples[10].output.unlink()
    found = table.collect(options, rows, "x")
    (cell,) = [cell for cell in found["rows"][0]["cells"] if cell["nfe"] == 10]
    assert cell["status"] == "done" and cell["commands"] == ["native"]
    assert rows[0].chain(pending=True) == []


def test_a_table_can_be_written_at_any_time(options, capsys):
    finished(options, "cifar10-adm-baseline.euler-25.sample")
    argv = ["1", "--table", "--out", str(options.out), "--data", str(options.data)]
    assert cli.main([*argv, "--rows", "cifar10-adm-baseline"]) == 0
    assert "failed (7.08 / 0.583)" in capsys.readouterr().out
    assert (options.out / "table1.md").is_file()


def test_a_smoke_table_says_what_its_numbers_are_worth(options):
    found = results(replace(options, scale=get_scale("smoke"), rows=("cifar10-adm-baseline",)))
    for text in (table.to_markdown(found), table.to_csv(found)):
        assert "mean nothing" in text


def test_a_damaged_score_is_said_and_made_again(options):
    options = replace(options, rows=("cifar10-adm-baseline",), nfes=(10,))
    rows = finished(options)
    rows[0].scores[10].output.write_text('{"fid": 1')
    found = table.collect(options, rows, "x")
    (line,) = table.failures(found)
    assert "scores.json is damaged; the same command makes it again" in line
    assert "damaged (15.20 / 0.527)" in table.to_markdown(found)
    assert [job.kind for job in rows[0].chain(pending=True)] == ["score"]


# ---- controls and seeds -------------------------------------------------------------------------


@pytest.fixture
def compared(options) -> dict:
    """Table 1 at the cpu scale as if it had run with three seeds; LDM's training has failed."""
    return results(replace(options, scale=get_scale("cpu"), seeds=(0, 1, 2)), "lsun-church-ldm-ogdm-ft.train")


def test_each_fine_tune_stands_below_its_control_with_mean_spread_and_change(compared, options):
    names = ["cifar10-adm", "cifar10-edm", "cifar10-edm-cond", "lsun-church-ldm"]
    wanted = [f"{name}-{kind}" for name in names for kind in ("control", "ogdm-ft")]
    assert [row["row"] for row in compared["rows"]] == wanted
    control, tuned = compared["rows"][:2]
    assert (control["k"], control["gamma"], control["projection"]) == (None, None, None)
    before, cell = control["cells"][-1], tuned["cells"][-1]
    fids = [seed["fid"] for seed in cell["seeds"].values()]
    assert list(cell["seeds"]) == [0, 1, 2] and len(set(fids)) == 3
    assert cell["fid"] == pytest.approx(np.mean(fids))
    assert cell["fid_sd"] == pytest.approx(np.std(fids, ddof=1))
    assert cell["change"] == pytest.approx(100 * (cell["fid"] / before["fid"] - 1))
    ten = next(c for c in tuned["cells"] if c["nfe"] == 10)
    assert ten["paper_change"] == pytest.approx(100 * (11.18 / 15.20 - 1))
    assert "not Inception" in compared["title"] and compared["seeds"] == [0, 1, 2]
    files = table.write_all(compared, options.out)
    markdown, rows = files[2].read_text(), list(csv.DictReader(files[1].open()))
    assert f"| {cell['fid']:.2f} ± {cell['fid_sd']:.2f} / " in markdown
    assert f"{ten['change']:+.0f} % (-26 %)" in markdown and "lsun-church-ldm-ogdm-ft" in markdown
    assert [row["seeds"] for row in rows[:1]] == ["3"] and float(rows[4]["change"])
    assert files[3].stat().st_size > 10_000


def test_best_with_best_other_nets_floor_and_spectrum_stand_beside_the_table(options):
    asked = replace(options, number=3, scale=get_scale("cpu-cifar10"), seeds=(0, 1))
    rows = finished(asked)
    for row in rows:
        for job in row.scores.values():
            scores = json.loads(job.output.read_text())
            also = {"features": "lite0-64", "fid": 2 * scores["fid"], "recall": 0.1, "floor": 5.0}
            job.output.write_text(json.dumps(scores | {"floor": 3.0, "spectrum": [1, 2, 3, 4], "also": [also]}))
    found = table.collect(asked, rows, "run/reproduce_table3.sh --rows x")
    assert {row["sampler"] for row in found["rows"]} == {"s-pndm", "dpmpp-2m", "unipc"}
    (other,) = found["also"]
    pairs = zip(found["rows"], other["rows"], strict=True)
    assert all(b["cells"][0]["fid"] == pytest.approx(2 * a["cells"][0]["fid"]) for a, b in pairs)
    edm = [row for row in found["rows"] if row["dataset"] == "CIFAR-10 16x16 (EDM)"]
    least = [min(table.cell_of(r, 10)["fid"] for r in edm if r["method"] == m) for m in ("control", "OGDM")]
    lines = [line for line in table.best_lines(found) if "(EDM)" in line]
    assert [f"{fid:.4g} (" in line for fid, line in zip(least, lines[:2], strict=True)] == [True, True]
    assert f"{100 * (least[1] / least[0] - 1):+.0f} %" in lines[2]
    markdown = table.to_markdown(found)
    assert "real images have 3.00" in markdown and "have 5.00" in markdown and "1.00 2.00 3.00 4.00" in markdown
    assert markdown.index("Best with best") < markdown.index("| control, S-PNDM")
    kept = report.without_local_paths(found)
    assert "stages" not in json.dumps(kept) and report.section(kept)


@pytest.mark.parametrize(("given", "title", "flags"), [
    ({}, "features of lite0, not Inception's", {"--pr-images": 5_000, "--floor": None, "--features": "lite0,lite0-64"}),
    ({"weights": "w.pth", "images": 10_000}, "features of Inception:",
     {"--pr-images": 10_000, "--floor": None, "--weights": "w.pth"}),
    ({"features": "pixels", "images": 50_000}, "features of pixels, not",
     {"--pr-images": 50_000, "--features": "pixels"}),
])  # fmt: skip
def test_the_title_names_the_net_that_scores_and_the_evaluator_takes_all_samples(options, given, title, flags):
    asked = replace(options, rows=("cifar10-adm-*",), nfes=(10,), scale=get_scale("cpu-cifar10"), **given)
    rows = Planner(asked).rows()
    assert title in table.collect(asked, rows, "x")["title"]
    told = rows[0].scores[10].build(Path()).flags
    assert {name: value for name, value in told.items() if name not in ("--json", "--cache")} == flags


def test_seeds_that_are_missing_are_said_and_only_shared_ones_are_compared(options):
    """Seed 1 of the control has failed, and seed 2 of OGDM: seed 0 alone is compared."""
    scale, row = get_scale("cpu"), ("cifar10-adm-*",)
    options = replace(options, scale=scale, rows=row, nfes=(10,), seeds=(0, 1, 2))
    rows = finished(options)
    for job in [r.scores[10] for r in rows if (r.preset.ogdm, r.seed) in ((False, 1), (True, 2))]:
        job.marker.unlink()
        (job.folder / "state.json").write_text(json.dumps({"status": "stopped", "reason": "x"}))
    found = table.collect(options, rows, "x")
    before, cell = (next(c for c in r["cells"] if c["nfe"] == 10) for r in found["rows"])
    assert (list(before["seeds"]), list(cell["seeds"])) == ([0, 2], [0, 1])
    change = 100 * (cell["seeds"][0]["fid"] / before["seeds"][0]["fid"] - 1)
    assert cell["change"] == pytest.approx(change)
    assert cell["change"] != pytest.approx(100 * (cell["fid"] / before["fid"] - 1))
    assert table.ours(cell, "fid").endswith(" (2 of 3 seeds)") and cell["status"] == "stopped"
    assert "(2 of 3 seeds)" in table.to_markdown(found)


def test_a_kept_table_says_nothing_of_the_machine_and_renders_as_it_did(compared, options):
    words = ["--scale", "cpu", "--out", str(options.out), "--jobs=2", "--seeds", "0,1,2", "--table", "--weights", "/x"]
    portable = shlex.join(flags.portable(flags.parse(["1", *words])))
    kept = report.without_local_paths(compared | {"command": "with paths", "portable": portable})
    assert kept["command"] == "run/reproduce_table1.sh --scale cpu --seeds 0,1,2"
    text = json.dumps(kept)
    assert str(options.out) not in text and "native" not in text
    section = report.section(json.loads(text))
    assert " ".join(table.lines(compared)[2].split()) in " ".join(section.split())
    assert re.search(r"CIFAR-10 \(ADM\) +\| Baseline +\| 7.08 / 0.583", section)
    assert re.search(r"LSUN Church \(LDM\) +\| OGDM \(ft\)", section)
    page = report.page("# Ours\n", {"table1-cpu": "old"})
    assert report.page(page, {"table1-cpu": section}).startswith("# Ours\n\n<!-- table1-cpu -->\n```")
    assert "old" not in report.page(page, {"table1-cpu": section})


def test_the_page_of_results_is_made_from_its_files():
    text = report.PAGE.read_text()
    assert report.page(text, report.sections()) == text
    assert set(re.findall(r"<!-- (table\S+) -->", text)) == set(report.sections())


# ---- tables that repeat others' numbers ---------------------------------------------------------


@pytest.mark.parametrize("number", flags.ASSEMBLED)
def test_what_a_table_repeats_is_the_papers_own_number(number):
    """The mapping against the paper: FIDs agree, but NFE 8, which Table 3 does not have."""
    repeated = [(cell, source) for cell in paper.table(number).cells
                if (source := table.source(cell, number))]  # fmt: skip
    assert len(repeated) == {4: 32, 8: 2}[number]
    for cell, (of_table, row) in repeated:
        found = {c.nfe: c.fid for c in paper.table(of_table).select(row)}
        assert found.get(cell.nfe) == (None if cell.nfe == 8 else cell.fid)
    copied = [cell for cell in paper.table(number).cells if cell.source == paper.COPIED]
    assert copied and not any(table.source(cell, number) for cell in copied)


def test_tables_4_and_8_are_assembled_and_name_what_is_missing(options, capsys):
    out = str(options.out)
    finished(replace(options, number=3, rows=("*-s-pndm",)))
    assert cli.main(["8", "--out", out]) == 0
    printed = capsys.readouterr().out
    assert f"run/reproduce_table1.sh --rows cifar10-edm-ogdm-ft --nfes 20 --out {out}" in printed
    assert "--rows cifar10-edm-ogdm-ft-s-pndm --nfes 8 --out" in printed
    finished(replace(options, number=3, rows=("cifar10-edm-ogdm-ft-s-pndm",), nfes=(8,), seeds=(1,)))
    assert cli.main(["8", "--out", out, "--dry-run"]) == 0
    assert "s-pndm" not in capsys.readouterr().out  # only Table 1's is missing now
    options.out.rename(options.out.with_name("moved"))
    options = replace(options, out=options.out.with_name("moved"))
    assert cli.main(["4", "--out", str(options.out)]) == 0
    rows = json.loads((options.out / "table4.json").read_text())["rows"]
    done = {(row["row"], cell["nfe"]) for row in rows for cell in row["cells"] if cell["fid"]}
    assert done == {("cifar10-ogdm", 15), ("cifar10-ogdm", 10)} | {
        (row, nfe) for row in ("cifar10-s-pndm", "celeba64-s-pndm", "celeba64-ogdm")
        for nfe in (25, 20, 15, 10)
    }  # fmt: skip
    markdown = (options.out / "table4.md").read_text()
    assert "| DDIM †" in markdown and "† the paper copied" in markdown and "CT ‡" in markdown
    assert (options.out / "table4.png").stat().st_size > 10_000


# ---- images -------------------------------------------------------------------------------------


def test_digits_carry_their_labels_in_both_ways(tmp_path):
    stand_in.write_digits(tmp_path / "images", "digits", 32, count=20)
    labels = dict(json.loads((tmp_path / "images" / "dataset.json").read_text())["labels"])
    files = sorted(p.name for p in (tmp_path / "images").glob("*.png"))
    assert sorted(labels) == files and len(files) == 20
    assert all(int(name.split("_")[0]) == label for name, label in labels.items())
    image = stand_in.Digits(str(tmp_path / "images"), 32, count=3)[0]["image"]
    assert image.shape == (32, 32, 3) and image.min() >= -1 and 0 < image.max() <= 1
    images = torch.from_numpy(((image + 1) * 127.5).round().astype("uint8")).permute(2, 0, 1)
    features = stand_in.random_features(torch.stack([images, 255 - images]))
    assert features.shape == (2, 8) and not torch.allclose(features[0], features[1])
    assert torch.equal(features, stand_in.random_features(torch.stack([images, 255 - images])))


def test_reference_images_are_central_squares(tmp_path, refused):
    pixels = np.zeros((20, 41, 3), dtype=np.uint8)
    pixels[:, 10:30] = 200
    (tmp_path / "lsun" / "churches").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "lsun" / "churches" / "a.png")
    (tmp_path / "lsun" / lsun_reference.LIST).write_text("a.png\n")
    prepare(["lsun-reference", str(tmp_path / "lsun"), str(tmp_path / "out"), "--size", "10"])
    with Image.open(tmp_path / "out" / "000000.png") as image:
        assert image.size == (10, 10) and np.asarray(image).min() == 200
    with refused("church_outdoor_train.txt"):
        prepare(["lsun-reference", str(tmp_path), str(tmp_path / "out")])
