import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ogdm_core import DiscreteVP
from ogdm_core.splice import diffusers as splice
from run.benchmark import __main__ as program
from run.benchmark import extras, measure, report, rounds
from run.benchmark.cases import CASES, DEFAULT, GROWTH, choose
from run.benchmark.shapes import growth_of_operations
from run.benchmark.trainers import QUICK, DiffusersTrainer, Trainer, find_backbone, tensors
from run.quickstart import __main__ as quickstart

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


class Toy(nn.Module):
    """A denoiser of two convolutions, called like diffusers' own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1))

    def forward(self, x, t, class_labels=None):
        return SimpleNamespace(sample=self.layers(x))


class ToyTrainer(DiffusersTrainer):
    def __init__(self, size=QUICK, device=CPU):
        Trainer.__init__(self, Toy(), size, device)
        self.words, self.schedule, self.splice = "a toy", DiscreteVP.linear(), splice


@pytest.fixture
def trainer():
    made = ToyTrainer()
    measure.take_step(made, measure.Subject("baseline"), "plain")
    return made


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """run(*flags) -> exit code, results, what was printed: the program on the toy."""
    monkeypatch.setattr(program, "build", lambda backbone, size, device: ToyTrainer(size, device))
    threads = torch.get_num_threads()

    def get(*flags):
        out = tmp_path / "speed.json"
        code = program.main(["--quick", "--threads", "1", "--out", str(out), *flags])
        return code, json.loads(out.read_text()), capsys.readouterr()

    yield get
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- cases


def test_the_light_discriminator_is_the_quickstarts():
    assert quickstart.parse([])[1].d_kind == CASES["euler_light"].config().d_kind


def test_cases_are_chosen_by_name():
    assert choose(None) == list(DEFAULT) and choose("all") == list(CASES)
    assert choose("heun_exact, euler_light,heun_exact") == ["heun_exact", "euler_light"]
    for wrong in ("euler", "euler_exact,nope", ","):
        with pytest.raises(ValueError, match="--cases: .* is not allowed; give all, or some of"):
            choose(wrong)


def test_edms_network_is_named_when_it_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr("run.benchmark.trainers.EDM", tmp_path)
    assert find_backbone("auto") == "diffusers"
    with pytest.raises(ValueError, match="run/setup.sh edm fetches it"):
        find_backbone("edm")


# ---------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("name", "kind", "denoiser", "d", "calls"),
    [
        ("euler_exact", "plain", 1, 3, 2),
        ("euler_exact", "r1", 1, 3, 3),
        ("euler_fused", "plain", 1, 2, 2),
        ("heun_exact", "plain", 2, 3, 2),
        ("euler_naive", "r1", 3, 3, 3),
    ],
)
def test_evaluations_of_a_step(trainer, name, kind, denoiser, d, calls):
    subject = measure.subjects(trainer, [name], quick=True)[name]
    assert kind in subject.kinds() and sum(subject.kinds().values()) == 1
    found = measure.count_step(trainer, subject, kind)
    assert (found["denoiser_forward"], found["d_forward"], found["d_calls"]) == (denoiser, d, calls)


def test_operations_are_torchs_count(trainer):
    baseline = measure.Subject("baseline")
    found = measure.count_step(trainer, baseline, "plain")["flops"]
    with FlopCounterMode(display=False) as theirs:
        trainer.step(None, None, measure.Stopwatch(CPU).phase)
    pixels = QUICK.batch * QUICK.resolution**2
    first, second = 2 * pixels * 3 * 4 * 9, 2 * pixels * 4 * 3
    assert found == theirs.get_total_flops() == 2 * first + 3 * second  # no gradient of images


@pytest.mark.parametrize("name", ["euler_exact", "euler_light", "euler_narrow", "euler_r1"])
def test_operations_from_shapes_are_those_of_real_steps(trainer, name):
    subject = measure.subjects(trainer, [name], quick=True)[name]
    plain = measure.count_step(trainer, measure.Subject("baseline"), "plain")["flops"]
    expected = sum(
        weight * measure.count_step(trainer, subject, kind)["flops"]
        for kind, weight in subject.kinds().items()
    )
    without_data = ToyTrainer(device=torch.device("meta"))
    found = growth_of_operations(without_data, (name,), quick=True)[name]["flops_ratio"]
    assert found == pytest.approx(expected / plain, rel=1e-6)
    with pytest.raises(ValueError, match="heun_exact is not counted from shapes"):
        growth_of_operations(without_data, ("heun_exact",), quick=True)


def test_peak_memory_is_the_state_and_the_highest_level_of_a_step(trainer):
    state = sum(t.numel() * t.element_size() for t in trainer.state())
    with measure.peak_memory(trainer, measure.Subject("baseline")) as peak:
        first = torch.empty(1_000_000)
        del first
        second = torch.empty(3_000_000)
        third = torch.empty(500_000)
        del second, third
    assert peak[0] == pytest.approx(state + 14_000_000, abs=2_000)


def test_an_observer_adds_its_state_and_its_gradients(trainer):
    group = measure.subjects(trainer, ["euler_exact"], quick=True)
    plain = measure.count_step(trainer, group["baseline"], "plain")["peak_bytes"]
    ours = measure.count_step(trainer, group["euler_exact"], "plain")["peak_bytes"]
    d = sum(p.numel() * 4 for p in group["euler_exact"].observer.D.parameters())
    kept = sum(t.numel() * 4 for t in tensors(group["euler_exact"].observer))
    assert kept >= 3 * d
    assert ours - plain > kept


# ---------------------------------------------------------------- time


def test_a_phase_inside_another_takes_its_time_from_it(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 9.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    watch = measure.Stopwatch(CPU)
    with watch.phase("outer"), watch.phase("inner"):
        pass
    assert watch.seconds() == {"outer": 6.0, "inner": 3.0}


@pytest.mark.parametrize("name", ["euler_exact", "euler_fused", "heun_exact", "euler_naive"])
def test_every_phase_of_a_step_is_heard(trainer, name):
    subject = measure.subjects(trainer, [name], quick=True)[name]
    kind = max(subject.kinds(), key=subject.kinds().get)
    spent = measure.take_step(trainer, subject, kind)
    assert set(spent) == {"other", "denoiser", "observe", "d_fake", "optimisers", "d_step"}
    assert min(spent.values()) > 0
    assert not subject.observer.D._forward_hooks and not trainer.net._forward_hooks


@pytest.fixture
def drifting(monkeypatch):
    """A machine that gets slower all the time; steps cost what the test says."""
    cost, spent = {}, []

    def take_step(trainer, subject, kind):
        slowness = 1 + 0.05 * len(spent)
        spent.append(subject.name)
        return {phase: slowness * share for phase, share in cost[subject.name, kind].items()}

    monkeypatch.setattr(rounds, "take_step", take_step)
    return cost, spent


def test_drift_cancels_and_lazy_r1_weighs_as_often_as_it_comes(trainer, drifting):
    cost, spent = drifting
    group = measure.subjects(trainer, ["euler_exact", "euler_fused", "euler_r1"], quick=True)
    cost["baseline", "plain"] = {"denoiser": 3.0, "optimisers": 1.0}
    cost["euler_exact", "plain"] = {"denoiser": 3.0, "d_fake": 1.0, "d_step": 2.0}
    cost["euler_exact", "r1"] = {"denoiser": 3.0, "d_fake": 1.0, "d_step": 6.0}
    cost["euler_fused", "plain"] = {"denoiser": 3.0, "d_fake": 1.0, "d_step": 1.0}
    cost["euler_fused", "r1"] = {"denoiser": 3.0, "d_fake": 1.0, "d_step": 4.0}
    cost["euler_r1", "r1"] = {"denoiser": 3.0, "d_fake": 1.0, "d_step": 6.0}
    timings = rounds.Timings()
    for _ in range(3):
        list(rounds.run_round(trainer, group, timings))
    timings = rounds.Timings.from_dict(json.loads(json.dumps(timings.to_dict())))
    assert timings.rounds == 3 and len(timings.cases["euler_exact"]) == 5
    for i, name in enumerate(spent):
        assert name == "baseline" or spent[i - 1] == spent[i + 1] == "baseline"

    def get(name):
        found = rounds.summarise(name, timings, group[name].kinds())
        assert sum(found["phases"].values()) == pytest.approx(found["ratio"])
        assert found["quartiles"] == pytest.approx([found["ratio"]] * 2)
        return found

    exact, fused, every = get("euler_exact"), get("euler_fused"), get("euler_r1")
    assert exact["ratio"] == pytest.approx((15 * 6 + 10) / 16 / 4)
    assert fused["ratio"] == pytest.approx((15 * 5 + 8) / 16 / 4)
    assert every["ratio"] == pytest.approx(10 / 4)
    quarter = 1 / 4  # of the baseline's step
    assert exact["phases"]["d_fake"] == pytest.approx(2 * quarter)  # half of D's step is on fakes
    assert exact["phases"]["d_real"] == pytest.approx(1 * quarter)
    assert exact["phases"]["r1"] == pytest.approx(4 / 16 * quarter)
    assert fused["phases"]["d_fake"] == fused["phases"]["d_real"] == pytest.approx(1 * quarter)
    assert every["phases"]["r1"] == pytest.approx(4 * quarter)


def test_rounds_rotate_the_order(trainer):
    group = measure.subjects(trainer, ["euler_exact", "euler_fused", "heun_exact"], quick=True)
    once = {name: [rounds.Timing(k, {}, 1) for k in group[name].kinds()]
            for name in group if name != "baseline"}  # fmt: skip
    timings = rounds.Timings(once)
    first, penalised = set(), []
    for timings.rounds in range(3):
        steps = rounds.plan(group, timings)
        first.add(steps[0][0])
        penalised.append(sum(kind == "r1" for _, kind in steps))
    assert len(first) > 1 and penalised == [3, 0, 3]
    timings.cases["euler_fused"].pop()  # an interrupted round did not come to its R1
    timings.rounds = 1
    assert rounds.plan(group, timings)[0] == ("euler_fused", "r1")


# ---------------------------------------------------------------- the rest


def test_sampling_costs_nothing_more(trainer):
    observer = trainer.observer(CASES["euler_exact"], quick=True)
    before = [p.clone() for p in trainer.ema.parameters()]
    found = extras.sampling(trainer, observer)
    assert found["evaluations"] == {name: {"denoiser": extras.NFE, "d": 0}
                                    for name in ("plain", "ogdm")}  # fmt: skip
    assert all(map(torch.equal, before, trainer.ema.parameters()))


def test_importing_the_core_imports_no_package_but_torch_and_numpy():
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import ogdm_core; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'torch', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "['ogdm_core']", done.stderr


def test_the_program_writes_all_it_promises_and_goes_on_where_it_stopped(run, tmp_path):
    names = "euler_exact,euler_fused,euler_naive"
    code, first, printed = run("--cases", names, "--repeats", "1")
    assert code == 0 and set(first["cases"]) == set(names.split(","))
    for case in first["cases"].values():
        assert case["ratio"] > 0 and case["memory_ratio"] > 1 and case["flops_ratio"] > 1
        assert len(case["quartiles"]) == 2 and case["seconds"] > 0
    assert first["cases"]["euler_naive"]["evaluations"]["denoiser_forward"] == 3
    assert first["cases"]["euler_exact"]["evaluations"]["d_calls"] == pytest.approx(2 + 1 / 16)
    assert first["sampling"]["evaluations"]["ogdm"] == first["sampling"]["evaluations"]["plain"]
    assert {"bookkeeping", "checkpoint", "import", "commit", "versions"} <= set(first)
    assert first["command"].startswith("run/benchmark.sh --quick")
    page = (tmp_path / "speed.md").read_text()
    assert all(f"| {name} |" in page for name in names.split(","))
    assert (tmp_path / "speed.png").stat().st_size > 5_000
    assert "euler_naive" in printed.out

    _, second, _ = run("--cases", names, "--repeats", "3", "--batches", "1")
    assert second["timings"]["rounds"] == 3
    assert (
        second["timings"]["baseline"][: len(first["timings"]["baseline"])]
        == (first["timings"]["baseline"])
    )
    assert second["counts"] == first["counts"]
    assert [g["batch"] for g in second["growth"]] == [1]
    assert report.growth_rows(second)[0][:3] == ["1", "8", "16"]


def test_growth_is_timed_after_it_was_counted_and_never_loses_timings(run, tmp_path):
    flags = ["--cases", "euler_exact", "--repeats", "1", "--no-extras", "--batches", "1"]
    _, counted, _ = run(*flags, "--no-time")
    assert "baseline_seconds" not in counted["growth"][0]
    _, timed, _ = run(*flags)
    (entry,) = timed["growth"]
    assert entry["baseline_seconds"] > 0 and set(entry["cases"]) == set(GROWTH)
    for name, case in entry["cases"].items():
        assert case["ratio"] > 0
        assert case["flops_ratio"] == pytest.approx(
            counted["growth"][0]["cases"][name]["flops_ratio"]
        )
    del entry["cases"]["euler_narrow"]  # as a file from before that case holds it
    (tmp_path / "speed.json").write_text(json.dumps(timed))
    (row,) = report.growth_rows(run(*flags, "--no-time")[1])
    assert float(row[3]) >= 0 and "-" not in row[4:6] and "-" not in row[-3:]


def test_sizes_with_different_cases_stay_in_their_columns():
    def size(batch, **cases):
        ratios = {name: {"flops_ratio": ratio} for name, ratio in cases.items()}
        return {"batch": batch, "resolution": 8, "channels": 16, "cases": ratios}

    results = {"growth": [size(1, euler_light=2), size(2, euler_exact=3, euler_light=4)]}
    columns = report.growth_columns(results)
    first, second = (dict(zip(columns, row, strict=True)) for row in report.growth_rows(results))
    assert first["euler_exact, operations"] == "-" and first["euler_light, operations"] == "2.00"
    assert second["euler_exact, operations"] == "3.00"


def test_an_interrupted_run_keeps_what_it_measured(run, monkeypatch):
    plain = program.run_round

    def interrupted(trainer, subjects, timings):
        for i, step in enumerate(plain(trainer, subjects, timings)):
            if timings.rounds == 1 and i == 2:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(program, "run_round", interrupted)
    code, results, printed = run("--cases", "euler_exact", "--repeats", "4")
    assert code == 130 and results["timings"]["rounds"] == 1
    assert results["cases"]["euler_exact"]["ratio"] > 0
    assert "the same command continues from here" in printed.out


def test_another_setup_does_not_mix_with_what_is_there(run, capsys):
    run("--cases", "euler_exact", "--repeats", "1", "--no-extras")
    with pytest.raises(SystemExit):
        run("--cases", "euler_exact", "--repeats", "1", "--no-extras", "--batch", "3")
    assert (
        "was measured with another setup; name another file, or --fresh" in capsys.readouterr().err
    )
    code, results, _ = run(
        "--cases", "euler_exact", "--repeats", "1", "--no-extras", "--batch", "3", "--fresh"
    )
    assert code == 0 and results["setup"]["batch"] == 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cases", "nope"], "--cases: 'nope' is not allowed"),
        (["--repeats", "0"], "--repeats: 0 is not allowed; give 1 or more"),
        (["--out", "speed.txt"], "name a file that ends in .json"),
        (["--resolutions", "33"], "33 is not a power of two from 8"),
        (["--batches", "two"], "give whole numbers like 32,64"),
        (["--no-time"], "--no-time counts growth: give --resolutions, --batches or --channels"),
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
        [sys.executable, "-m", "run.benchmark", *flags, "--no-extras", "--out", out],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert "NVlabs/edm" in results["setup"]["network"]
    assert results["cases"]["heun_exact"]["evaluations"]["denoiser_forward"] == 2
    assert results["cases"]["heun_exact"]["flops_ratio"] > 1.9
