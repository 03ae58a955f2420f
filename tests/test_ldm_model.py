"""The observed LatentDiffusion and the shims around it, on the real submodule, with tiny models."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from run.train import ldm
from run.train.presets import get_preset

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
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n"
    )
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS, broken)))
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


@pytest.mark.parametrize("name", ["lsun-church-ldm-baseline", "lsun-church-ldm-ogdm-ft"])
def test_configs_are_the_papers_rows(name):
    preset = get_preset(name)
    (config,) = [a for a in ldm.train_argv(preset) if a.startswith(str(ldm.CONFIGS))]
    config = yaml.safe_load(Path(config).read_text())
    assert config["lightning"]["trainer"]["max_steps"] == preset.steps
    if preset.ogdm:
        ogdm = config["model"]["params"]["ogdm"]
        assert ogdm == {"projection": preset.projection, "k": preset.k, "gamma": preset.gamma}
    else:
        assert "model" not in config


def test_command_lines_split_the_batch_and_keep_the_discretisation():
    preset = get_preset("lsun-church-ldm-ogdm-ft")
    argv = ldm.train_argv(preset, gpus=4, init_checkpoint="w.ckpt")
    assert "data.params.batch_size=24" in argv and "model.params.ckpt_path=w.ckpt" in argv
    assert argv[argv.index("--gpus") + 1] == "0,1,2,3,"
    with pytest.raises(ValueError, match="does not divide"):
        ldm.train_argv(preset, gpus=7)
    argv = ldm.sample_argv(preset, "m.ckpt", "s-pndm", 10)
    assert argv[-1] == "quadratic"  # Table 6


def test_an_impossible_nfe_is_refused_with_advice():
    opt = argparse.Namespace(sampler="heun", nfe=6, base=["config.yaml"], resume="model.ckpt")
    with pytest.raises(SystemExit, match="--nfe: .* nearest it can is 5 or 7"):
        ldm.prepare(opt)


def test_a_checkpoint_without_config_is_refused(tmp_path):
    opt = argparse.Namespace(sampler="", base=[], resume=str(tmp_path / "a" / "b.ckpt"))
    with pytest.raises(SystemExit, match="no config.yaml beside"):
        ldm.prepare(opt)


def test_command_line_prints_and_refuses(capsys):
    assert ldm.main(["lsun-church-ldm-ogdm-ft", "--gpus", "2", "--dry-run", "--seed", "1"]) == 0
    line = capsys.readouterr().out
    assert "main.py --base configs/latent-diffusion/lsun_churches-ldm-kl-8.yaml" in line
    assert line.rstrip().endswith("--seed 1")
    with pytest.raises(SystemExit):
        ldm.main(["no-such-preset"])
    assert "lsun-church-ldm-baseline" in capsys.readouterr().err
