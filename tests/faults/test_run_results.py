"""Faults of the evaluator, the quickstart and the tables: no number is lost, none is made twice."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ogdm_core.images import Images
from ogdm_core.lock import exclusive
from run.evaluate import classifier, metrics
from run.quickstart import __main__ as quickstart
from run.quickstart import report, score
from run.quickstart.runner import Runner
from run.sweep import __main__ as sweep
from run.tables import __main__ as tables
from run.tables import workflow
from run.tables.jobs import Job
from run.tables.rows import Options
from run.tables.scale import get_scale
from run.toy import __main__ as toy


def test_a_fault_of_ours_keeps_its_traceback(tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise ValueError("ours")

    monkeypatch.setattr(toy, "train", fails)
    monkeypatch.setattr(sweep, "workflow", fails)
    classifier = tmp_path / "classifier.pt"
    classifier.touch()
    for main, flags in ((toy.main, []), (sweep.main, ["--classifier", str(classifier)])):
        with pytest.raises(ValueError, match="ours"):
            main([*flags, "--out", str(tmp_path)])


def test_features_of_1e25_have_the_precision_and_recall_of_small_ones():
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(200, 8, generator=draw) for _ in range(2))
    small, large = (metrics.precision_recall(x * size, 1.3 * y * size) for size in (1.0, 2.0**84))
    assert 0.5 < small[0] < 0.95 and large == pytest.approx(small, abs=0.02)


def test_a_second_quickstart_waits_and_says_for_whom(tmp_path, monkeypatch, capsys):
    worked = threading.Event()
    monkeypatch.setattr(quickstart, "work", lambda *a: worked.set())
    with exclusive(tmp_path / ".lock", "testing"):
        second = threading.Thread(target=quickstart.main, args=[["--out", str(tmp_path)]])
        second.start()
        said = ""
        for _ in range(1000):  # until it waits; ten seconds are more than enough
            said += capsys.readouterr().err
            if "working in" in said:
                break
            time.sleep(0.01)
        assert not worked.is_set()
    second.join(60)
    assert worked.is_set() and f"waiting: process {os.getpid()}" in said


def test_the_quickstarts_children_hold_its_lock(tmp_path, monkeypatch):
    """Where the quickstart is killed and a training is not, a second quickstart waits for it."""
    (tmp_path / "holds.py").write_text("import os, sys\nos.fstat(int(sys.argv[1]))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with exclusive(tmp_path / ".lock", "testing") as lock, Runner(lock) as runner:
        runner.run("child", "holds", [str(lock)])


@pytest.mark.parametrize("end", [KeyboardInterrupt, OSError("disk full")])
def test_the_quickstart_prints_its_numbers_before_it_writes_them(tmp_path, monkeypatch, capsys, end):
    def fail(*args):
        raise end

    found = {"rows": [], "classifier_accuracy": 1.0, "half_fid": 0.1}
    monkeypatch.setattr(score, "ensure_classifier", lambda *a: None)
    for name, value in {
        "ensure_baseline": None, "run_method": tmp_path, "scores": found,
        "fingerprint": "", "observer_summary": {}, "commit": "", "versions": {},
    }.items():  # fmt: skip
        monkeypatch.setattr(quickstart, name, lambda *a, value=value: value)
    monkeypatch.setattr(report, "print_table", lambda results: print("the numbers"))
    monkeypatch.setattr(report, "write", fail)
    status = quickstart.main(["--out", str(tmp_path)])
    said = capsys.readouterr()
    assert status == (130 if end is KeyboardInterrupt else 1) and "the numbers" in said.out
    assert ("the same command continues" if status == 130 else "error: disk full") in said.err


@pytest.mark.parametrize("damaged", ["evaluation.json", "evaluation.npz", None])
def test_damaged_scores_are_made_again(tmp_path, damaged):
    np.savez(tmp_path / "evaluation.npz", a=np.ones(3))
    (tmp_path / "evaluation.json").write_text('{"rows": []}')
    if damaged:
        whole = (tmp_path / damaged).read_bytes()
        (tmp_path / damaged).write_bytes(whole[: len(whole) // 2])
    assert quickstart.scores(tmp_path) == (None if damaged else {"rows": []})


@pytest.mark.parametrize("keep", [0, 0.5, 1])
def test_a_damaged_classifier_is_made_again(tmp_path, monkeypatch, keep):
    net = classifier.Classifier(1, 10)
    monkeypatch.setattr(classifier, "train_classifier", lambda images: (net, 0.5))
    path = score.ensure_classifier(tmp_path, "digits")
    before = path.read_bytes()
    path.write_bytes(before[: int(keep * len(before))])
    with torch.no_grad():
        net.scale.fill_(2.0)
    score.ensure_classifier(tmp_path, "digits")
    again, _ = classifier.load_classifier(path, Images(np.zeros((1, 1, 8, 8), np.uint8)))
    assert float(again.scale) == (1.0 if keep == 1 else 2.0)  # a whole one is kept


@pytest.mark.parametrize("text", ["", '{"output": ', "[]", "{}"])
def test_a_damaged_record_means_that_a_job_is_not_done(tmp_path, text):
    job = Job("a", "score", tmp_path, {}, lambda folder: None, "out.txt")
    job.folder.mkdir(parents=True)
    job.output.write_text("")
    job.marker.write_text(json.dumps({"output": str(job.output)}))
    assert job.record()
    for file in (job.marker, job.folder / "state.json"):
        file.write_text(text)
    assert job.record() is None and job.state() == {}


def test_ctrl_c_while_snakemake_is_started_leaves_nothing_behind(tmp_path, monkeypatch):
    start, started = subprocess.Popen, []

    def interrupted(command, **options):
        os.kill(os.getpid(), signal.SIGINT)
        started.append(start([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return started[0]

    monkeypatch.setattr(workflow.subprocess, "Popen", interrupted)
    job = Job("a", "score", tmp_path, {}, lambda folder: None, "out.txt")
    rows = [SimpleNamespace(scores={10: job})]
    assert tables.run(Options(1, out=tmp_path, scale=get_scale("smoke"), jobs=1), rows, []) == 130
    assert started[0].returncode is not None


def test_a_table_is_printed_before_it_is_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "x")
    assert tables.main(["1", "--scale", "smoke", "--table", "--out", out]) == 1
    said = capsys.readouterr()
    assert "FID / recall" in said.out and "error: " in said.err and "Traceback" not in said.err
