import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ogdm_core import DiscreteVP
from run.benchmark import __main__ as program
from run.benchmark import measure
from run.benchmark.flags import CASES, DEFAULT, parse
from run.benchmark.step import Network, Trainer
from run.provenance import ROOT

BATCH, SIZE = 2, 8


def toy(resolution=SIZE, channels=0):
    """A denoiser of two convolutions."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1))
    return Network(net, lambda x, t: net(x), DiscreteVP.linear(), torch.tensor(500), 3, resolution, "a toy")


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """run(*flags) -> exit code, results, what was printed: the program on the toy."""
    monkeypatch.setattr(program, "edm", toy)
    monkeypatch.setattr(program, "EDM", tmp_path)
    (tmp_path / "training").mkdir()
    threads = torch.get_num_threads()

    def get(*flags):
        out = tmp_path / "speed.json"
        code = program.main(["--threads", "1", "--out", str(out), "--resolution", "8", *flags])
        return code, json.loads(out.read_text()), capsys.readouterr()

    yield get
    torch.set_num_threads(threads)


def test_cases_are_chosen_by_name():
    assert parse([]).cases == DEFAULT
    assert parse(["--cases", "all"]).cases == list(CASES)
    assert parse(["--cases", "heun_exact, euler_light,heun_exact"]).cases == ["heun_exact", "euler_light"]


def test_a_case_is_of_the_d_that_it_names():
    for name, case in CASES.items():
        assert case.config.d_kind == ("light" if "light" in name else "paper"), name


@pytest.mark.parametrize(
    ("name", "denoiser", "d"),
    [("baseline", 1, 0), ("euler_exact", 1, 3), ("euler_fused", 1, 2), ("heun_exact", 2, 3), ("euler_naive", 3, 3)],
)
def test_evaluations_are_counted_from_shapes_alone(name, denoiser, d):
    steps = measure.Steps(Trainer(toy(), BATCH), [n for n in (name,) if n in CASES], shapes=True)
    found = steps.count(name)
    assert found["denoiser_forward"] == denoiser and found["d_forward"] == pytest.approx(d)
    assert not steps.trainer.net._forward_pre_hooks


def test_operations_are_torchs_count():
    steps = measure.Steps(Trainer(toy(), BATCH), [])
    with FlopCounterMode(display=False) as theirs:
        steps.trainer.step()
    first, second = 2 * BATCH * SIZE**2 * 3 * 4 * 9, 2 * BATCH * SIZE**2 * 4 * 3
    found = steps.count("baseline")["flops"]
    assert found == theirs.get_total_flops() == 2 * first + 3 * second  # no gradient of images


def test_a_case_stands_between_plain_steps_and_rounds_rotate(monkeypatch):
    names = ["euler_exact", "euler_fused", "euler_r1"]
    steps = measure.Steps(Trainer(toy(), BATCH), names)
    cost = {
        ("baseline", "plain"): 4.0, ("euler_exact", "plain"): 6.0, ("euler_exact", "r1"): 10.0,
        ("euler_fused", "plain"): 5.0, ("euler_fused", "r1"): 8.0, ("euler_r1", "r1"): 10.0,
    }  # fmt: skip
    taken, now = [], [0.0]

    def take(name, kind):  # on a machine that gets slower all the time
        now[0] += cost[name, kind] * (1 + 0.05 * len(taken))
        taken.append(name)

    monkeypatch.setattr(steps, "take", take)
    monkeypatch.setattr(steps, "_observer", lambda name: None)
    monkeypatch.setattr(steps, "clock", lambda: now[0])
    rounds = [list(steps.round(number)) for number in range(3)]
    assert [len(r) for r in rounds] == [5, 3, 5]  # lazy R1 is timed in every second round
    assert len({r[0]["case"] for r in rounds}) == 3
    for i, name in enumerate(taken):
        assert name == "baseline" or taken[i - 1] == taken[i + 1] == "baseline"
    counts = dict.fromkeys(("baseline", *names), {"flops": 1.0, "denoiser_forward": 1, "d_forward": 0})
    found = measure.summarise(counts, sum(rounds, []))["cases"]
    for name, ratio in zip(names, ((15 * 6 + 10) / 64, (15 * 5 + 8) / 64, 2.5), strict=True):
        assert found[name]["ratio"] == pytest.approx(ratio)
        assert found[name]["quartiles"] == pytest.approx([ratio] * 2)


def test_the_program_writes_all_it_promises(run, tmp_path):
    code, found, printed = run("--cases", "euler_light,euler_narrow", "--repeats", "1")
    assert code == 0 and set(found["cases"]) == {"euler_light", "euler_narrow"}
    for case in found["cases"].values():
        assert case["ratio"] > 0 and case["flops_ratio"] > 1
        assert len(case["quartiles"]) == 2 and case["seconds"] > 0
    assert {"commit", "versions", "settings"} <= set(found) and len(found["timings"]) == 4
    assert found["command"].startswith("run/benchmark.sh --threads 1")
    page = (tmp_path / "speed.md").read_text()
    assert "| euler_light |" in page and "| euler_narrow |" in page
    assert (tmp_path / "speed.png").stat().st_size > 5_000
    assert "euler_narrow" in printed.out


def test_operations_alone_take_no_steps(run, tmp_path):
    code, found, _ = run("--cases", "heun_exact", "--no-time", "--resolution", "16")
    assert code == 0 and found["setup"]["resolution"] == 16
    assert found["cases"]["heun_exact"]["flops_ratio"] > 1.9
    assert "ratio" not in found["cases"]["heun_exact"] and "seconds" not in found["baseline"]
    assert "| heun_exact | - |" in (tmp_path / "speed.md").read_text()
    assert not (tmp_path / "speed.png").exists()


def test_an_interrupted_run_keeps_what_it_measured(run, monkeypatch):
    plain = measure.Steps.round

    def interrupted(self, number):
        if number == 1:
            raise KeyboardInterrupt
        yield from plain(self, number)

    monkeypatch.setattr(measure.Steps, "round", interrupted)
    code, found, _ = run("--cases", "euler_light", "--repeats", "4")
    assert code == 130 and found["cases"]["euler_light"]["ratio"] > 0


def test_edms_network_is_named_when_it_is_missing(monkeypatch, tmp_path, refused):
    monkeypatch.setattr(program, "EDM", tmp_path)
    with refused("run/setup.sh edm fetches it"):
        program.main(["--out", str(tmp_path / "a.json")])


def test_edms_own_network_is_measured(submodule, tmp_path):
    submodule("edm")
    flags = ["--cases", "heun_exact", "--channels", "16", "--resolution", "8", "--repeats", "1"]
    command = [sys.executable, "-m", "run.benchmark", *flags, "--out", tmp_path / "speed.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "speed.json").read_text())
    assert "NVlabs/edm" in results["setup"]["network"]
    assert results["cases"]["heun_exact"]["evaluations"]["denoiser_forward"] == 2
