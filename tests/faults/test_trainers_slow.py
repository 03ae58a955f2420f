"""Faults of whole trainings in upstream's own scripts. Run by `run/test.sh --faults` only."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from ogdm_core import folder
from tests.adm.test_upstream import OGDM, log_of, same_files, training, work
from tests.adm.test_upstream import data as data  # a fixture
from tests.edm import edm_tiny
from tests.faults.test_kill_upstream import environment, last, same_edm_states
from tests.ldm import ldm_tiny

TESTS = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.faults


def command(where: Path, *argv, ranks: int = 0) -> subprocess.CompletedProcess:
    """Runs Python in an upstream's folder to its end."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    line = [sys.executable, *(launcher if ranks else []), *map(str, argv)]
    return subprocess.run(line, cwd=where, env=environment(where), capture_output=True, text=True)


def contents(folder: Path, *patterns: str) -> dict[Path, bytes]:
    return {p: p.read_bytes() for pattern in patterns for p in folder.rglob(pattern)}


# ---- ADM ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adm(patched, data, tmp_path_factory):
    """train(name, flags...) runs the trainer; returns what it did and its folder."""
    folder = tmp_path_factory.mktemp("adm")

    def train(name: str, *flags, seed: int = 1, ranks: int = 1):
        job = training(folder / name, data, *OGDM, *flags, seed=seed)
        done = work(patched("guided-diffusion"), "drive", [job], ranks=ranks * (ranks > 1), check=False)
        return done, folder / name

    return train


def test_adm_resumes_from_its_first_checkpoint_exactly(adm):
    done, whole = adm("whole")
    assert done.returncode == 0, done.stderr[-3000:]
    again, rest = adm("rest", "--resume_checkpoint", whole / "model000000.pt", seed=9)
    assert again.returncode == 0, again.stderr[-3000:]
    same_files(rest, whole, "model000002.pt", "ema*000002.pt", "opt000002.pt", "ogdm000002.pt")


def test_adm_stops_when_it_diverges_and_keeps_what_is_good(adm):
    done, folder = adm("diverges", "--save_interval", 2)
    assert done.returncode == 0, done.stderr[-3000:]
    good = contents(folder, "*.pt")
    more = ["--lr", 1e30, "--lr_anneal_steps", 20, "--log_interval", 50]
    again, _ = adm("diverges", *more, "--resume_checkpoint", folder / "model000002.pt")
    assert again.returncode == 1 and "the training diverged" in again.stderr
    assert "newest complete checkpoint is" in again.stderr
    now = contents(folder, "*.pt")
    assert {path: now[path] for path in good} == good
    assert all(torch.load(p, weights_only=True) for p in now)


