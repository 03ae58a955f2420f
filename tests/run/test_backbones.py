"""The paper's rows as native commands: complete, accepted by upstream's parsers, and run."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from ogdm_core.config import OGDMConfig
from run import backbones, launch
from run.backbones.ldm import FINETUNE
from run.launch import Command, Engine
from run.presets import PRESETS, Preset
from run.train import __main__ as launcher

ROOT = Path(__file__).resolve().parents[2]
OUT = Path("/out")
TINY = (
    "--num_channels 32 --num_res_blocks 1 --num_heads 1 --batch_size 2 --lr_anneal_steps 2 "
    "--save_interval 1 --log_interval 1"
)


def rows(backbone: str) -> list[Preset]:
    return [preset for preset in PRESETS.values() if preset.backbone == backbone]


def train(preset: Preset, *args, **kwargs) -> Command:
    return backbones.get(preset.backbone).train(preset, *args, **kwargs)


def sample(preset: Preset, *args, **kwargs) -> Command:
    return backbones.get(preset.backbone).sample(preset, *args, **kwargs)


def test_a_command_is_written_out_in_its_scripts_own_way():
    flags = {"--a": 1, "--many": ("x", "y z"), "--switch": None, "model.k": 0.1}
    command = Command(("python",), "s.py", flags, "/up stream", {"A": "b c"}, native=("--a", "2"))
    assert command.argv == ["python", "s.py", "--a", "1", "--many", "x", "y z", "--switch",
                            "model.k=0.1", "--a", "2"]  # fmt: skip
    assert str(command).startswith("cd '/up stream' && A='b c' python s.py --a 1 --many x 'y z'")
    joined = Command(("python",), "s.py", {"--a": 1, "--switch": None}, joined=True)
    assert joined.argv[2:] == ["--a=1", "--switch"]


def test_adm_rows_are_the_papers():
    assert len(rows("adm")) == 6
    for preset in rows("adm"):
        command = train(preset, "images", OUT, "ema.pt", engine=Engine(gpus=4))
        assert command.argv[1:3] == ["-n", "4"] and command.script == "scripts/image_train.py"
        assert command.env["OPENAI_LOGDIR"] == "/out"
        flags, fine_tuned = command.flags, preset.training == "finetune"
        assert flags["--batch_size"] == 32  # 128 over 4 ranks
        assert flags["--lr_anneal_steps"] == (15_000 if fine_tuned else 300_000)
        assert flags["--image_size"] == (32 if preset.dataset == "cifar10" else 64)
        assert flags["--dropout"] == (0.1 if preset.dataset == "cifar10" else 0.0)
        assert ("--ogdm" in flags) == preset.ogdm
        if preset.ogdm:
            wanted = ("0.2", "0.025") if fine_tuned else ("0.1", "0.01")
            assert (flags["--ogdm_k"], flags["--ogdm_gamma"]) == wanted
    for sampler, spacing in (("euler", "quadratic"), ("s-pndm", "linear"), ("f-pndm", "linear")):
        command = sample(PRESETS["cifar10-adm-ogdm"], "m.pt", OUT, sampler, 20)
        assert command.flags["--discretization"] == spacing


def test_edm_rows_are_the_papers():
    import click
    from click.testing import CliRunner

    from ogdm_core.edm import train as splice

    seen = {}

    @click.command()
    @click.option("--data", default="c.zip")
    @splice.train_options
    def parsed(**kwargs):
        seen.update(splice.training_kwargs(kwargs | {"resume": None, "lr_rampup": None}, {"network_kwargs": {}}))

    assert len(rows("edm")) == 5
    for preset in rows("edm"):
        words = train(preset, "c.zip", OUT, engine=Engine(gpus=8)).argv
        assert words[0].endswith("torchrun")
        assert words[1:3] == ["--standalone", "--nproc_per_node=8"]
        assert f"--cond={int(preset.conditional)}" in words
        assert f"--duration={preset.images / 1e6:g}" in words
        transfer = [word for word in words if word.startswith("--transfer=")]
        assert bool(transfer) == (preset.training == "finetune") == ("--lr-rampup=0" in words)
        if transfer:
            assert ("-cond-" in transfer[0]) == preset.conditional
        if preset.ogdm:
            ogdm = [word for word in words if word.startswith("--ogdm")]
            seen.clear()
            assert CliRunner().invoke(parsed, ogdm, catch_exceptions=False).exit_code == 0
            want = OGDMConfig(projection=preset.projection, k=preset.k, gamma=preset.gamma, d_kind="paper")
            assert seen["ogdm"] == want.to_dict()
    assert sample(PRESETS["cifar10-edm-baseline"], "m", OUT, "euler", 9, 10, seed=2).flags[
        "--seeds"] == "20-29"  # fmt: skip


def test_ldm_rows_are_the_papers():
    base, tuned = rows("ldm")
    flags = train(base, "", OUT).flags
    assert flags["lightning.trainer.max_steps"] == 500_000
    assert not any("ogdm" in name for name in flags) and str(FINETUNE) not in flags["--base"]
    flags = train(tuned, "", OUT, "w.ckpt", engine=Engine(gpus=4)).flags
    assert flags["lightning.trainer.max_steps"] == 15_625
    given = {n.removeprefix("model.params.ogdm."): v for n, v in flags.items() if ".ogdm." in n}
    parsed = {name: yaml.safe_load(value) for name, value in given.items()}
    assert OGDMConfig.from_mapping(parsed) == OGDMConfig(projection="euler", k=0.1, gamma=0.01, d_kind="paper")
    assert flags["data.params.batch_size"] == 24 and flags["model.params.ckpt_path"] == "w.ckpt"
    assert flags["--gpus"] == "0,1,2,3," and flags["--base"][-1] == str(FINETUNE)
    assert sample(tuned, "m", OUT, "s-pndm", 10).flags["--discretization"] == "quadratic"


def test_settings_are_without_places_and_numbers_of_processes():
    for preset in PRESETS.values():
        places = backbones.get(preset.backbone).not_in_key
        here = train(preset, "a", OUT, "b", 0)
        there = train(preset, "c", Path("/other"), "d", 0, Engine(2, third_party=Path("/tp")))
        assert here.settings(places) == there.settings(places) and here.argv != there.argv


def test_several_nodes_use_the_engine_of_the_backbone(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    engine = Engine(16, 2, "node0:29400")
    argv = train(PRESETS["cifar10-adm-ogdm"], "x", OUT, engine=engine).argv
    assert argv[1:5] == ["-n", "16", "-ppn", "8"]
    argv = train(PRESETS["cifar10-edm-baseline"], "x", OUT, engine=engine).argv
    for word in ("--nnodes=2", "--nproc_per_node=8", "--rdzv_endpoint=node0:29400"):
        assert word in argv
    command = train(PRESETS["lsun-church-ldm-baseline"], "", OUT, engine=engine)
    assert command.flags["--num_nodes"] == 2 and command.flags["--gpus"].count(",") == 8
    assert command.flags["data.params.batch_size"] == 6
    monkeypatch.setattr(launch, "slurm_nodes", lambda: ["a", "b"])  # inside a job of Slurm
    monkeypatch.setattr(launch, "address", lambda node: f"{node}.local")
    argv = train(PRESETS["cifar10-adm-ogdm"], "x", OUT, engine=Engine(16, 2)).argv
    assert argv[3:9] == ["-launcher", "slurm", "-hosts", "a,b", "-ppn", "8"]
    argv = train(PRESETS["cifar10-edm-baseline"], "x", OUT, engine=Engine(16, 2)).argv
    assert argv[0] == "srun" and "--rdzv_endpoint=a.local:29400" in argv
    command = train(PRESETS["lsun-church-ldm-baseline"], "", OUT, engine=engine)
    assert "--ntasks-per-node=8" in command.argv


def test_a_stopped_training_is_resumed_by_the_backbones_own_means(tmp_path):
    def left(*names: str) -> None:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(tmp_path / name, "w") as archive:  # torch's files are zips
                archive.writestr("x", "x")

    def line(name: str, gpus: int = 1) -> str:
        preset = PRESETS[name]
        command = train(preset, "data", tmp_path, "init", 0, Engine(gpus))
        again = backbones.get(preset.backbone).resumed(command, tmp_path)
        return "" if again is None else str(again)

    assert "--resume" not in line("cifar10-adm-ogdm-ft")
    left("model000100.pt", "opt000100.pt", "ogdm000100.pt")
    left("model000200.pt", "opt000200.pt")  # killed before the observer's state, which is last
    (tmp_path / "opt000300.pt").write_text("cut off")
    assert f"--resume_checkpoint {tmp_path}/model000200.pt" in line("cifar10-adm-baseline")
    adm = line("cifar10-adm-ogdm-ft")
    assert adm.endswith(f"--resume_checkpoint {tmp_path}/model000100.pt") and "--ogdm True" in adm
    left("training-state-000500.pt", "ogdm-state-000500.pt", "training-state-001000.pt")
    edm = line("cifar10-edm-ogdm-ft")
    assert f"--resume={tmp_path}/training-state-000500.pt" in edm
    assert "--transfer" not in edm and "--ogdm=True" in edm
    left("training-state-020000.pt", "ogdm-state-020000.pt")  # the end: upstream would go on for one more batch
    assert line("cifar10-edm-ogdm-ft") == ""
    last = "runs/2024-01-01_x/checkpoints/last.ckpt"
    left(last)
    ldm = line("lsun-church-ldm-ogdm-ft", gpus=2)
    assert f"main.py -r {tmp_path}/{last} -t True --gpus 0,1, --scale_lr False -s 0" in ldm
    assert "data.params.batch_size=48" in ldm and "--base" not in ldm and "ogdm" not in ldm


def test_the_printed_line_has_the_users_own_flags_last(capsys):
    argv = "cifar10-edm-cond-ogdm-ft --data c.zip --gpus 8 --dry-run -- --ogdm-seed=3 --fp16=1"
    assert launcher.main(argv.split()) == 0
    words = capsys.readouterr().out.split()
    assert f"--data={Path('c.zip').absolute()}" in words
    assert words[-2:] == ["--ogdm-seed=3", "--fp16=1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train cifar10-adm-baseline", "error: --data: give the images"),
        ("reproduce_table1 --scale cpu --nfes ten", "--nfes: ten is not allowed"),
        ("reproduce_table4 --rows x", "unrecognized arguments: --rows x"),
        ("train cifar10-edm-baseline --sample heun --nfe 4 --model x", "heun cannot run in 4"),
        ("guidance sample x --output y --sampler magic", "unknown sampler 'magic'"),
        ("sweep --cells heun-4", "the nearest it can is 3 or 5"),
    ],
)
def test_scripts_refuse_before_they_install(words, said, tmp_path):
    """With a Python that has no package at all."""
    script, *argv = words.split()
    env = os.environ | {"OGDM_PYTHON": sys._base_executable, "PYTHONPATH": str(tmp_path)}
    command = [ROOT / "run" / f"{script}.sh", *argv]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr


def test_adms_patched_scripts_accept_every_row(patched):
    """Their own parsers, which refuse a flag that they do not know."""
    pytest.importorskip("mpi4py")
    lines = {"image_train.py": [], "image_sample.py": []}
    for preset in rows("adm"):
        command = train(preset, "images", OUT, "ema.pt")
        lines["image_train.py"].append(command.argv[len(command.launcher) + 1 :])
        command = sample(preset, "m.pt", OUT, "s-pndm", 10)
        lines["image_sample.py"].append(command.argv[len(command.launcher) + 1 :])
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
    home = patched("guided-diffusion")
    env = os.environ | {"PYTHONPATH": f"{home}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code, json.dumps(lines)], cwd=home, env=env,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_preset_trains_resumes_fine_tunes_and_samples(patched, tmp_path, capfd):
    """Baseline, fine-tune, samples: with a tiny model in the paper's place."""
    pytest.importorskip("mpi4py")
    from PIL import Image

    draw = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for i in range(8):
        pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"cat_{i}.png")

    def run(words: str, out: str, native: str = "") -> str:
        argv = [*words.split(), "--third-party", str(patched("guided-diffusion").parent)]
        argv += ["--out", str(tmp_path / out), "--", *native.split()]
        assert launcher.main(argv) == 0
        return capfd.readouterr().out.splitlines()[0]

    data = f"--data {tmp_path}/images"
    line = run(f"cifar10-adm-baseline {data} --dry-run", "none")
    assert not (tmp_path / "none").exists()
    assert "mpiexec -n 1" in line and "--lr_anneal_steps 300000" in line and "--ogdm" not in line
    run(f"cifar10-adm-baseline {data}", "base", TINY)
    more = TINY.replace("--lr_anneal_steps 2", "--lr_anneal_steps 3")
    assert "model000001.pt" in run(f"cifar10-adm-baseline {data} --resume", "base", more)
    ema = tmp_path / "base/ema_0.9999_000001.pt"
    assert ema.with_name("ema_0.9999_000002.pt").exists()
    line = run(f"cifar10-adm-ogdm-ft {data} --init {ema}", "tuned", f"{TINY} --ogdm_d_width 0.1")
    assert "--ogdm True --ogdm_projection euler --ogdm_k 0.2 --ogdm_gamma 0.025" in line
    model = tmp_path / "tuned/ema_0.9999_000001.pt"
    tiny = "--num_channels 32 --num_res_blocks 1 --num_heads 1 --batch_size 2"
    words = f"cifar10-adm-ogdm-ft --sample f-pndm --nfe 13 --images 2 --model {model}"
    run(words, "samples", tiny)
    images = np.load(tmp_path / "samples/samples_2x32x32x3.npz")["arr_0"]
    assert images.shape == (2, 32, 32, 3)


