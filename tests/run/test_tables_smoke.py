"""A row on each backbone, from data to table, by the backbones' own commands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
ROWS = {
    "cifar10-adm-ogdm": "mpiexec -n 1",
    "cifar10-edm-cond-ogdm-ft": "torchrun --standalone",
    "lsun-church-ldm-ogdm-ft": "sample_diffusion.py",
}


def reproduce(out: Path, third_party: Path, *more: str) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-m", "run.tables", "1", "--scale", "smoke", "--nfes", "10"]
    argv += ["--rows", ",".join(ROWS), "--out", str(out), "--third-party", str(third_party), *more]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def third_party(patched, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("third_party")
    for name in ("guided-diffusion", "edm", "latent-diffusion"):
        (folder / name).symlink_to(patched(name), target_is_directory=True)
    return folder


@pytest.fixture(scope="module")
def table(third_party, tmp_path_factory) -> Path:
    """The folder of a finished smoke run."""
    for module in ("blobfile", "mpi4py", "click", "pytorch_lightning", "sklearn", "snakemake"):
        pytest.importorskip(module, reason="pip install -e '.[all]' brings what smoke runs need")
    out = tmp_path_factory.mktemp("out")
    done = reproduce(out, third_party)
    logs = {p.parent.name: p.read_text()[-1500:] for p in out.glob("stages/*/job.log")}
    assert done.returncode == 0, f"{done.stderr}\n{logs}"
    assert "mean nothing" in " ".join(done.stdout.split())
    return out


def test_every_backbone_goes_from_data_to_a_number(table):
    results = json.loads((table / "table1.json").read_text())
    assert "mean nothing" in results["title"]
    assert [row["row"] for row in results["rows"]] == list(ROWS)
    for row in results["rows"]:
        (cell,) = [cell for cell in row["cells"] if cell["nfe"] == 10]
        assert cell["status"] == "done" and row["failed"] is None
        assert np.isfinite(cell["fid"]) and cell["fid"] >= 0 and 0 <= cell["recall"] <= 1
        assert (cell["sample_images"], cell["reference_images"]) == (16, 96)
        images = np.load(cell["images"])["arr_0"]
        assert images.shape == (16, 32, 32, 3) and images.dtype == np.uint8
        assert images.std() > 0 and len(np.unique(images, axis=0)) == 16
        assert ROWS[row["row"]] in cell["commands"][0]
    for suffix in ("csv", "md", "png"):
        assert (table / f"table1.{suffix}").stat().st_size > 500


def test_the_observer_took_part(table):
    """Each trainer logged or saved a discriminator; the plain baselines did not."""
    stages = table / "stages"
    (adm,) = stages.glob("cifar10-adm-ogdm.train-*")
    assert "d_real_acc" in (adm / "job.log").read_text() and list(adm.glob("ogdm*.pt"))
    (edm,) = stages.glob("cifar10-edm-cond-ogdm-ft.train-*")
    assert "d_loss" in (edm / "job.log").read_text() and list(edm.glob("ogdm-state-*.pt"))
    (base,) = stages.glob("cifar10-edm-cond-baseline.train-*")
    assert not list(base.glob("ogdm-state-*.pt"))
    (ldm,) = stages.glob("lsun-church-ldm-ogdm-ft.train-*")
    saved = torch.load(ldm / "model.ckpt", map_location="cpu", weights_only=True)
    assert saved["ogdm"]["steps"] == saved["global_step"] == 3
    (base,) = stages.glob("lsun-church-ldm-baseline.train-*")
    assert "ogdm" not in torch.load(base / "model.ckpt", map_location="cpu", weights_only=True)


def test_a_second_run_starts_no_command(table, third_party):
    logs = {p: p.stat().st_mtime_ns for p in table.glob("stages/*/job.log")}
    done = reproduce(table, third_party)
    assert done.returncode == 0, done.stderr
    assert "0 to do" in done.stderr
    assert {p: p.stat().st_mtime_ns for p in table.glob("stages/*/job.log")} == logs
