"""The smoke table through a real Slurm: a job that is killed and requeued, and one on two nodes.

`run/test.sh --cluster` runs it; it starts Slurm's daemons, and installs nothing.
"""

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import slurm

ROOT = Path(__file__).resolve().parents[2]
ROW = "cifar10-edm-baseline"  # EDM's trainer has a seed, so two runs give the same numbers
POLL = ["--slurm-status-command", "squeue", "--slurm-init-seconds-before-status-checks", "5"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if not os.environ.get("OGDM_CLUSTER"):
        pytest.skip("run/test.sh --cluster runs the smoke table through a real Slurm")
    if reason := slurm.missing():
        pytest.fail(reason)
    with slurm.Slurm(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="module")
def third_party(patched, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("third_party")
    (folder / "edm").symlink_to(patched("edm"), target_is_directory=True)
    return folder


def reproduce(out: Path, third_party: Path, *more: str) -> subprocess.Popen:
    argv = [sys.executable, "-m", "run.tables", "1", "--scale", "smoke", "--rows", ROW]
    argv += ["--nfes", "10", "--out", out, "--third-party", third_party, *more]
    return subprocess.Popen(argv, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})


def numbers(out: Path) -> list[tuple[str, ...]]:
    names = ("row", "nfe", "status", "fid", "recall")
    lines = csv.DictReader((out / "table1.csv").open())
    return [tuple(line[name] for name in names) for line in lines]


def log_of(out: Path, text: str, seconds: int = 600) -> Path:
    """The training's log, once it holds `text`."""
    for _ in range(seconds * 2):
        for log in out.glob(f"stages/{ROW}.train-*/job.log"):
            if text in log.read_text():
                return log
        time.sleep(0.5)
    raise AssertionError(f"no training said {text!r}")


def test_a_requeued_job_goes_on_and_the_table_is_the_local_ones(cluster, third_party, tmp_path):
    assert reproduce(tmp_path / "local", third_party).wait() == 0
    run = reproduce(tmp_path / "slurm", third_party, "--slurm", "--", *POLL)
    log = log_of(tmp_path / "slurm", "Training for")
    (job,) = slurm.ask("squeue", "--noheader", "--format=%i").split()
    slurm.ask("scontrol", "requeue", job)  # kills it in the middle
    for _ in range(60):
        if slurm.ask("squeue", "--noheader", "--format=%T").split() == ["PENDING"]:
            break
        time.sleep(0.5)
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm would wait 2 minutes
    assert run.wait() == 0
    assert log.read_text().count("\n$ cd ") == 2, "begun, killed, begun again"
    assert log.read_text().count("Exiting...") == 1, "and the first one did not come to its end"
    assert numbers(tmp_path / "slurm") == numbers(tmp_path / "local")
    assert "done" in {line[2] for line in numbers(tmp_path / "slurm")}
    record = json.loads(log.with_name("done.json").read_text())
    assert record["commit"] and record["seconds"] > 0


def test_a_training_runs_on_two_nodes(cluster, third_party, tmp_path):
    run = reproduce(tmp_path, third_party, "--slurm", "--gpus", "2", "--nodes", "2", "--", *POLL,
                    "--until", "train")  # fmt: skip
    run.wait()
    log = log_of(tmp_path, "Exiting...", seconds=1).read_text()
    assert "srun --overlap --nodes=2" in log and "--nnodes=2 --nproc_per_node=1" in log
    assert list(tmp_path.glob(f"stages/{ROW}.train-*/done.json"))