@pytest.mark.parametrize("ranks", [1, 2])
def test_adm_saves_before_a_picture_that_cannot_be_read(adm, data, tmp_path, ranks):
    bad = Path(shutil.copytree(data, tmp_path / "images")) / "class2_23.png"  # two ranks: the second one's
    more = ["--data_dir", bad.parent, "--lr_anneal_steps", 12, "--save_interval", 100, "--log_interval", 5]
    done, whole = adm(tmp_path / "whole", *more, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    good = bad.read_bytes()
    bad.write_bytes(good[:-30])  # behind its header
    ended, rest = adm(tmp_path / "rest", *more, ranks=ranks)
    saved = last(rest, "model*.pt")
    assert ended.returncode == 1 and saved and saved.name != "model000000.pt", ended.stderr[-3000:]
    words = f"error: {bad} cannot be read (.*); stopped at step {int(saved.stem[5:])}; --resume_checkpoint continues"
    assert re.search(words, ended.stderr) and "Traceback" not in ended.stderr, ended.stderr[-3000:]
    again, _ = adm(tmp_path / "rest", *more, "--resume_checkpoint", saved, ranks=ranks)
    assert again.returncode == 1 and "before the first step" in again.stderr, again.stderr[-3000:]
    bad.write_bytes(good)
    again, _ = adm(tmp_path / "rest", *more, "--resume_checkpoint", saved, seed=9, ranks=ranks)
    assert again.returncode == 0, again.stderr[-3000:]
    assert log_of(rest) == log_of(whole)[-len(log_of(rest)) :]  # means since before the stop, too
    same_files(rest, whole, "model000012.pt", "ema*000012.pt", "opt000012.pt", "ogdm000012.pt")


def test_adm_names_the_trainer_that_is_in_its_folder(adm, tmp_path):
    """Before upstream's logger opens, and empties, what the first one writes."""
    folder.claim(tmp_path)
    logs = [tmp_path / "log.txt", tmp_path / "progress.csv"]
    for log in logs:
        log.write_text("of the first one")
    done, _ = adm(tmp_path)
    folder.release()
    assert done.returncode == 1 and f"error: process {os.getpid()} on" in done.stderr, done.stderr[-2000:]
    assert not list(tmp_path.glob("*.pt")) and [log.read_text() for log in logs] == ["of the first one"] * 2


# ---- EDM ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def edm(patched, tmp_path_factory):
    folder = tmp_path_factory.mktemp("edm")
    digits = edm_tiny.digits(folder / "digits-8x8.zip")
    flags = [*edm_tiny.TINY, *edm_tiny.OGDM, f"--data={digits}", "--batch=100", "--seed=1"]
    where = patched("edm")

    def train(*more, ranks: int = 0):
        return command(where, where / "train.py", *flags, f"--outdir={folder / 'run'}", *more, ranks=ranks)

    done = train("--duration=0.002")
    assert done.returncode == 0, done.stderr[-3000:]
    return train, folder / "run"


def test_edm_stops_when_it_diverges_and_keeps_what_is_good(edm):
    train, run = edm
    good = contents(run, "*.pt", "*.pkl")
    state = f"--resume={run / 'training-state-000002.pt'}"
    done = train("--duration=0.008", "--lr=1e30", state)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "the training diverged" in done.stdout and "training-state-000002.pt" in done.stdout
    assert contents(run, "*.pt", "*.pkl") == good


def test_edm_resumes_on_another_number_of_ranks_and_says_so(edm):
    train, run = edm
    state = f"--resume={run / 'training-state-000001.pt'}"
    done = train("--duration=0.002", state, "--nosubdir", ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the random states of 1 ranks do not fit this run (2 on cpu)" in done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_edm_saves_before_a_picture_that_cannot_be_read(patched, tmp_path, ranks):
    where, images = patched("edm"), tmp_path / "images"
    with zipfile.ZipFile(edm_tiny.digits(tmp_path / "digits.zip")) as archive:
        archive.extractall(images)
    drawn = command(where, "-c", "from ogdm_core.edm import compat; compat.install()\n"
                    "from torch_utils import misc; i = iter(misc.InfiniteSampler(range(200), seed=1))\n"
                    "print([next(i) for _ in range(100)][-1])")  # fmt: skip
    bad = images / f"{int(drawn.stdout):05d}.png"  # of the fifth step; two ranks: the second one's
    flags = [*edm_tiny.TINY, *edm_tiny.OGDM, f"--data={images}", "--batch=20", "--batch-gpu=5", "--seed=1"]

    def train(name: str, *more):
        out = [f"--outdir={tmp_path / name}", "--duration=0.001"]
        return command(where, where / "train.py", *flags, *out, *more, ranks=ranks)

    done = train("whole")
    assert done.returncode == 0, done.stderr[-3000:]
    good = bad.read_bytes()
    bad.write_bytes(good[:-30])
    ended = train("rest")
    saved = tmp_path / "rest" / "training-state-000000.pt"
    words = (
        f"error: {bad} cannot be read (.*); stopped at 0.08 kimg; --resume: the newest complete checkpoint is {saved}"
    )
    said = ended.stdout  # upstream's logger sends stderr there, too
    assert ended.returncode == 1 and re.search(words, said) and "Traceback" not in said, said + ended.stderr[-3000:]
    bad.write_bytes(good)
    again = train("rest", f"--resume={saved}")
    assert again.returncode == 0, again.stderr[-3000:]
    same_edm_states(where, tmp_path / "rest", tmp_path / "whole", 1)


# ---- LDM ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ldm(patched, tmp_path_factory):
    folder, where = tmp_path_factory.mktemp("ldm"), patched("latent-diffusion")
    config = ldm_tiny.config(ogdm={})
    config["lightning"]["callbacks"]["image_logger"]["params"]["disabled"] = True
    every = {"every_n_train_steps": 1, "monitor": None, "save_top_k": -1, "filename": "{step}"}
    config["lightning"]["modelcheckpoint"] = {"params": every}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    always = ["--trust", "-t", "True", "--scale_lr", "False"]

    def train(*more, ranks: int = 0):
        return command(where, "main.py", *always, *more, ranks=ranks)

    new = ["--base", folder / "tiny.yaml", "-l", folder / "logs"]
    done = train(*new, "--name", "good", "--max_steps", 2)
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = (folder / "logs").glob("20*_good")
    return train, new, run, where


def test_ldm_ends_with_the_reason_where_the_log_folder_is_a_file(ldm, tmp_path):
    (tmp_path / "logs").write_text("")
    done = ldm[0](*ldm[1][:2], "-l", tmp_path / "logs", "--name", "bad")
    assert done.returncode == 1 and "fit_loop" not in done.stderr.splitlines()[-1]
    assert "logs" in done.stderr.splitlines()[-1]


def test_ldm_stops_when_it_diverges_and_keeps_what_is_good(ldm):
    train, _, run, _ = ldm
    good = contents(run, "*.ckpt")
    done = train("-r", run, "--max_steps", 20, "model.params.scheduler_config.params.f_max=[1e32]",
                 "model.params.scheduler_config.params.f_min=[1e32]")  # fmt: skip
    assert done.returncode == 1, done.stdout[-2000:]
    assert "the training diverged" in done.stderr, done.stderr[-2000:]
    now = contents(run, "*.ckpt")
    others = [p for p in good if not p.name.startswith("last")]
    assert others and {p: now[p] for p in others} == {p: good[p] for p in others}
    for path in now:
        saved = torch.load(path, weights_only=True)
        assert all(v.isfinite().all() for v in saved["state_dict"].values() if v.is_floating_point())


def test_ldm_samples_no_random_network_and_runs_no_config(ldm, tmp_path):
    _, _, _, where = ldm
    config = ldm_tiny.config()
    torch.save({"global_step": 1, "state_dict": {}}, tmp_path / "model.ckpt")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": config["model"]}))
    sample = ["scripts/sample_diffusion.py", "-r", tmp_path / "model.ckpt", "-n", 1]
    done = command(where, *sample)
    assert done.returncode == 1 and "of the model's weights" in done.stderr, done.stderr[-2000:]
    evil = {"target": "os.system", "params": {"command": f"touch {tmp_path / 'ran'}"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": evil}))
    done = command(where, *sample)
    assert done.returncode == 1 and "--trust" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "ran").exists()


def test_ldm_ends_when_one_of_two_ranks_is_killed(ldm):
    _, new, run, where = ldm
    line = [sys.executable, "main.py", "--trust", "-t", "True", "--scale_lr", "False", *new,
            "--name", "killed", "--gpus", "0,1", "--max_steps", "100000"]  # fmt: skip
    env = {name: v for name, v in environment(where).items() if name != "MASTER_PORT"}
    job = subprocess.Popen([*map(str, line)], cwd=where, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        logs = run.parent
        deadline = time.monotonic() + 300
        while not list(logs.glob("20*_killed/checkpoints/step=*.ckpt")):
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(1)
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        ranks = [c for c in children if b"main.py" in Path(f"/proc/{c}/cmdline").read_bytes()]
        os.kill(int(ranks[0]), signal.SIGKILL)
        assert job.wait(120) != 0
    finally:
        job.kill()
