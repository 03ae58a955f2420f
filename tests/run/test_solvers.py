"""run/solvers.sh: each cell scored as run/evaluate.sh does, once; tables; grids of one's own; native checkpoints."""

import contextlib
import io
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ogdm_core import DiscreteVP, KarrasVE, RectifiedFlow, sample
from ogdm_core.grids import read_grid
from run.solvers import flags, report, search
from tests.core.toys import Mixture
from tests.run.test_docs import ROOT

MODEL = ROOT / "run" / "quickstart" / "baseline-digits"
QUICK = [
    "--features",
    "pixels",
    "--nfe",
    "5",
    "--count",
    "32",
    "--solvers",
    "euler,ipndm",
    "--grids",
    "linear,trailing",
]


def solvers(out, *words, model=MODEL):
    """What the command writes on stdout and stderr, and its exit status."""
    from run.solvers.__main__ import main

    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        try:
            status = main(list(map(str, [model, words[0], *QUICK, *words[1:], "--out", out])))
        except SystemExit as stop:
            status = stop.code
    return SimpleNamespace(stdout=said.getvalue(), stderr=errors.getvalue(), status=status)


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    pytest.importorskip("diffusers")
    out = tmp_path_factory.mktemp("solvers")
    done = solvers(out, "digits")
    assert done.status == 0, done.stderr
    return out, done


def test_every_solver_is_scored_on_every_grid(scored):
    out, done = scored
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert {(row["solver"], row["grid"]) for row in rows} == {
        (solver, grid) for solver in ("euler", "ipndm") for grid in ("linear", "trailing")
    }
    assert done.stderr.count("min left") == 4
    fids = [float(line.split("|")[3].strip(" *")) for line in done.stdout.splitlines()[4:] if line[0] == "|"]
    assert fids == sorted(fids) and done.stdout.count("**") == 2
    assert (out / "solvers.png").stat().st_size > 10_000


def test_the_scores_are_those_of_the_evaluator(scored):
    from run.evaluate.__main__ import main

    out, _ = scored
    rows = json.loads((out / "results.json").read_text())["rows"]
    scores = {json.loads(path.read_text())["fid"] for path in (out / "scores").iterdir()}
    assert scores == {row["fid"] for row in rows}
    found = set()
    for file in (out / "samples").iterdir():
        words = ["digits", str(file), "--features", "pixels", "--no-cache", "--json", str(out / "one.json")]
        assert main(words) == 0
        found.add(round(json.loads((out / "one.json").read_text())["fid"], 9))
    assert found == {round(fid, 9) for fid in scores}


def test_a_second_run_costs_what_is_new(scored):
    out, first = scored
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*.npz")}
    again = solvers(out, "digits", "--solvers", "euler,ipndm,deis")
    assert again.stderr.count("min left") == 2 and "deis" in again.stderr
    assert {p: p.stat().st_mtime_ns for p in before} == before
    (victim, *_) = (out / "scores").iterdir()  # as after a stop
    victim.unlink()
    assert solvers(out, "digits").stderr.count("min left") == 1
    assert solvers(out, "digits").stdout == first.stdout


def test_a_searched_grid_is_scored_and_taken_by_every_sampler(scored, tmp_path):
    out, _ = scored
    done = solvers(out, "digits", "--search", "8")
    (file,) = (out / "grids").iterdir()
    grid, solver = read_grid(file), file.stem.split("-")[-2]
    assert grid["distance"][1] <= grid["distance"][0] and "| searched |" in done.stdout
    stamp = file.stat().st_mtime_ns
    solvers(out, "digits", "--search", "8")
    assert file.stat().st_mtime_ns == stamp  # it was not searched again
    from run.evaluate.__main__ import main

    words = ["digits", str(MODEL), "--sampler", solver, "--nfe", "5", "--grid", str(file), "--count", "32"]
    scores = tmp_path / "scores.json"
    assert main([*words, "--features", "pixels", "--no-cache", "--json", str(scores)]) == 0
    assert json.loads(scores.read_text())["sampling"]["discretisation"]["times"] == grid["times"]


