"""The diffusers backbone: training, stopping, resuming, and what it writes."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers", reason="the diffusers extra is not installed")

from diffusers import (  # noqa: E402
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    PNDMScheduler,
    UNet2DModel,
)

from ogdm_core import Observer, OGDMConfig, sample  # noqa: E402
from ogdm_core import images as data_sets  # noqa: E402
from ogdm_core.diffusers import train  # noqa: E402
from ogdm_core.diffusers.__main__ import main  # noqa: E402
from ogdm_core.diffusers.model import (  # noqa: E402
    make_eps_fn,
    schedule_of,
    target_of,
    to_eps,
    training_loss,
)
from tests.core.toys import loss_weights  # noqa: E402

TINY = ["--channels", "8,8", "--batch-size", "8", "--log-every", "1"]
OGDM = ["--ogdm", "--ogdm-k", "0.3", "--ogdm-gamma", "0.5", "--ogdm-d-width", "0.02"]


@pytest.fixture(autouse=True)
def fresh_process_state():
    """accelerate keeps one state per process; each test stands for a process."""
    from accelerate.state import AcceleratorState

    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)


def run(folder, *flags, steps=4, base=TINY):
    code = main([*base, "--output", str(folder), "--steps", str(steps), *flags])
    assert code == 0
    return folder


def weights(folder):
    return UNet2DModel.from_pretrained(folder, subfolder="unet").state_dict()


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run(tmp_path_factory.mktemp("trained") / "model", *OGDM)


@pytest.mark.parametrize("flags", [[], OGDM, [*OGDM, "--ogdm-projection", "heun"]])
def test_stop_and_resume_is_never_having_stopped(tmp_path, flags):
    whole = run(tmp_path / "whole", *flags, steps=5)
    run(tmp_path / "parts", *flags, steps=2)
    parts = run(tmp_path / "parts", *flags, steps=5)
    a = torch.load(whole / train.CHECKPOINT, weights_only=True)
    b = torch.load(parts / train.CHECKPOINT, weights_only=True)
    assert same(a["unet"], b["unet"]) and same(weights(whole), weights(parts))
    assert a["history"] == b["history"] and len(a["history"]) == 5
    if flags:
        assert same(a["observer"]["discriminator"], b["observer"]["discriminator"])


def test_ogdm_and_control_see_the_same_images_and_noise(tmp_path):
    control = run(tmp_path / "control", steps=1)
    ogdm = run(tmp_path / "ogdm", *OGDM, steps=1)
    first = [json.loads((f / "log.jsonl").read_text())["transition"] for f in (control, ogdm)]
    assert first[0] == first[1]
    assert not same(weights(control), weights(ogdm))


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_or_a_lost_terminal_saves_and_the_same_command_continues(tmp_path, sent):
    command = [sys.executable, "-m", "ogdm_core.diffusers", *TINY, *OGDM]
    command += ["--output", str(tmp_path / "run"), "--steps", "100000"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in child.stdout:
        if line.startswith("step 3/"):
            child.send_signal(sent)
            break
    out = child.stdout.read()
    assert child.wait(60) == 130
    assert "the same command continues" in out
    state = torch.load(tmp_path / "run" / train.CHECKPOINT, weights_only=True)
    assert state["step"] >= 3
    assert not list((tmp_path / "run").glob("*.part"))
    run(tmp_path / "run", *OGDM, steps=state["step"] + 1)


@pytest.mark.parametrize(("channels", "width", "kind"), [(16, 1.0, "light"), (320, 1.0, "paper"), (16, 0.02, "paper")])
def test_auto_takes_the_papers_d_where_it_costs_no_more_than_the_denoisers_step(channels, width, kind):
    unet = train.build_unet(data_sets.digits(), [channels, channels], 1, 0)
    schedule, before = schedule_of(DDPMScheduler()), torch.get_rng_state()
    observer = Observer(OGDMConfig(d_width=width), schedule, 1, 8, denoiser=make_eps_fn(unet, schedule))
    assert observer.config == OGDMConfig(d_kind=kind, d_width=width)
    assert torch.equal(before, torch.get_rng_state())


def test_plain_ogdm_records_the_d_that_was_chosen_and_writes_to_tensorboard(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (1, 2):
        folder = run(tmp_path / "run", "--ogdm", "--tensorboard", steps=steps)
    said = capsys.readouterr().out
    assert said.count("D: light, ") == 2 and "continuing" in said
    assert json.loads((folder / "training.json").read_text())["ogdm"]["d_kind"] == "light"
    seen = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert {"transition", "emission", "d_real_acc"} <= set(seen.Tags()["scalars"])
    assert [e.step for e in seen.Scalars("d_real_acc")] == [1, 2]
    assert any("samples" in tag for tag in seen.Tags()["images"])


def test_a_tracker_and_snapshots_leave_the_training_as_it_was(tmp_path, trained):
    folder = run(tmp_path / "run", *OGDM, "--report-to", "tensorboard", "--keep-every", "2")
    a, b = (torch.load(f / train.CHECKPOINT, weights_only=True) for f in (trained, folder))
    assert same(a["unet"], b["unet"]) and a["history"] == b["history"] and same(weights(trained), weights(folder))
    assert sorted(p.name for p in folder.glob("snapshot-*")) == ["snapshot-000002", "snapshot-000004"]
    assert same(weights(folder / "snapshot-000004"), weights(folder))
    assert not same(weights(folder / "snapshot-000002"), weights(folder))


def test_wandb_continues_the_same_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for steps in (2, 4):
        folder = run(tmp_path / "run", "--report-to", "wandb", "--save-every", "2", steps=steps)
    wandb.teardown()  # its own process writes to the end
    first, second = sorted((folder / "wandb").glob("offline-run-*"), key=os.path.getctime)
    assert first.name.split("-")[-1] == second.name.split("-")[-1] == (folder / "wandb-id").read_text()
    for part, logged in ((first, [b"1", b"2"]), (second, [b"3", b"4"])):
        (file,) = part.glob("run-*.wandb")
        assert sorted(set(re.findall(rb"_step\x82\x01.(\d)", file.read_bytes()))) == logged
        assert len(list(part.glob("files/media/images/samples*.png"))) == 16


def test_a_tracker_that_is_not_installed_is_named(tmp_path, refused):
    if importlib.util.find_spec("wandb"):
        pytest.skip("wandb is installed")
    with refused("--report-to wandb: there is no wandb; pip install wandb"):
        main([*TINY, "--output", str(tmp_path / "run"), "--report-to", "wandb"])


@pytest.mark.parametrize("launcher", ["torch.distributed.run", "accelerate.commands.launch"])
def test_several_processes_on_cpus_train_one_model(tmp_path, launcher):
    """torchrun's, and accelerate's as on GPUs: both ranks take part in one training."""
    count = {
        "torch.distributed.run": ["--standalone", "--nproc_per_node", "2"],
        "accelerate.commands.launch": ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0"],
    }  # fmt: skip
    command = [sys.executable, "-m", launcher, *count[launcher], "-m", "ogdm_core.diffusers", *TINY,
               "--output", str(tmp_path / "run"), "--steps", "2"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("2 processes, 16 images per step") == 1, done.stdout
    assert json.loads((tmp_path / "run" / "training.json").read_text())["settings"]["processes"] == 2


def test_processes_that_accelerate_does_not_see_are_refused(tmp_path, monkeypatch, refused):
    """Such as those of a launcher that sets WORLD_SIZE alone, on a machine with a GPU."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with refused("WORLD_SIZE says 2 processes, accelerate sees 1"):
        main([*TINY, "--output", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_a_model_with_its_config_at_the_root_is_a_model(tmp_path, trained):
    """As the hub's classic DDPMs are laid out, which DDPMPipeline.from_pretrained loads, too."""
    old = tmp_path / "old"
    old.mkdir()
    for file in [*(trained / "unet").iterdir(), *(trained / "scheduler").iterdir(), trained / "model_index.json"]:
        shutil.copy(file, old)
    assert same(DDPMPipeline.from_pretrained(old).unet.state_dict(), weights(trained))
    flags = ["--model", str(trained)], ["--model", str(old)]
    a, b = (run(tmp_path / f"run{i}", *some, steps=1, base=TINY[2:]) for i, some in enumerate(flags))
    assert same(weights(a), weights(b)) and not same(weights(a), weights(trained))


def test_the_hub_out_of_reach_is_said(tmp_path, monkeypatch, refused):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with refused("the hub is out of reach, and google/ddpm-cat-256 is not in its cache"):
        main([*TINY, "--output", str(tmp_path / "run"), "--model", "google/ddpm-cat-256"])


def test_another_kind_of_network_is_named(tmp_path, trained, refused):
    shutil.copytree(trained, tmp_path / "text")
    config = tmp_path / "text" / "unet" / "config.json"
    config.write_text(config.read_text().replace("UNet2DModel", "UNet2DConditionModel"))
    with refused("is of a UNet2DConditionModel; only UNet2DModel is supported"):
        main([*TINY, "--output", str(tmp_path / "run"), "--model", str(tmp_path / "text")])


def test_a_bug_in_mid_training_shows_its_traceback_and_a_bad_image_one_line(tmp_path, capsys, monkeypatch):
    def fails(with_what):
        monkeypatch.setattr(train, "training_loss", lambda *args: (_ for _ in ()).throw(with_what))
        main([*TINY, "--output", str(tmp_path / "out")])

    with pytest.raises(ValueError, match="a bug"):
        fails(ValueError("a bug"))
    with pytest.raises(SystemExit) as end:
        fails(data_sets.ImageError("a.png cannot be read as an image"))
    assert end.value.code == 2 and "error: a.png cannot be read" in capsys.readouterr().err


def test_a_short_run_is_averaged_over_its_own_end(tmp_path):
    """After 300 steps at a fixed 0.999, three quarters of the average would be the start."""
    start = run(tmp_path / "start", steps=1)
    far = {}
    for name, flags in {"default": [], "fixed": ["--ema", "0.999"]}.items():
        folder = run(tmp_path / name, "--model", str(start), "--lr", "0.01", *flags, steps=4)
        trained = torch.load(folder / train.CHECKPOINT, weights_only=True)["unet"]
        averaged = weights(folder)
        far[name] = sum((averaged[n] - trained[n]).square().sum() for n in trained)
    assert far["default"] < far["fixed"] / 2


def test_a_file_from_before_the_weight_was_made_without_it(tmp_path, capsys):
    folder = run(tmp_path / "run", steps=1)
    state = torch.load(folder / train.CHECKPOINT, weights_only=True)
    del state["run"]["x0_weight"]
    torch.save(state, folder / train.CHECKPOINT)
    with pytest.raises(SystemExit):
        run(folder, "--x0-weight", "9", steps=2)
    assert "x0_weight: 1.0 there, 9.0 here" in capsys.readouterr().err
    run(folder, steps=2)


def test_only_errors_of_eps_are_weighted_as_errors_of_x_0(tmp_path, capsys):
    folder = run(tmp_path / "run", steps=1)
    config = folder / "scheduler" / "scheduler_config.json"
    config.write_text(config.read_text().replace('"epsilon"', '"v_prediction"'))
    with pytest.raises(SystemExit):
        run(tmp_path / "more", "--model", str(folder), "--x0-weight", "9", steps=1)
    assert "--x0-weight is for models that predict epsilon, not v" in capsys.readouterr().err


def test_annealing_lets_both_rates_fall_and_fixes_the_length(tmp_path, capsys):
    folder = run(tmp_path / "run", *OGDM, "--anneal", "--lr", "0.008", steps=4)
    state = torch.load(folder / train.CHECKPOINT, weights_only=True)
    assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.008 / 4)
    assert state["observer"]["optimizer"]["param_groups"][0]["lr"] == pytest.approx(1e-3 / 4)
    with pytest.raises(SystemExit):
        run(folder, *OGDM, "--anneal", "--lr", "0.008", steps=6)
    assert "anneal: 4 there, 6 here" in capsys.readouterr().err


def test_a_run_is_not_continued_with_other_settings(trained, capsys):
    for flags, words in [
        (["--ema", "0.5"], "was made with other settings (ema: None there, 0.5 here); repeat"),
        (["--x0-weight", "9"], "x0_weight: 1.0 there, 9.0 here"),
        (["--channels", "16,8"], "was made with other settings (unet: ['8,8'"),
        (["--ogdm-d-width", "0.5", "--batch-size", "3"], "ogdm_d_width: "),
        (["--ogdm", "false"], "was made with other settings (ogdm: True there, False here)"),
    ]:
        with pytest.raises(SystemExit):
            main([*TINY, *OGDM, "--output", str(trained), *flags])
        assert words in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_extra_that_brings_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "ogdm_core.diffusers.train")
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert "accelerate" in said and "pip install -e '.[diffusers]'" in said