def test_a_row_names_the_weights_that_it_wants_before_it_starts(tmp_path, capsys):
    from run.train.__main__ import main

    tuned = ["lsun-church-ldm-ogdm-ft", "--third-party", str(tmp_path), "--dry-run"]
    assert main(tuned) == 0
    assert "there is no " in (said := capsys.readouterr().err) and "lsun_churches256/model.ckpt" in said
    assert main([*tuned, "--", "model.params.ckpt_path=own.ckpt"]) == 0 and not capsys.readouterr().err
    (tmp_path / "own.ckpt").touch()
    assert main([*tuned, "--init", str(tmp_path / "own.ckpt")]) == 0 and not capsys.readouterr().err
    assert main(["cifar10-edm-ogdm-ft", "--data", "x", "--init", "none.pkl", "--dry-run"]) == 0
    assert "before this can run: --init: there is no file none.pkl" in capsys.readouterr().err


def test_a_row_of_adm_takes_its_network_from_beside_the_weights(tmp_path, capsys):
    from run.train.__main__ import main

    def flags(*argv):
        assert main([*argv, "--dry-run"]) == 0
        return dict(re.findall(r"--(\w+) (\S+)", capsys.readouterr().out))

    theirs = {"num_heads": 4, "num_channels": 64, "image_size": 64, "channel_mult": "1,1"}
    (tmp_path / "flags.json").write_text(json.dumps(theirs))
    for name in ("ema_0.9999_000001.pt", "opt000001.pt", "model000001.pt"):
        torch.save({}, tmp_path / name)
    weights, row = str(tmp_path / "ema_0.9999_000001.pt"), ["cifar10-adm-baseline", "--data", "x"]
    tuned = ["cifar10-adm-ogdm-ft", "--data", "x", "--init"]
    for made in (
        flags("cifar10-adm-baseline", "--sample", "euler", "--model", weights),
        flags(*row, "--resume", "--out", str(tmp_path)),
        flags(*tuned, weights),
    ):
        assert (made["num_heads"], made["num_channels"]) == ("4", "64")
        assert made["image_size"] == "32" and "channel_mult" not in made  # the script refuses the one, adds the other
    (tmp_path / "other").mkdir()
    assert flags(*row, "--out", str(tmp_path / "other"))["num_heads"] == "1"
