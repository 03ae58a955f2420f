"""The quickstart end to end, small: files, table, honesty about a discriminator at chance."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers", reason="the diffusers extra is not installed")

from ogdm_core import OGDMConfig, flags  # noqa: E402
from ogdm_core.diffusers import __main__ as trainer  # noqa: E402
from ogdm_core.images import digits  # noqa: E402
from run.evaluate.classifier import train_classifier  # noqa: E402
from run.figures.samples import load_method  # noqa: E402
from run.presets import EXPERIMENTS  # noqa: E402
from run.provenance import ROOT  # noqa: E402
from run.quickstart import __main__ as quickstart  # noqa: E402
from run.quickstart import report, score  # noqa: E402
from run.quickstart.flags import (  # noqa: E402
    parse,
    to_argv,
    trainer_flags,  # noqa: E402
)
from run.quickstart.runner import Runner  # noqa: E402
from run.sampling import Model  # noqa: E402
from run.toy import __main__ as toy  # noqa: E402

SMALL = ["--data", "digits", "--steps", "4", "--samples", "100"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("quickstart")
    assert quickstart.main(["--out", str(out), *SMALL]) == 0
    return out


@pytest.mark.slow
def test_it_writes_what_it_promises(finished):
    results = json.loads((finished / "results.json").read_text())
    assert {r["method"] for r in results["rows"]} == {"control", "ogdm"}
    for row in results["rows"]:
        assert {"method", "sampler", "nfe", "fid", "recall", "seed"} <= set(row)
        assert row["fid"] > 0 and 0 <= row["recall"] <= 1
    cells = {(r["sampler"], r["nfe"]) for r in results["rows"]}
    assert cells == {(s, n) for s, nfes in score.GRID.items() for n in nfes}
    assert results["command"].startswith("run/quickstart.sh") and results["versions"]["torch"]
    for name in report.FILES:
        assert (finished / name).stat().st_size > 1000
    page = (finished / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert not re.search(r'(src|href)="https?://', page)


@pytest.mark.slow
def test_a_second_run_does_nothing_and_says_the_same(finished, monkeypatch):
    before = json.loads((finished / "results.json").read_text())
    monkeypatch.setattr(Runner, "run", lambda *a, **k: pytest.fail("ran a child"))
    assert quickstart.main(["--out", str(finished), *SMALL]) == 0
    after = json.loads((finished / "results.json").read_text())
    assert after["rows"] == before["rows"]


@pytest.mark.slow
def test_a_longer_control_has_a_run_of_its_own_and_ogdms_stays(finished):
    def folders(*argv):
        args = parse(["--out", str(finished), *SMALL, *argv])
        rest = [SimpleNamespace(run=lambda *words: None), EXPERIMENTS["digits"]["model"], finished]
        return [quickstart.run_method(args, *rest, m, 0) for m in ("ogdm", "control")]

    (ogdm, control), more = folders(), folders("--control-steps", "6")
    assert more[0] == ogdm and more[1] != control


@pytest.mark.slow
def test_each_sampler_is_scored_on_its_time_grid(finished, tmp_path):
    run, path = next((finished / "runs").glob("control-*")), tmp_path / "rows.json"
    classifier = next(finished.glob("classifier-*.pt"))

    def rows(*flags):
        score.main([str(run), "--cells", "euler-5,s-pndm-5", "--samples", "100", "--output",
                    str(path), "--classifier", str(classifier), *flags])  # fmt: skip
        return json.loads(path.read_text())["rows"]

    (euler, pndm), mixed = rows(), rows("--discretisation", "euler-5=quadratic")
    assert (euler["times"], mixed[0]["times"], mixed[1]) == ("linear", "quadratic", pndm)
    assert euler["fid"] != mixed[0]["fid"]
    everywhere = rows("--discretisation", "quadratic")
    assert everywhere[0] == mixed[0] and everywhere[1]["times"] == "quadratic"


@pytest.mark.slow
def test_the_experiments_grids_are_given_to_the_score(finished):
    seen = []
    args = parse(["--out", str(finished), "--data", "mnist"])
    runner = SimpleNamespace(run=lambda name, module, words, *log: seen.append(words))
    mnist = EXPERIMENTS["mnist"]
    for method in ("control", "ogdm"):
        quickstart.run_method(args, runner, mnist["model"], finished, method, 0)
        words = seen[-1][seen[-1].index("--discretisation") + 1]
        assert score.time_grids(words) == mnist["times"]


@pytest.mark.parametrize("argv", [[], ["--data", "digits"], ["--ogdm-recipe", "release", "--ogdm-fused", "no"],
                                  ["--ogdm-d-width", "0.5", "--ogdm-d-kind", "paper"]])  # fmt: skip
def test_the_trainer_gets_the_settings_that_differ_from_its_own(argv):
    config = parse(argv).config
    words = to_argv(trainer_flags(config))
    args = trainer.parser().parse_args([*words, "--output", "out"])
    assert flags.from_args(args, "diffusers") == config


@pytest.mark.parametrize("data", EXPERIMENTS)
def test_the_shipped_baselines_load_in_float32_and_draw(data):
    model = Model(str(EXPERIMENTS[data]["model"]))
    assert model.dtype == torch.float32
    noise = torch.randn(2, *model.shape, generator=torch.Generator().manual_seed(0))
    times = EXPERIMENTS[data]["times"].get(f"euler-{score.STEPS}", "linear")
    estimates = score.denoised(model, noise, times)
    assert estimates.shape == (2, score.STEPS, *model.shape)
    drawn = model.draw(noise, "euler", score.STEPS, discretisation=times)
    torch.testing.assert_close(estimates[:, -1], drawn)  # the last step goes to x_0


@pytest.mark.slow
def test_the_same_seed_gives_the_same_table(finished, tmp_path, monkeypatch):
    run = next((finished / "runs").glob("control-*"))
    monkeypatch.setattr(score, "GRID", {"euler": (5,), "f-pndm": (15,)})
    argv = [str(run), "--samples", "100", "--classifier", *map(str, finished.glob("classifier-*"))]
    score.main([*argv, "--output", str(tmp_path / "again.json")])
    again = json.loads((tmp_path / "again.json").read_text())["rows"]
    first = json.loads((run / "evaluation.json").read_text())["rows"]
    assert all(row in first for row in again)


def test_flags_of_the_method_replace_the_defaults_of_the_job():
    def given(*argv):
        return parse([*argv, "--out", "0.0625"]).config

    assert given() == given("--data", "digits") == OGDMConfig(d_kind="auto", fused=True)
    assert trainer_flags(given()) == {"ogdm": True}
    assert given("--ogdm-gamma", "0.5") == dataclasses.replace(given(), gamma=0.5)


@pytest.mark.parametrize(("accuracy", "at_chance"), [(0.5, True), (0.503, True), (0.53, False)])
def test_a_discriminator_at_chance_is_said_in_plain_words(tmp_path, accuracy, at_chance):
    lines = [{"d_real_acc": 0.9, "d_fake_acc": 0.9}] * 5
    lines += [{"d_real_acc": accuracy + 0.1, "d_fake_acc": accuracy - 0.1}] * 5
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = quickstart.observer_summary([tmp_path])
    assert summary["at_chance"] is at_chance
    assert ("no better than chance" in summary["words"]) is at_chance


@pytest.mark.slow
def test_a_failing_child_is_named_and_stops_the_rest(tmp_path, capfd):
    code = quickstart.main(["--out", str(tmp_path), *SMALL, "--ogdm-k", "0.0001"])
    assert code == 1
    assert "smallest k that works" in capfd.readouterr().err


@pytest.mark.slow
def test_ctrl_c_lets_the_trainings_save_and_the_same_command_continues(tmp_path):
    argv = ["--out", str(tmp_path), "--data", "digits", "--steps", "400", "--samples", "100"]
    command = [sys.executable, "-m", "run.quickstart", *argv]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    for line in child.stdout:
        if line.startswith("ogdm, seed 0: train: step"):
            child.send_signal(signal.SIGTERM)
            break
    _, said = child.communicate(timeout=120)
    assert child.returncode == 130 and "the same command continues" in said
    (checkpoint,) = tmp_path.glob("runs/ogdm-*/checkpoint.pt")
    assert 0 < torch.load(checkpoint, weights_only=True)["step"] < 400


def test_progress_is_read_from_the_log_and_the_last_lines_of_a_failed_child_are_shown(tmp_path, monkeypatch, capfd):
    child = """
        import pathlib, sys, time
        log = pathlib.Path(sys.argv[1])
        for text in ('{"step": 5, "loss": 0.25}\\n{"step": 6', '{"step": 10, "loss": 0.125}\\n'):
            log.write_text(text)
            time.sleep(1)
        print("\\n".join(map(str, range(100))))
        sys.exit("no space left")
    """
    (tmp_path / "child.py").write_text(textwrap.dedent(child))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log, failed = tmp_path / "log.jsonl", "-m child .*failed:\n81\n(.*\n)*99\nno space left"
    with open(os.devnull) as lock, Runner(lock.fileno()) as runner, pytest.raises(RuntimeError, match=failed):
        runner.run("a child", "child", [str(log)], log, 10)
    said = capfd.readouterr().out
    assert said == "a child: step 5/10, loss 0.250\na child: step 10/10, loss 0.125\n"


def test_the_page_escapes_what_it_prints(tmp_path):
    bad = "<script>"
    row = {"sampler": "euler", "nfe": 10, "recall": 0.5, "fid": 1.0, "times": bad}
    results = {
        "rows": [row | {"method": "control"}, row | {"method": "ogdm"}], "data": bad, "command": bad,
        "config": {"seeds": [bad], "steps": bad, "control_steps": bad, "samples": bad},
        "observer": {"words": bad}, "classifier_accuracy": 1.0, "half_fid": 1.0,
    }  # fmt: skip
    for name in ("fid_vs_nfe.png", "samples.png", "trajectory.png"):
        (tmp_path / name).write_bytes(b"")
    page = report.page(results, tmp_path)
    assert "<script" not in page and page.count("&lt;script&gt;") >= 9


def test_the_table_is_a_mean_over_seeds():
    row = {"sampler": "euler", "times": "linear", "nfe": 5, "recall": 0.5}
    rows = [row | {"method": "control", "fid": 4.0, "seed": 0},
            row | {"method": "control", "fid": 6.0, "seed": 1},
            row | {"method": "ogdm", "fid": 1.0, "seed": 0},
            row | {"method": "ogdm", "fid": 3.0, "seed": 1}]  # fmt: skip
    (cell,) = report.cells({"rows": rows})
    assert cell["control_fid"] == 5.0 and cell["ogdm_fid"] == 2.0 and cell["change"] == -60.0


DOCS = Path(report.__file__).parents[2] / "docs"


def test_each_cell_is_on_the_grid_on_which_the_control_was_measured_to_be_best():
    rows = json.loads((DOCS / "results/quickstart-grids.json").read_text())["rows"]
    two = {"linear", "quadratic"}  # the paper's, of which its samplers but Heun have the choice
    rows = sorted((row for row in rows if row["method"] == "control"), key=lambda r: -r["fid"])
    rows = [r for r in rows if r["times"] in two or r["sampler"] in ("heun", "dpmpp-2m", "unipc")]
    best = {(row["sampler"], row["nfe"]): row["times"] for row in rows}
    assert set(best) == {(s, n) for s, nfes in score.GRID.items() for n in nfes}
    times = EXPERIMENTS["mnist"]["times"]
    assert best == {cell: times.get(f"{cell[0]}-{cell[1]}", "linear") for cell in best}


def test_a_cell_names_both_grids_where_they_differ():
    row = {"sampler": "heun", "nfe": 11, "fid": 1.0, "recall": 0.5, "seed": 0}
    rows = [row | {"method": "control", "times": "karras"},
            row | {"method": "ogdm", "times": "trailing"}]  # fmt: skip
    (cell,) = report.cells({"rows": rows})
    assert cell["times"] == "karras / trailing"


def test_the_classifier_tells_digits_apart_and_has_full_rank_features():
    images = digits()
    torch.set_num_threads(1)
    net, accuracy = train_classifier(images, epochs=6)
    assert accuracy > 0.9 and net.size == images.size
    features = net.features(images.all())
    assert torch.linalg.matrix_rank(features.double().T.cov()) == features.shape[1]
    torch.testing.assert_close(features.var(0).mean(), torch.tensor(1.0))


@pytest.mark.slow
def test_the_toy_measures_distance_to_its_own_data(tmp_path, capsys):
    torch.manual_seed(0)
    assert toy.distance(toy.data(500)).max() < 2e-3
    off = toy.spiral(torch.tensor([1.0])) + torch.tensor([0.1, 0.0])[None, :, None, None]
    assert 0.05 < float(toy.distance(off)) <= 0.1
    toy.main(["--out", str(tmp_path), "--pretrain", "3", "--steps", "2"])
    assert (tmp_path / "toy.png").exists()
    assert "mean distance" in capsys.readouterr().out


def test_cifar10_has_flags_of_its_own(tmp_path):
    def said(*flags):
        command = ["run/quickstart.sh", "--data", "cifar10", *flags]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert "--archives DIR" in said("--help").stdout
    refused = said("--steps", "3")
    assert refused.returncode == 1 and "takes --out, --archives and --jobs, not --steps" in refused.stderr
    assert "--out needs a value" in said("--out").stderr


def test_a_pattern_with_a_star_takes_the_newest_file(tmp_path):
    for age, value in ((50, 1), (5, 2)):
        file = tmp_path / f"job.euler-5.sample-{value}" / "samples.npz"
        file.parent.mkdir()
        np.savez(file, arr_0=np.full((2, 4, 4, 3), value, np.uint8))
        os.utime(file, (time.time() - age,) * 2)
    method = load_method(f"x={tmp_path}/job.{{sampler}}-{{nfe}}.sample-*/samples.npz")
    assert method.draw(torch.zeros(2), 5, "euler").unique().tolist() == [2]
