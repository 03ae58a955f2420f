"""The observed LatentDiffusion and the shims around it, on the real submodule, with tiny models."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ogdm_core.ldm import sample, train

TESTS = Path(__file__).resolve().parent
CHECKS = re.findall(r"^def check_(\w+)", (TESTS / "ldm_checks.py").read_text(), re.M)


@pytest.fixture(scope="module")
def reports(patched, tmp_path_factory) -> dict[str, str]:
    """What each check had to say."""
    broken = tmp_path_factory.mktemp("broken")
    (broken / "torchvision").mkdir()
    (broken / "torchvision" / "__init__.py").write_text("raise RuntimeError('no operator')\n")
    metadata = broken / "torchvision-0.28.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    path = os.pathsep.join(map(str, (TESTS.parents[1], TESTS, broken)))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, TESTS / "ldm_checks.py", *CHECKS],
        cwd=patched("latent-diffusion"), env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    parts = re.split(r"^#### (\w+): ", done.stdout, flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("name", CHECKS)
def test_ldm(reports, name):
    assert reports[name].startswith("ok\n"), reports[name]


def test_the_module_imports_without_upstream_and_changes_nothing():
    load = torch.load
    assert train.schedule_of and train.make_eps_fn
    with pytest.raises(ModuleNotFoundError, match="ldm"):
        _ = train.OGDMLatentDiffusion
    with pytest.raises(AttributeError, match="no attribute 'OGDM'"):
        _ = train.OGDM
    assert torch.load is load


def test_a_checkpoint_without_config_is_refused(tmp_path):
    opt = argparse.Namespace(base=[], resume=str(tmp_path / "a" / "b.ckpt"))
    with pytest.raises(SystemExit, match="no config.yaml beside"):
        sample.configs_of(opt)


def test_a_fine_tune_of_another_u_net_is_refused_by_name(tmp_path):
    """Another number of heads has weights of the same shapes."""
    from ogdm_core.ldm.train import check_unet

    theirs = {"num_heads": 8, "model_channels": 192, "channel_mult": [1, 2], "dropout": 0.0}
    config = {"model": {"params": {"unet_config": {"params": theirs}}}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    check_unet(str(tmp_path / "model.ckpt"), theirs | {"dropout": 0.1})
    check_unet(str(tmp_path / "elsewhere" / "run" / "model.ckpt"), {"num_heads": 4})  # without a config
    with pytest.raises(ValueError, match=r"trained with another U-Net \(num_heads: 8 there, 4 here\)"):
        check_unet(str(tmp_path / "model.ckpt"), theirs | {"num_heads": 4})