@pytest.mark.parametrize(("words", "message"), [
    (["nothing"], "give MODEL REFERENCE, or MODEL MODEL REFERENCE, not 1 paths"),
    (["m", "r", "--nfe", "4", "--solvers", "heun"], "--nfe: none of heun can run in exactly 4 evaluations"),
    (["m", "r", "--solvers", "plms"], "'plms' is not known; use some of euler"),
    (["a", "b", "r", "--names", "same,same"], "--names: same,same must be 2 different names"),
])  # fmt: skip
def test_wrong_words_are_one_line(capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        flags.parse(words)
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(("model", "words", "message"), [
    ("nowhere.pkl", [], "nowhere.pkl is no model: give a folder in diffusers' format, or a file of weights: adm's .pt"),
    (ROOT / "README.md", [], "README.md is no model"),
    (MODEL, ["--weights", "none.pth"], "--weights is for Inception"),
])  # fmt: skip
def test_what_is_no_model_is_one_line(tmp_path, model, words, message):
    done = solvers(tmp_path, "digits", *words, model=model)
    assert done.status == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_a_reference_of_another_size_is_refused_before_anything_is_drawn(tmp_path):
    pytest.importorskip("diffusers")
    np.savez(tmp_path / "real.npz", np.zeros((32, 16, 16, 3), np.uint8))
    done = solvers(tmp_path / "out", tmp_path / "real.npz")
    assert done.status == 2 and "give a reference at the samples' size" in done.stderr
    assert not (tmp_path / "out" / "samples").exists()


# ---------------------------------------------------------------- the tables


def row(model, solver, grid, fid, nfe=5):
    return {"model": model, "solver": solver, "grid": grid, "nfe": nfe, "fid": fid, "recall": 0.5, "notes": []}


def test_best_is_compared_with_best():
    rows = [row("plain", "euler", "linear", 8.0), row("plain", "deis", "linear", 4.0),
            row("ogdm", "euler", "linear", 2.0), row("ogdm", "deis", "linear", 5.0)]  # fmt: skip
    said = report.verdict(rows, ["plain", "ogdm"], 5)
    assert said == (
        "NFE 5, best with best: plain 4.000 (DEIS-tAB, linear), ogdm 2.000 (Euler, linear): -50 %. "
        "Cell by cell: ogdm is better in 1 of 2, median change -25 %."
    )
    lines = report.table(rows, ["plain", "ogdm"], 5)
    assert lines[2] == "| Euler | linear | 8.000 | **2.000** | -75 % | 0.500 | 0.500 |"
    assert lines[3] == "| DEIS-tAB | linear | **4.000** | 5.000 | +25 % | 0.500 | 0.500 |"


def test_a_cell_that_one_model_lacks_is_empty():
    rows = [row("plain", "euler", "linear", 8.0), row("ogdm", "euler", "linear", 2.0),
            row("ogdm", "euler", "searched", 1.0)]  # fmt: skip
    assert "| Euler | searched |  | **1.000** |  |  | 0.500 |" in report.table(rows, ["plain", "ogdm"], 5)


# ---------------------------------------------------------------- a grid of one's own


@pytest.mark.parametrize("schedule", [DiscreteVP.linear(), KarrasVE(), RectifiedFlow()], ids=lambda s: type(s).__name__)
def test_a_search_finds_a_nearer_grid_and_the_same_one_again(schedule):
    net = Mixture(schedule)
    x_T = schedule.prior(torch.randn(32, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    goal = sample(net, x_T, schedule, sampler="heun", nfe=99, discretisation="polynomial")

    def distance(times):
        x = sample(net, x_T, schedule, sampler="ipndm", nfe=5, discretisation=search.grid_of(schedule, times))
        return float((x - goal).square().mean().sqrt())

    start = schedule.times(5, "polynomial")
    best, after, before = search.improve(schedule, start, distance, 60, seed=0)
    assert after < 0.9 * before == 0.9 * distance(start) and after == distance(best)
    assert best[0] == start[0] and best[-1] == 0 and len(best) == 6
    assert search.improve(schedule, start, distance, 60, seed=0) == (best, after, before)
    assert search.improve(schedule, start, distance, 0, seed=0)[0] == start


@pytest.mark.parametrize(("content", "message"), [
    (None, "is no time grid, and no such file exists; give a file, or one of linear"),
    ("{", "is no readable JSON file"),
    ("[1, 0]", '"times" must list the times'),
    ('{"times": [3, "x", 0], "T": 3, "schedule": "DiscreteVP"}', '"times" must list the times'),
    ('{"times": [3, 0]}', 'it must name its "schedule"'),
    ('{"times": [3, 3, 0], "T": 3, "schedule": "DiscreteVP"}', "times must fall, and 3 follows 3"),
    ('{"times": [3, 1], "T": 3, "schedule": "DiscreteVP"}', "times must end at the data, 0, not at 1"),
    ('{"times": [3, NaN, 0], "T": 3, "schedule": "DiscreteVP"}', '"times" must list the times'),
])  # fmt: skip
def test_a_file_that_is_no_grid_is_named(tmp_path, content, message):
    file = tmp_path / "grid.json"
    if content:
        file.write_text(content)
    with pytest.raises(ValueError) as error:
        read_grid(file)
    assert str(file) in str(error.value) and message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("schedule", "times", "message"), [
    (DiscreteVP.linear(50), [1000, 500, 0], "is for DiscreteVP with T = 1000; this model has DiscreteVP, 50"),
    (KarrasVE(), [1000, 500, 0], "is for DiscreteVP with T = 1000; this model has KarrasVE, 80"),
    (DiscreteVP.linear(), [1000, 700, 500, 0], "has 3 steps; this sampler and NFE take 2"),
    (DiscreteVP.linear(), [1001, 500, 0], "must be whole and at most T = 1000"),
    (DiscreteVP.linear(), [1000, 0.5, 0], "must be whole and at most T = 1000"),
])  # fmt: skip
def test_a_grid_of_another_model_is_refused(schedule, times, message):
    grid = {"schedule": "DiscreteVP", "T": 1000, "times": times}
    with pytest.raises(ValueError, match=message):
        schedule.times(2, grid)
    with pytest.raises(ValueError, match="must begin at T = 80, where the noise is, not at 40"):
        KarrasVE().times(2, {"schedule": "KarrasVE", "T": 80.0, "times": [40, 3, 0]})


# ---------------------------------------------------------------- native checkpoints

ADM = (
    "--image_size 8 --num_channels 32 --num_res_blocks 1 --channel_mult 1,1 --attention_resolutions 2 --num_heads 4 "
    "--learn_sigma False --use_scale_shift_norm True --noise_schedule linear"
)
LDM = """
import sys
import torch
from omegaconf import OmegaConf
folder, third_party = sys.argv[1:]
base = OmegaConf.load(f"{third_party}/latent-diffusion/configs/latent-diffusion/lsun_churches-ldm-kl-8.yaml")
size = OmegaConf.from_dotlist(["model.params.image_size=8", "model.params.unet_config.params.image_size=8"])
OmegaConf.save(OmegaConf.merge(base, OmegaConf.load("run/backbones/ldm_cpu.yaml"), size), f"{folder}/config.yaml")
saved = torch.load(f"{folder}/model.ckpt", weights_only=True)
saved["state_dict"] |= {"model_ema.decay": torch.tensor(0.9), "model_ema.num_updates": torch.tensor(0)}
torch.save(saved, f"{folder}/model.ckpt")
"""


@pytest.mark.parametrize(("backbone", "folder", "packed", "file", "words"), [
    ("edm", "edm", "digits-edm-cond", "model.pkl", []),
    ("adm", "guided-diffusion", "digits-adm", "model.pt", ["--native", ADM]),
    ("ldm", "latent-diffusion", "digits-ldm", "model.ckpt", []),
])  # fmt: skip
def test_native_checkpoints_are_sampled(patched, tmp_path, backbone, folder, packed, file, words):
    third_party = patched(folder).parent
    checkpoint, weights = tmp_path / file, f"run/tables/baselines/{packed}.safetensors"
    unpack = ["-m", "run.tables.baselines", "unpack", backbone, weights, str(checkpoint)]
    subprocess.run([sys.executable, *unpack, "--third-party", str(third_party)], cwd=ROOT, check=True)
    if backbone == "ldm":
        subprocess.run([sys.executable, "-c", LDM, str(tmp_path), str(third_party)], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "run.solvers", str(checkpoint), "digits", *QUICK, "--out", str(tmp_path / "out")]
    command += ["--third-party", str(third_party)]
    subprocess.run([*command, *words], cwd=ROOT, check=True)
    for path in (tmp_path / "out" / "samples").iterdir():
        with np.load(path) as archive:
            images = archive["arr_0"]
        assert images.shape == (32, 8, 8, 3) and images.std() > 60  # digits; noise that was not denoised is grey
        assert abs(float(images.mean()) - 78) < 25  # of the digits' own mean
    if backbone == "adm":
        wider = ADM.replace("--num_channels 32", "--num_channels 64")
        for native, message in ("", "there is no flags.json"), (wider, "does not fit the network of these flags"):
            wrong = subprocess.run([*command, "--native", native], cwd=ROOT, capture_output=True, text=True)
            assert wrong.returncode == 2 and message in wrong.stderr
