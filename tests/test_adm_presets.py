"""The paper's ADM rows as command lines: complete, accepted by the patched scripts, and run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from run.train import adm
from run.train.presets import PRESETS, get_preset

ROOT = Path(__file__).resolve().parents[1]
NAME = "guided-diffusion"
ROWS = [p for p in PRESETS.values() if p.backbone == "adm"]
TINY = (
    "--num_channels 32 --num_res_blocks 1 --num_heads 1 --batch_size 2 --lr_anneal_steps 2 "
    "--save_interval 1 --log_interval 1"
)


def flags_of(argv: list[str]) -> dict[str, str]:
    """{"--lr": "1e-4", ...}; upstream's flags all take one value."""
    flags = argv[argv.index("--class_cond") :]
    return dict(zip(flags[::2], flags[1::2], strict=True))


def test_rows_are_the_papers():
    assert len(ROWS) == 6
    for preset in ROWS:
        argv = adm.train_argv(preset, "images", ranks=4, init_checkpoint="ema.pt")
        assert argv[1:3] == ["-n", "4"] and argv[4] == "scripts/image_train.py"
        flags = flags_of(argv)
        assert flags["--batch_size"] == "32"  # 128 over 4 ranks
        fine_tuned = preset.training == "finetune"
        assert flags["--lr_anneal_steps"] == ("15000" if fine_tuned else "300000")
        assert flags["--image_size"] == ("32" if preset.dataset == "cifar10" else "64")
        assert flags["--dropout"] == ("0.1" if preset.dataset == "cifar10" else "0.0")
        assert ("--ogdm" in flags) == preset.ogdm
        if preset.ogdm:
            wanted = ("0.2", "0.025") if fine_tuned else ("0.1", "0.01")
            assert (flags["--ogdm_k"], flags["--ogdm_gamma"]) == wanted
    for sampler, spacing in (("euler", "quadratic"), ("s-pndm", "linear"), ("f-pndm", "linear")):
        argv = adm.sample_argv(get_preset("cifar10-adm-ogdm"), "m.pt", sampler, 20)
        assert flags_of(argv)["--discretization"] == spacing


def test_errors_say_what_to_do(capsys):
    for argv, message in (
        (["cifar10-adm-ogdm-ft", "--data_dir", "x"], "--init_checkpoint ema_0.9999_NNNNNN.pt"),
        (["cifar10-adm-ogdm", "--data_dir", "x", "--gpus", "3"], "3 does not divide"),
        (["cifar10-adm-ogdm"], "run/prepare_data.sh makes it"),
        (["cifar10-edm-baseline", "--data_dir", "x"], "use one of cifar10-adm-baseline"),
        (["cifar10-adm-ogdm", "--sample", "euler"], "--sample needs --model_path"),
    ):
        with pytest.raises(SystemExit):
            adm.main(argv)
        assert message in capsys.readouterr().err


def test_the_patched_scripts_accept_every_row(patched):
    """Their own parsers, which refuse a flag that they do not know."""
    pytest.importorskip("mpi4py")
    lines = {"image_train.py": [], "image_sample.py": []}
    for preset in ROWS:
        train = adm.train_argv(preset, "images", init_checkpoint="ema.pt")
        lines["image_train.py"].append(train[5:])
        lines["image_sample.py"].append(adm.sample_argv(preset, "m.pt", "s-pndm", 10)[5:])
    code = """if True:
        import json, runpy, sys
        for script, lines in json.loads(sys.argv[1]).items():
            names = runpy.run_path(f"scripts/{script}", run_name="upstream")
            for line in lines:
                args = names["create_argparser"]().parse_args(line)
                kwargs = names["args_to_dict"](args, names["model_and_diffusion_defaults"]().keys())
            model, diffusion = names["create_model_and_diffusion"](**kwargs | {"image_size": 32})
            assert 30e6 < sum(p.numel() for p in model.parameters()) < 80e6
    """
    command = [sys.executable, "-c", code, json.dumps(lines)]
    env = os.environ | {"PYTHONPATH": f"{patched(NAME)}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=patched(NAME), env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_preset_trains_fine_tunes_and_samples(patched, tmp_path, capfd):
    """Baseline, fine-tune, samples: three commands, with a tiny model in the paper's place."""
    pytest.importorskip("mpi4py")
    from PIL import Image

    draw = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for i in range(8):
        pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"cat_{i}.png")

    def run(preset: str, flags: str, out: str) -> str:
        argv = [preset, "--upstream", str(patched(NAME)), "--logdir", str(tmp_path / out)]
        assert adm.main(argv + flags.split()) == 0
        return capfd.readouterr().out.splitlines()[0]

    data = f"--data_dir {tmp_path}/images"
    line = run("cifar10-adm-baseline", f"{data} --dry-run", "none")
    assert not (tmp_path / "none").exists()
    assert "mpiexec -n 1" in line and "--lr_anneal_steps 300000" in line and "--ogdm" not in line
    run("cifar10-adm-baseline", f"{data} {TINY}", "base")
    ema = tmp_path / "base/ema_0.9999_000001.pt"
    line = run("cifar10-adm-ogdm-ft", f"{data} {TINY} --init_checkpoint {ema} --ogdm_d_width 0.1",
               "tuned")  # fmt: skip
    assert "--ogdm True --ogdm_projection euler --ogdm_k 0.2 --ogdm_gamma 0.025" in line
    model = tmp_path / "tuned/ema_0.9999_000001.pt"
    tiny = "--num_channels 32 --num_res_blocks 1 --num_heads 1 --num_samples 2 --batch_size 2"
    run("cifar10-adm-ogdm-ft", f"--sample f-pndm --nfe 13 --model_path {model} {tiny}", "samples")
    images = np.load(tmp_path / "samples/samples_2x32x32x3.npz")["arr_0"]
    assert images.shape == (2, 32, 32, 3)
