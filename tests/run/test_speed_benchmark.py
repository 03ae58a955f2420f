import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ogdm_core import DiscreteVP
from run.benchmark import __main__ as program
from run.benchmark import measure
from run.benchmark.cases import CASES, DEFAULT, QUICK
from run.benchmark.step import BACKBONES, Network, Trainer
from run.quickstart import flags as quickstart

ROOT = Path(__file__).resolve().parents[2]


def toy(size=QUICK):
    """A denoiser of two convolutions."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1))
    schedule, t = DiscreteVP.linear(), torch.tensor(500)
    return Network(net, lambda x, t: net(x), schedule, t, 3, size.resolution, words="a toy")


def steps_of(*names, shapes=False):
    steps = measure.Steps(Trainer(toy(), QUICK.batch), list(names), quick=True)
    if not shapes:
        steps.take("baseline", "plain")
    return steps


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """run(*flags) -> exit code, results, what was printed: the program on the toy."""
    monkeypatch.setitem(BACKBONES, "diffusers", toy)
    threads = torch.get_num_threads()

    def get(*flags):
        out = tmp_path / "speed.json"
        common = ["--quick", "--backbone", "diffusers", "--threads", "1", "--out", str(out)]
        code = program.main([*common, *flags])
        return code, json.loads(out.read_text()), capsys.readouterr()

    yield get
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- cases


def test_the_light_discriminator_is_the_quickstarts():
    assert quickstart.parse([]).config.d_kind == CASES["euler_light"].config().d_kind


def test_cases_are_chosen_by_name():
    assert program.parse([]).cases == DEFAULT
    assert program.parse(["--cases", "all"]).cases == list(CASES)
    chosen = program.parse(["--cases", "heun_exact, euler_light,heun_exact"]).cases
    assert chosen == ["heun_exact", "euler_light"]


def test_edms_network_is_named_when_it_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(program, "EDM", tmp_path / "absent.py")
    assert program.parse([]).backbone == "diffusers"
    with pytest.raises(SystemExit):
        program.parse(["--backbone", "edm"])
    assert "run/setup.sh edm fetches it" in capsys.readouterr().err


# ---------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("name", "denoiser", "d", "calls"),
    [
        ("baseline", 1, 0, 0),
        ("euler_exact", 1, 3, 2 + 1 / 16),
        ("euler_fused", 1, 2, 2),
        ("heun_exact", 2, 3, 2 + 1 / 16),
        ("euler_naive", 3, 3, 3),
    ],
)
def test_counts_do_not_need_data(name, denoiser, d, calls):
    names = [] if name == "baseline" else [name]
    steps = steps_of(*names)
    found = steps.count(name)
    assert found["denoiser_forward"] == denoiser
    assert (found["d_forward"], found["d_calls"]) == pytest.approx((d, calls))
    assert not steps.trainer.net._forward_pre_hooks
    del found["peak_bytes"]
    without_data = steps_of(*names, shapes=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert without_data.count(name, memory=False) == found


def test_operations_are_torchs_count():
    steps = steps_of()
    with FlopCounterMode(display=False) as theirs:
        steps.trainer.step()
    pixels = QUICK.batch * QUICK.resolution**2
    first, second = 2 * pixels * 3 * 4 * 9, 2 * pixels * 4 * 3
    found = steps.count("baseline")["flops"]
    assert found == theirs.get_total_flops() == 2 * first + 3 * second  # no gradient of images


def test_peak_memory_is_the_state_and_the_highest_level_of_a_step():
    trainer = steps_of().trainer
    weights = sum(4 * p.numel() for p in trainer.net.parameters())
    peaks = []
    with measure.peak_memory(trainer, None, peaks):
        first = torch.empty(1_000_000)
        del first
        second = torch.empty(3_000_000)
        third = torch.empty(500_000)
        del second, third
    # Weights, EMA and Adam's two moments; its step counts are a few bytes.
    state = 4 * weights + 2 * 4 * trainer.x_0.numel()
    assert peaks[0] == pytest.approx(state + 14_000_000, abs=2_000)


def test_an_observer_adds_its_state_and_its_gradients():
    steps = steps_of("euler_exact")
    d = sum(4 * p.numel() for p in steps.observers["euler_exact"].D.parameters())
    plain, ours = (steps.count(name)["peak_bytes"] for name in ("baseline", "euler_exact"))
    assert ours - plain > 3 * d


# ---------------------------------------------------------------- time


def test_a_case_stands_between_plain_steps_and_rounds_rotate(monkeypatch):
    steps = steps_of("euler_exact", "euler_fused", "euler_r1")
    cost = {
        ("baseline", "plain"): 4.0,
        ("euler_exact", "plain"): 6.0,
        ("euler_exact", "r1"): 10.0,
        ("euler_fused", "plain"): 5.0,
        ("euler_fused", "r1"): 8.0,
        ("euler_r1", "r1"): 10.0,
    }
    taken, now = [], [0.0]

    def take(name, kind):  # on a machine that gets slower all the time
        now[0] += cost[name, kind] * (1 + 0.05 * len(taken))
        taken.append(name)

    monkeypatch.setattr(steps, "take", take)
    monkeypatch.setattr(steps, "clock", lambda: now[0])
    rounds = [list(steps.round(number)) for number in range(3)]
    assert [len(r) for r in rounds] == [5, 3, 5]  # lazy R1 is timed in every second round
    assert len({r[0]["case"] for r in rounds}) == 3
    for i, name in enumerate(taken):
        assert name == "baseline" or taken[i - 1] == taken[i + 1] == "baseline"
    flops = {"flops": 1.0, "denoiser_forward": 1, "d_forward": 0, "d_calls": 0}
    counts = dict.fromkeys(("baseline", "euler_exact", "euler_fused", "euler_r1"), flops)
    found = measure.summarise(counts, sum(rounds, []))["cases"]
    ratios = {"euler_exact": (15 * 6 + 10) / 64, "euler_fused": (15 * 5 + 8) / 64, "euler_r1": 2.5}
    for name, ratio in ratios.items():
        assert found[name]["ratio"] == pytest.approx(ratio)
        assert found[name]["quartiles"] == pytest.approx([ratio] * 2)


# ---------------------------------------------------------------- the program


def test_the_program_writes_all_it_promises(run, tmp_path):
    names = "euler_exact,euler_fused,euler_naive"
    code, found, printed = run("--cases", names, "--repeats", "1")
    assert code == 0 and set(found["cases"]) == set(names.split(","))
    for case in found["cases"].values():
        assert case["ratio"] > 0 and case["memory_ratio"] > 1 and case["flops_ratio"] > 1
        assert len(case["quartiles"]) == 2 and case["seconds"] > 0
    assert {"commit", "versions", "settings"} <= set(found) and len(found["timings"]) == 5
    assert found["command"].startswith("run/benchmark.sh --quick")
    page = (tmp_path / "speed.md").read_text()
    assert all(f"| {name} |" in page for name in names.split(","))
    assert (tmp_path / "speed.png").stat().st_size > 5_000
    assert "euler_naive" in printed.out


def test_operations_alone_take_no_steps(run, tmp_path):
    code, found, _ = run("--cases", "heun_exact", "--no-time", "--resolution", "64")
    assert code == 0 and found["setup"]["resolution"] == 64
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
    code, found, _ = run("--cases", "euler_exact", "--repeats", "4")
    assert code == 130 and found["cases"]["euler_exact"]["ratio"] > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cases", "nope"], "--cases: 'nope' is not allowed; give all, or some of"),
        (["--cases", "euler_exact,euler"], "--cases: 'euler' is not allowed"),
        (["--cases", ","], "--cases: ',' is not allowed"),
        (["--repeats", "0"], "--repeats: 0 is not allowed; give a whole number >= 1"),
        (["--out", "speed.txt"], "name a file that ends in .json"),
        (["--resolution", "33"], "33 is not a power of two from 8"),
        (["--channels", "20"], "20 is not a multiple of 16"),
        (["--device", "tpu"], "--device: 'tpu' is not here; use cpu"),
    ],
)
def test_wrong_flags_are_explained(run, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        run(*flags)
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_edms_own_network_is_measured(submodule, tmp_path):
    submodule("edm")
    flags = ["--quick", "--backbone", "edm", "--cases", "heun_exact", "--repeats", "1"]
    out = tmp_path / "speed.json"
    done = subprocess.run(
        [sys.executable, "-m", "run.benchmark", *flags, "--out", out],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert "NVlabs/edm" in results["setup"]["network"]
    assert results["cases"]["heun_exact"]["evaluations"]["denoiser_forward"] == 2
    assert results["cases"]["heun_exact"]["flops_ratio"] > 1.9


def test_importing_the_core_imports_no_package_but_torch_and_numpy():
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import ogdm_core; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'torch', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "['ogdm_core']", done.stderr
