"""A run of latent-diffusion that is stopped, or goes wrong, in the middle of a step."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.core.toys import differences

ldm_tiny = pytest.importorskip("tests.ldm.ldm_tiny", reason="pip install -e '.[ldm]' brings Lightning")
from tests.ldm.test_train import QUIET, STATE, drive, load, train  # noqa: E402

SIGNALS = {"SIGINT": 6, "SIGTERM": 6, "SIGHUP": 7}  # in the middle of the step after this one
STOPPED = {"SIGINT": 7, "SIGTERM": 7, "SIGHUP": 9}  # a validation follows the eighth step
TEN = ["--max_steps", "10", QUIET]
FAULTS = {  # at the end of step 6, or in the middle of a step; four steps are an epoch
    **{name: {"at": at, "what": name, "middle": True} for name, at in (SIGNALS | {"SIGUSR1": 6}).items()},
    "half": {"at": 6, "what": "half", "middle": True},
    "nan": {"at": 6, "what": "nan"},
}
ENDS = {"half": "TypeError", "nan": "error: at step", "SIGUSR1": ""}  # others: status 130


@pytest.fixture(scope="module")
def runs(patched, tmp_path_factory):
    """(name of a run) -> what it printed, its folder."""
    folder, steps = tmp_path_factory.mktemp("ldm"), []
    for name, fault in {"whole": None, **FAULTS}.items():
        config = ldm_tiny.config(ogdm={"gamma": None, "plain_end": 0.3})
        if fault:
            interrupt = {"target": "ldm_tiny.Interrupt", "params": fault}
            config["lightning"]["callbacks"]["fault"] = interrupt
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        step = train(name, str(path), folder, *TEN)
        steps.append(step | ({"exit": ENDS.get(name, "130")} if fault and name != "SIGUSR1" else {}))
    for name in SIGNALS:
        argv = ["main.py", "-r", f"{{{name}}}/checkpoints/last.ckpt", "-t", "True", "--trust", "--scale_lr", "False"]
        off = "lightning.callbacks.fault.params.what=none"
        steps.append({"name": f"{name}_again", "argv": [*argv, *TEN, "lightning.callbacks.fault.params.at=-1", off]})
    printed = drive(patched("latent-diffusion"), steps, folder)

    def get(name: str) -> tuple[str, Path]:
        (said,) = [t for t in printed.split("@@@@@") if t.startswith(f" {name}:")]
        (run,) = folder.glob(f"20*_{name.removesuffix('_again')}")
        return said, run

    return get


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_in_the_middle_of_a_step_changes_no_bit(runs, name):
    """Of weights, EMA, D, optimisers and loops, over three epochs with the plain end in the last steps."""
    said, run = runs(name)
    assert f"stopped by a signal at step {STOPPED[name]};" in said and "Summoning" not in said
    whole, resumed = load(runs("whole")[1]), load(run)
    assert whole["global_step"] == whole["ogdm"]["steps"] == 10
    assert [key for key in STATE if differences(whole[key], resumed[key])] == []
    assert f"the discriminator continues at step {STOPPED[name]}" in runs(f"{name}_again")[0]


def test_what_upstream_saves_on_demand_waits_for_the_end_of_the_step(runs):
    said, run = runs("SIGUSR1")
    assert said.count("Summoning checkpoint.") == 1
    whole, asked = load(runs("whole")[1]), load(run)
    assert [key for key in STATE if differences(whole[key], asked[key])] == []


def test_a_step_that_an_error_ended_half_done_is_not_saved(runs):
    said, run = runs("half")
    assert "the step was half done" in said and load(run)["global_step"] == 4  # of the epoch's end


def test_averages_that_are_not_finite_are_not_saved(runs):
    said, run = runs("nan")
    assert "the denoiser's averages are not finite" in said and load(run)["global_step"] == 4


def test_a_second_trainer_of_a_run_stops(runs, patched, tmp_path):
    """It saves nothing, though upstream saves after any error."""
    _, run = runs("SIGINT")
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    last = copy / "checkpoints" / "last.ckpt"
    before = last.read_bytes()
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests" / "ldm")])}
    hold = (
        "import sys, time; from ogdm_core import folder; folder.claim(sys.argv[1]); print(flush=True); time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, copy], env=env, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        line = [sys.executable, "main.py", "-r", str(last), "-t", "True", "--trust", "--max_steps", "12"]
        done = subprocess.run(line, cwd=patched("latent-diffusion"), env=env, capture_output=True, text=True)
        holder.kill()
    assert done.returncode == 1 and f"error: process {holder.pid} on" in done.stderr, done.stderr[-2000:]
    assert last.read_bytes() == before