def test_wrong_flags_are_refused_before_diffusers_is_imported(tmp_path):
    code = "import sys; from ogdm_core.diffusers.__main__ import main\n"
    code += "try: main(sys.argv[1:])\n"
    code += "finally: print({'diffusers', 'accelerate', 'sklearn'} & set(sys.modules))"
    command = [sys.executable, "-c", code, "--output", str(tmp_path), "--steps", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("scheduler", [DDIMScheduler, PNDMScheduler, DPMSolverMultistepScheduler])
def test_plain_diffusers_loads_and_samples(trained, scheduler):
    pipeline = DDPMPipeline.from_pretrained(trained)
    noise = scheduler.from_config(pipeline.scheduler.config)
    noise.set_timesteps(5)
    torch.manual_seed(0)
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        for t in noise.timesteps:
            x = noise.step(pipeline.unet(x, t).sample, t, x).prev_sample
    assert x.shape == (2, 1, 8, 8) and x.isfinite().all()


def test_our_euler_is_diffusers_ddim_on_a_trained_model(trained):
    unet, scheduler = train.load_model(str(trained))
    schedule = schedule_of(scheduler)
    noise = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    ours = sample(make_eps_fn(unet.eval(), schedule), noise, schedule, sampler="euler", nfe=10)
    ddim = DDIMScheduler.from_config(
        scheduler.config, timestep_spacing="leading", clip_sample=False, set_alpha_to_one=True
    )
    ddim.set_timesteps(10)
    x = noise
    with torch.no_grad():
        for t in ddim.timesteps:
            x = ddim.step(unet(x, t).sample, t, x).prev_sample
    torch.testing.assert_close(ours, x, atol=1e-4, rtol=1e-4)


def test_class_labels_reach_the_denoiser_and_d(tmp_path):
    folder = run(tmp_path / "cond", "--class-cond", *OGDM, steps=1)
    assert UNet2DModel.from_pretrained(folder, subfolder="unet").config.num_class_embeds == 10
    state = torch.load(folder / train.CHECKPOINT, weights_only=True)
    assert state["observer"]["shape"]["labels"] == 10
    run(tmp_path / "finetuned", "--model", str(folder), *OGDM, steps=1)


def test_bf16_and_accumulation_train(tmp_path):
    folder = run(tmp_path / "bf16", "--mixed-precision", "bf16", "--accumulate", "2", *OGDM)
    assert all(torch.isfinite(w).all() for w in weights(folder).values())


def two_processes(folder, *flags):
    """The checkpoint of one step in two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "ogdm_core.diffusers", *TINY, *flags, "--steps", "1", "--output", str(folder)]
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    state = torch.load(folder / train.CHECKPOINT, weights_only=True)
    assert state["run"]["processes"] == 2
    return state


@pytest.mark.slow
def test_two_processes_average_their_gradients(tmp_path):
    two = two_processes(tmp_path / "two")
    images = data_sets.digits()
    torch.manual_seed(0)
    unet = train.build_unet(images, [8, 8], 1, 0)
    schedule = schedule_of(DDPMScheduler(clip_sample=False))
    for rank in range(2):
        torch.manual_seed(rank)
        x_0 = images.batch(data_sets.batch_index(len(images), 8, 0, 0, rank, 2))
        t = torch.randint(1, 1001, (8,))
        loss, _ = training_loss(unet, x_0, torch.randn_like(x_0), t, schedule)
        (loss / 2).backward()
    torch.optim.Adam(unet.parameters(), lr=1e-4).step()
    for name, weight in unet.state_dict().items():
        torch.testing.assert_close(two["unet"][name], weight, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
def test_eps_from_every_kind_of_prediction(kind):
    schedule = schedule_of(DDPMScheduler())
    x_0, eps = torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8)
    t = torch.tensor([1, 100, 500, 1000])
    x_t = schedule.diffuse(x_0, eps, t)
    target = target_of(x_0, eps, t, schedule, kind)
    torch.testing.assert_close(to_eps(target, x_t, t, schedule, kind), eps, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
def test_rho_knows_how_much_an_error_of_eps_costs_from_the_loss(kind):
    schedule = schedule_of(DDPMScheduler())
    observer = Observer(OGDMConfig(d_width=0.02), schedule, 1, 8)
    found = loss_weights(observer)
    unet = train.build_unet(data_sets.digits(), [8, 8], 1, 0)
    x_0, eps = torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8)
    training_loss(unet, x_0, eps, torch.tensor([5, 100, 500, 1000]), schedule, kind, observer=observer)
    ((t, w),) = found
    a, sigma = schedule.a(t).float(), schedule.sigma(t).float()
    torch.testing.assert_close(
        w, {"epsilon": w / w, "sample": sigma**2, "v_prediction": a**-2}[kind], rtol=1e-3, atol=0
    )


@pytest.mark.parametrize(("projection", "evaluations"), [("euler", 1), ("heun", 2)])
def test_a_step_evaluates_the_network_as_often_as_it_must(projection, evaluations):
    unet = train.build_unet(data_sets.digits(), [8, 8], 1, 0)
    states = []  # Heun's second pass must draw the dropout masks of the first
    unet.register_forward_pre_hook(lambda *args: states.append(torch.get_rng_state()))
    unet.register_forward_hook(lambda *args: torch.rand(1) and None)  # stands for dropout
    schedule = schedule_of(DDPMScheduler())
    config = OGDMConfig(k=0.3, d_width=0.02, projection=projection)
    observer = Observer(config, schedule, 1, 8)
    x_0, eps = torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8)
    loss, transition = training_loss(unet, x_0, eps, torch.tensor([5, 100, 500, 1000]), schedule, observer=observer)
    loss.backward()
    observer.step(1.0)
    assert len(states) == evaluations and torch.equal(states[0], states[-1])
    assert float(loss.detach()) > float(transition)


def test_data_from_npz_and_folders(tmp_path):
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "set.npz", pixels, np.arange(6) % 2)
    for i, p in enumerate(pixels):
        folder = tmp_path / "images" / f"class{i % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(p).save(folder / f"{i}.png")
    from_npz = data_sets.load(str(tmp_path / "set.npz"))
    from_folder = data_sets.load(str(tmp_path / "images"))
    assert from_npz.classes == from_folder.classes == 2
    order = [0, 2, 4, 1, 3, 5]
    assert torch.equal(from_npz.batch(torch.tensor(order)), from_folder.batch(torch.arange(6)))
    assert from_folder.batch(torch.arange(6)).abs().max() <= 1
    # the strides choose the kernels: other strides, other last digits
    assert data_sets.digits().batch(torch.arange(3)).stride() == (64, 64, 8, 1)
    with pytest.raises(ValueError, match="holds no arr_0"):
        np.savez(tmp_path / "bad.npz", x=pixels)
        data_sets.load(str(tmp_path / "bad.npz"))


def test_batches_cover_the_set_once_per_epoch_and_split_over_ranks():
    n, batch = 10, 4
    seen = torch.cat([data_sets.batch_index(n, batch, step, seed=3) for step in range(5)])
    assert seen[:10].sort().values.tolist() == list(range(10))
    assert seen[10:].sort().values.tolist() == list(range(10))
    ranks = [data_sets.batch_index(n, 2, 1, seed=3, rank=r, world=2) for r in range(2)]
    assert torch.cat(ranks).tolist() == seen[4:8].tolist()


def test_the_log_has_the_losses_and_ds_accuracy(trained):
    lines = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert {"transition", "emission", "d_loss", "d_real_acc", "d_fake_acc"} <= set(lines[0])
