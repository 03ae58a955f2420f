"""latent-diffusion's own scripts, patched, on today's stack: train, log, save, resume, sample."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from tests.core.toys import differences

ldm_tiny = pytest.importorskip("tests.ldm.ldm_tiny", reason="pip install -e '.[ldm]' brings Lightning")
TESTS = Path(__file__).resolve().parent
SAMPLERS = {"euler": 4, "heun": 5, "s-pndm": 5, "f-pndm": 13, "dpmpp-2m": 4, "unipc": 4, "stochastic": 4,
            "dpm-2": 5, "dpmpp-3m": 5, "unipc-3": 5, "ipndm": 4, "deis": 4}  # fmt: skip
QUIET = "lightning.callbacks.image_logger.params.disabled=true"
KEEP_ALL = ["lightning.modelcheckpoint.params.save_top_k=-1"]
BY_STEP = KEEP_ALL + [
    "lightning.modelcheckpoint.params.every_n_train_steps=3",
    "lightning.modelcheckpoint.params.monitor=null",
    "lightning.modelcheckpoint.params.filename='{{step}}'",
]


def train(name: str, config: str, logdir: Path, *more: str) -> dict:
    argv = ["main.py", "--base", config, "-t", "True", "--name", name, "-l", str(logdir)]
    return {"name": name, "argv": [*argv, "--trust", "--scale_lr", "False", *more]}


def resume(name: str, run: str, checkpoint: str, *more: str) -> dict:
    argv = ["main.py", "-r", f"{{{name}}}/checkpoints/{checkpoint}", "-t", "True"]
    return {"name": name, "copy": run, "argv": [*argv, "--trust", "--scale_lr", "False", *more]}


def drive(copy: Path, steps: list[dict], logdir: Path, *launcher: str) -> str:
    """Runs the steps; returns what they printed."""
    logdir.mkdir(parents=True, exist_ok=True)
    (logdir / "steps.json").write_text(json.dumps(steps))
    argv = [*launcher, TESTS / "ldm_drive.py", logdir / "steps.json", logdir]
    return execute(copy, argv)


def execute(copy: Path, argv: list) -> str:
    """Runs Python in the patched copy; returns all that it printed."""
    path = os.pathsep.join([str(TESTS.parents[1]), str(TESTS)])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *argv]
    done = subprocess.run(command, cwd=copy, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def load(run: Path, name: str = "last") -> dict:
    """A checkpoint, read as torch reads what it does not trust."""
    return torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=True)


STATE = ("state_dict", "ogdm", "optimizer_states", "lr_schedulers", "loops", "global_step")


def exact_config() -> dict:
    config = ldm_tiny.config(ogdm={}, scale_by_std=False)
    config["model"]["target"] = "ldm_exact.PerSample"
    config["data"] = {"target": "ldm_tiny.Blocks", "params": {"batch_size": 8}}
    config["lightning"]["modelcheckpoint"] = {"params": {"monitor": None, "save_top_k": 1}}
    config["lightning"]["callbacks"]["image_logger"]["params"]["disabled"] = True
    return config


class Runs:
    """The runs that the tests below look at, and what they printed."""

    def __init__(self, copy: Path, folder: Path):
        self.folder = folder
        configs = {
            "off": ldm_tiny.config(),
            "zero": ldm_tiny.config(ogdm={"gamma": 0.0}),
            "on": ldm_tiny.config(ogdm={}),
            "cut": ldm_tiny.config(ogdm={}),
            "one": exact_config(),
        }
        configs["on"]["lightning"]["logger"] = {"target": "pytorch_lightning.loggers.CSVLogger"}
        for name, at in (("SIGUSR1", 1), ("SIGINT", 3)):
            interrupt = {"target": "ldm_tiny.Interrupt", "params": {"at": at, "what": name}}
            configs["cut"]["lightning"]["callbacks"][name] = interrupt
        paths = {name: str(folder / f"{name}.yaml") for name in configs}
        for name, config in configs.items():
            Path(paths[name]).write_text(yaml.safe_dump(config))
        six = ["--max_steps", "6"]
        start = "model.params.ckpt_path={off}/checkpoints/last.ckpt"
        steps = [
            train("off", paths["off"], folder, "--max_epochs", "1"),
            train("zero", paths["zero"], folder, "--max_epochs", "1"),
            train("on", paths["on"], folder, "--max_epochs", "2", *KEEP_ALL),
            resume("on_again", "on", "epoch=000000.ckpt"),
            train("steps", paths["on"], folder, *six, *BY_STEP),
            resume("steps_again", "steps", "step=3.ckpt", *six),
            train("finetune", paths["on"], folder, "--max_steps", "1", start),
            resume("from_upstream", "off", "epoch=000000.ckpt", "--base", paths["on"], "--max_epochs", "2"),
            train("one", paths["one"], folder, "--max_steps", "2"),
        ]
        last = "{on}/checkpoints/last.ckpt"
        for sampler, nfe in SAMPLERS.items():
            argv = ["scripts/sample_diffusion.py", "-r", last, "-n", "3", "--batch_size", "2"]
            # Upstream names folders by the second, and two samplers may share one: a folder each.
            argv += ["-l", str(folder / "samples" / sampler), "--npz", f"{folder}/{sampler}.npz"]
            argv += ["--sampler", sampler, "--nfe", str(nfe)]
            steps.append({"name": sampler, "argv": argv})
        export = [str(TESTS / "ldm_export.py"), last, str(folder / "export")]
        steps.append({"name": "export", "argv": export})
        cut = train("cut", paths["cut"], folder, "--max_epochs", "1", QUIET)
        steps.append(cut | {"exit": "130"})
        self.printed = drive(copy, steps, folder)

    def said(self, name: str) -> str:
        """What one run printed."""
        (text,) = [t for t in self.printed.split("@@@@@") if t.startswith(f" {name}:")]
        return text

    def __getitem__(self, name: str) -> Path:
        (run,) = [*self.folder.glob(f"20*_{name}"), *self.folder.glob(f"copy_{name}")]
        return run


@pytest.fixture(scope="module")
def runs(patched, tmp_path_factory) -> Runs:
    return Runs(patched("latent-diffusion"), tmp_path_factory.mktemp("ldm"))


def test_upstreams_own_model_trains_on_todays_stack(runs):
    saved = load(runs["off"])
    assert saved["global_step"] == 4 and "ogdm" not in saved
    assert list((runs["off"] / "testtube").rglob("events.out.tfevents.*"))
    assert list((runs["off"] / "configs").glob("*-project.yaml"))
    assert "LatentDiffusion has no test_step: nothing to test" in runs.said("off")


def test_guidance_of_weight_zero_is_upstreams_training_to_the_bit(runs):
    plain, zero = load(runs["off"]), load(runs["zero"])
    assert not differences(plain["state_dict"], zero["state_dict"])
    assert not differences(plain["optimizer_states"], zero["optimizer_states"])
    assert zero["ogdm"]["steps"] == 4  # D trained all the while


def test_guidance_changes_the_denoiser_and_only_what_is_trained(runs):
    before, after = load(runs["zero"])["state_dict"], load(runs["on"], "epoch=000000")["state_dict"]
    changed = {name.split(".")[0] for name in before if differences(before[name], after[name])}
    assert changed == {"model", "model_ema"}


def test_validation_images_and_numbers_are_logged(runs):
    for split in ("train", "val"):
        samples = list((runs["on"] / "images" / split).glob("samples_gs-000004_*.png"))
        assert len(samples) == 1
        with Image.open(samples[0]) as image:
            assert image.size == (2 * 16 + 3 * 2, 16 + 2 * 2)
            assert np.asarray(image).std() > 0
    (path,) = (runs["on"] / "testtube").glob("version_*/metrics.csv")
    rows = list(csv.DictReader(path.open()))
    steps = [row for row in rows if row["ogdm/d_loss"]]
    assert [int(row["step"]) for row in steps] == list(range(8))
    assert all(0 < float(row["ogdm/d_loss"]) < 5 for row in steps)
    assert all(float(row["ogdm/skipped"]) == 0 for row in steps)
    assert float(steps[0]["ogdm/r1"]) > 0
    assert any(row["ogdm/emission_q0"] for row in steps)
    assert sum(bool(row["val/loss_simple_ema"]) for row in rows) == 2
    rates = [float(row["lr_abs"]) for row in rows if row["lr_abs"]]
    assert rates[:5] == pytest.approx([5e-4, 1.625e-3, 2.75e-3, 3.875e-3, 5e-3])  # warm-up


@pytest.mark.parametrize("name", ["on", "steps"])
def test_a_resumed_run_ends_in_the_same_bits(runs, name):
    """From the end of an epoch (last.ckpt's moment), and from the middle of one."""
    whole, resumed = load(runs[name]), load(runs[f"{name}_again"])
    assert whole["global_step"] == {"on": 8, "steps": 6}[name]
    assert [key for key in STATE if differences(whole[key], resumed[key])] == []


def test_upstreams_checkpoint_starts_a_finetune_and_says_so(runs):
    assert "OGDM: a new discriminator" in runs.said("finetune")
    assert "no discriminator in the checkpoint" in runs.said("from_upstream")
    assert "the discriminator continues at step 4" in runs.said("on_again")
    assert load(runs["finetune"])["ogdm"]["steps"] == 1
    saved = load(runs["from_upstream"])
    assert saved["global_step"] == 8 and saved["ogdm"]["steps"] == 4


def test_samples_from_a_run_with_every_sampler(runs):
    images = {name: np.load(runs.folder / f"{name}.npz")["arr_0"] for name in SAMPLERS}
    for name, array in images.items():
        assert array.shape == (3, 16, 16, 3) and array.dtype == np.uint8, name
        assert len(np.unique(array)) > 10, name
    assert len({array.tobytes() for array in images.values()}) == len(SAMPLERS)
    for name in SAMPLERS:
        assert len(list((runs.folder / "samples" / name).rglob("*.png"))) == 3


def test_export_is_upstreams_layout_and_class(runs):
    assert "upstream's class has taken the export" in runs.said("export")
    out = runs.folder / "export"
    saved = torch.load(out / "model.ckpt", weights_only=True)
    assert set(saved) == {"state_dict", "global_step", "epoch"}
    assert not differences(saved["state_dict"], load(runs["on"])["state_dict"])
    assert saved["state_dict"].keys() == load(runs["off"])["state_dict"].keys()
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["model"]["target"] == "ldm.models.diffusion.ddpm.LatentDiffusion"
    assert "ogdm" not in config["model"]["params"]


def test_an_interrupted_run_leaves_a_checkpoint_to_continue_from(runs):
    """USR1 writes last.ckpt and training goes on; ctrl-C writes it again and stops."""
    assert runs.said("cut").count("Summoning checkpoint.") == 1
    assert "stopped by a signal at step 3" in runs.said("cut")
    folder = runs["cut"] / "checkpoints"
    assert {p.name for p in folder.iterdir()} == {"last.ckpt", "last.previous.ckpt"}
    for name, step in (("last", 3), ("last.previous", 1)):
        saved = load(runs["cut"], name)
        assert saved["global_step"] == step and saved["ogdm"]["steps"] == step


def test_two_gloo_processes_are_one_with_the_whole_batch(runs, patched):
    """Gradients of denoiser and discriminator after two steps, by upstream's `--gpus 0,1`."""
    halves = ["--gpus", "0,1", "--use_distributed_sampler", "False", "data.params.batch_size=4"]
    step = train("two", str(runs.folder / "one.yaml"), runs.folder, "--max_steps", "2", *halves)
    printed = execute(patched("latent-diffusion"), step["argv"])
    assert "no CUDA, so 2 process(es) on the CPU" in printed
    one, two = load(runs["one"]), load(runs["two"])
    assert one["global_step"] == two["global_step"] == 2
    for optimizer in (lambda c: c["optimizer_states"][0], lambda c: c["ogdm"]["optimizer"]):
        a, b = flat(optimizer(one)), flat(optimizer(two))
        assert a.norm() > 0 and (a - b).norm() < 1e-3 * a.norm()


def flat(optimizer: dict) -> torch.Tensor:
    """Adam's first moments: sums of gradients."""
    return torch.cat([s["exp_avg"].flatten() for s in optimizer["state"].values()])


def test_two_processes_resume_in_the_same_bits(patched, tmp_path):
    """By torchrun, with data order and random state of both ranks; with other settings they end."""
    (tmp_path / "on.yaml").write_text(yaml.safe_dump(ldm_tiny.config(ogdm={})))
    more = ["--gpus", "0,1", "--max_steps", "4"]
    steps = [
        train("on", str(tmp_path / "on.yaml"), tmp_path, *more, QUIET, *KEEP_ALL),
        resume("on_again", "on", "epoch=000000.ckpt", *more),
        train("other", str(tmp_path / "on.yaml"), tmp_path, *more, "model.params.ogdm.gamma=0.{rank}") | {"exit": ""},
    ]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    said = drive(patched("latent-diffusion"), steps, tmp_path, *launcher)
    assert "error: rank 1 has other settings than rank 0: gamma: 0.0 there, 0.1 here; give all ranks" in said
    assert "outlives its output: True" in said
    whole, resumed = load(next(tmp_path.glob("20*_on"))), load(tmp_path / "copy_on_again")
    assert len(whole["callbacks"]["ExactResume"]["ranks"]) == 2
    assert [key for key in STATE if differences(whole[key], resumed[key])] == []
