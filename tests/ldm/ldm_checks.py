"""Checks of the observed model and of the shims, in the folder of a patched latent-diffusion.

One process for all of them, because Lightning takes seconds to import. A torchvision that cannot be
imported is on its path: what PyPI's is beside a CPU build of torch. usage: ldm_checks.py NAME...
"""

import argparse
import io
import math
import os
import pickle
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch
from pytest import raises

import ogdm_core.ldm.compat
from ogdm_core import trust

ogdm_core.ldm.compat.install()
trust.GIVEN.set(True)  # the tests' own classes as targets

import ldm_tiny  # noqa: E402
import pytorch_lightning as pl  # noqa: E402
from ldm.models.diffusion.ddpm import LatentDiffusion  # noqa: E402
from ldm.util import instantiate_from_config  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from PIL import Image  # noqa: E402

from ogdm_core.ldm.lightning import Trainer, translate  # noqa: E402
from ogdm_core.ldm.train import schedule_of  # noqa: E402
from run import backbones  # noqa: E402
from run.presets import PRESETS  # noqa: E402
from tests.core.toys import loss_weights  # noqa: E402


def build(ogdm=(), target=None, **params):
    """A model; ogdm=None for upstream's own class."""
    torch.manual_seed(0)
    config = ldm_tiny.config(ogdm=None if ogdm is None else dict(ogdm), **params)
    config["model"]["target"] = target or config["model"]["target"]
    model = instantiate_from_config(OmegaConf.create(config["model"]))
    model.learning_rate = 1e-3
    return model


def build_conditional():
    """A model of ten classes."""
    embedder = {
        "target": "ldm.modules.encoders.modules.ClassEmbedder",
        "params": {"n_classes": 10, "embed_dim": 16, "key": "class_label"},
    }
    return build(
        cond_stage_key="class_label", cond_stage_trainable=True, cond_stage_config=embedder,
        unet_config=ldm_tiny.unet(use_spatial_transformer=True, context_dim=16),
    )  # fmt: skip


def fit(model, batch_size=8, steps=2, **options):
    """Trains for two steps without logging; returns the model."""
    options = {"max_steps": steps, "max_epochs": -1, "enable_progress_bar": False,
               "enable_model_summary": False, "enable_checkpointing": False} | options  # fmt: skip
    trainer = Trainer.from_argparse_args(argparse.Namespace(**options), logger=False)
    torch.manual_seed(0)
    trainer.fit(model, ldm_tiny.Blocks(batch_size))
    return model


def watch(model) -> list[dict]:
    """Notes what each step observes, at a lookahead of at most 7, and what the network said."""
    notes, outputs = [], []
    model.model.register_forward_hook(lambda module, args, output: outputs.append(output))
    setup = model.setup

    def watched_setup(stage):
        setup(stage)
        outputs.clear()  # D's cost was counted
        observe = model.observer.observe

        def watched(**kw):
            note = kw | {"s": kw["t"].clamp(max=7), "output": outputs[-1], "before": len(outputs)}
            emission = observe(s=note["s"], **kw)
            note["fake"], note["real"] = (getattr(model.observer._pending[-1], n) for n in ("fake", "real"))
            note["evaluations"] = len(outputs)
            outputs.clear()
            notes.append(note)
            return emission

        model.observer.observe = watched

    model.setup = watched_setup
    return notes


def close(a, b, atol=1e-5):
    assert torch.allclose(a.detach(), b.detach(), atol=atol), (a - b).abs().max()


def check_projection_is_upstreams_ddim_step():
    """fake = DDIM's x_{t-s}, real = q(x_{t-s} | x_0) by upstream's own tables; one evaluation."""
    for parameterization in ("eps", "x0"):
        model = build(parameterization=parameterization, loss_type="l2")
        notes = watch(model)
        fit(model)
        assert len(notes) == 2 and model.observer.steps == 2
        for n in notes:
            index, u = n["t"] - 1, n["t"] - n["s"]
            close(n["x_t"], model.q_sample(n["x_0"], index, n["eps"]))
            x_0 = model.predict_start_from_noise(n["x_t"], index, n["eps_t"])
            close(n["output"], n["eps_t"] if parameterization == "eps" else x_0, atol=1e-4)
            a = torch.cat([torch.ones(1), model.sqrt_alphas_cumprod])[u].reshape(-1, 1, 1, 1)
            b = torch.cat([torch.zeros(1), model.sqrt_one_minus_alphas_cumprod])[u]
            b = b.reshape(-1, 1, 1, 1)
            close(n["fake"], a * x_0 + b * n["eps_t"], atol=1e-4)
            close(n["real"], a * n["x_0"] + b * n["eps"], atol=1e-4)
            assert n["evaluations"] == 1


def check_heuns_second_evaluation_has_the_dropout_of_the_first():
    model = build(ogdm={"projection": "heun"}, unet_config=ldm_tiny.unet(dropout=0.5))
    masks = []
    for module in model.model.modules():
        if isinstance(module, torch.nn.Dropout) and module.p:
            module.register_forward_hook(lambda module, args, output: masks.append(output == 0))
    model.setup("fit")
    masks.clear()  # D's cost was counted
    model.p_losses(torch.randn(8, 4, 8, 8), None, torch.arange(8) * 12)
    first, second = masks[: len(masks) // 2], masks[len(masks) // 2 :]
    assert first and all(m.any() for m in first)
    assert all(map(torch.equal, first, second))
    assert "apply_model" not in vars(model)  # the recorder is gone


def check_every_loss_gets_the_emission_term():
    """L = upstream's loss + gamma mean(emission), whatever upstream's loss is made of."""
    for params in (
        {"loss_type": "l1"},
        {"loss_type": "l2"},
        {"learn_logvar": True, "logvar_init": 0.5},
        {"original_elbo_weight": 0.1, "l_simple_weight": 0.7},
    ):
        model = build(**params)
        model.setup("fit")
        x, t = torch.randn(8, 4, 8, 8), torch.arange(8) * 12
        noise = torch.randn_like(x)
        total, numbers = model.p_losses(x, None, t, noise)
        upstream, _ = LatentDiffusion.p_losses(model, x, None, t, noise)
        emission = model.observer._pending[-1].emission.mean()
        close(total, upstream + 0.1 * emission)
        close(numbers["train/loss"], upstream)
        model.eval()
        assert model.p_losses(x, None, t, noise)[0] == upstream  # validation is not observed
        assert len(model.observer._pending) == 1
        fit(model.train())
        if "learn_logvar" in params:
            assert (model.logvar != 0.5).any()


def check_rho_reads_from_upstreams_loss_how_much_an_error_of_eps_costs():
    model = build(ogdm={"gamma": None}, loss_type="l2", l_simple_weight=0.7, logvar_init=0.5)
    model.setup("fit")
    found = loss_weights(model.observer)
    model.p_losses(torch.randn(8, 4, 8, 8), None, torch.arange(8) * 12)
    ((_, w),) = found
    close(w, torch.full((8,), 0.7 / math.exp(0.5)))


def check_the_length_of_a_run_is_lightnings_from_ds_first_step_on():
    model = build()
    fit(model)
    assert model.observer.total_steps == model.trainer.max_steps > 0
    state, model.observer.total_steps = model.observer.state_dict(), 20
    model.on_load_checkpoint({"global_step": 12, "ogdm": state | {"steps": 3}})  # D began at 9
    assert model.observer.total_steps == 11


def check_a_class_conditional_model_tells_d_the_class():
    model = build_conditional()
    before = model.cond_stage_model.embedding.weight.clone()
    notes = watch(model)
    fit(model)
    assert model.observer.D.labels == 10
    assert notes[0]["label"].tolist() == ldm_tiny.Digits(8).labels.tolist()
    assert (model.cond_stage_model.embedding.weight != before).any()


def check_a_concat_conditional_model_trains_with_heun(projection="heun"):
    """The second evaluation gets the same condition as the first."""
    model = build(
        ogdm={"projection": projection},
        concat_mode=True,
        cond_stage_key="shape",
        cond_stage_config={"target": "torch.nn.Identity"},
        unet_config=ldm_tiny.unet(in_channels=7),
    )
    notes = watch(model)
    fit(model)
    assert model.observer.D.labels == 0 and notes[0]["label"] is None
    assert [n["evaluations"] for n in notes] == [2, 2]


def check_accumulated_gradients_are_those_of_the_whole_batch():
    moments = []
    for batch_size, options in ((8, {}), (4, {"accumulate_grad_batches": 2})):
        model = fit(build(target="ldm_exact.PerSample", scale_by_std=False), batch_size, **options)
        assert model.observer.steps == model.trainer.global_step == 2
        optimizers = (model.trainer.optimizers[0], model.observer.optimizer)
        moments.append([torch.cat([s["exp_avg"].flatten() for s in o.state.values()]) for o in optimizers])
    for whole, parts in zip(*moments, strict=True):
        assert whole.norm() > 0 and (whole - parts).norm() < 1e-3 * whole.norm()


def check_gradients_are_clipped_and_precision_is_upstreams():
    model = fit(build(), steps=1, gradient_clip_val=1e-4)
    first = [s["exp_avg"].flatten() for s in model.trainer.optimizers[0].state.values()]
    assert 0 < torch.cat(first).norm() < 1.01e-5  # 0.1 of a gradient of norm 1e-4
    model = build()
    notes = watch(model)
    fit(model, precision="bf16-mixed")
    assert notes[0]["output"].dtype == torch.bfloat16 and notes[0]["fake"].dtype == torch.float32
    assert float(model.observer.skipped) == 0
    assert all(p.dtype == torch.float32 for p in model.observer.D.parameters())


def check_ds_rate_follows_upstreams_schedule():
    model = fit(build(ogdm={"d_lr": 0.01}), steps=2)
    (group,) = model.observer.optimizer.param_groups
    assert abs(group["lr"] - 0.01 * 0.325) < 1e-12  # the warm-up's second step


def check_the_observer_is_in_no_state_dict():
    model = build()
    model.setup("fit")
    plain = build(ogdm=None)
    assert type(plain).__name__ == "LatentDiffusion"
    assert model.state_dict().keys() == plain.state_dict().keys()


def check_a_checkpoint_without_first_stage_is_refused():
    model = build()
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("first_stage")}
    torch.save({"state_dict": weights}, "no_first_stage.ckpt")
    with raises(ValueError, match="first_stage_config.params.ckpt_path"):
        build(ckpt_path="no_first_stage.ckpt")


def check_bad_settings_are_named():
    for ogdm, word in (({"gama": 1}, "gama"), ({"k": 2}, "setting k")):
        with raises(ValueError, match=word):
            build(ogdm=ogdm)


def check_the_papers_lsun_church_model_is_built():
    """Upstream's config and ours over it: 295 M parameters, on no device."""
    flags = backbones.get("ldm").train(PRESETS["lsun-church-ldm-ogdm-ft"], "", Path("out")).flags
    row = OmegaConf.from_dotlist([f"{n}={v}" for n, v in flags.items() if not n.startswith("-")])
    config = OmegaConf.merge(*map(OmegaConf.load, flags["--base"]), row)
    assert config.model.params.ckpt_path == "models/ldm/lsun_churches256/model.ckpt"
    config.model.params.ckpt_path = None
    for part in ("unet_config", "first_stage_config"):
        node = config.model.params[part]
        node.params = {"target": node.target, "params": node.params}
        node.target = "ldm_tiny.on_meta"
    model = instantiate_from_config(config.model)
    assert type(model).__name__ == "OGDMLatentDiffusion"
    assert round(sum(p.numel() for p in model.model.parameters()) / 1e6) == 295
    x, t = torch.empty(2, 4, 32, 32, device="meta"), torch.zeros(2, device="meta").long()
    assert model.apply_model(x, t, None).shape == x.shape
    model._denoiser = lambda: None  # a network on no device has no cost to count
    model.setup("fit")
    D, schedule = model.observer.D, model.observer.schedule
    assert (D.channels, D.size, schedule.T, schedule.sigma_data) == (4, 32, 1000, 1.0)
    assert D(torch.randn(2, 4, 32, 32), torch.rand(2), torch.rand(2), None).shape == (2,)
    scheduler = instantiate_from_config(config.model.params.scheduler_config)
    assert [scheduler.schedule(n) for n in (0, 1, 2, 15_000)] == [1, 1, 1, 1]


def check_old_trainer_options_are_translated():
    two = {"accelerator": "cpu", "devices": 2, "strategy": "ddp_find_unused_parameters_true"}
    cases = [
        ({"gpus": "0,1", "accelerator": "ddp"}, two),
        ({"gpus": "0,", "accelerator": "ddp"}, {"accelerator": "cpu", "devices": 1}),
        ({}, {"accelerator": "cpu", "devices": 1}),
        ({"accelerator": "cpu", "devices": 2}, two),
        ({"gpus": "0,1", "strategy": "ddp"}, two | {"strategy": "ddp"}),
        ({"replace_sampler_ddp": False}, {"use_distributed_sampler": False}),
    ]
    for old, new in cases:
        assert new.items() <= translate(old).items(), (old, translate(old))
    assert "weights_summary" not in translate({"weights_summary": "top"})
    parser = Trainer.add_argparse_args(argparse.ArgumentParser())
    line = "--gpus 0,1 --max_steps 3 --precision bf16-mixed --limit_val_batches 0.5 --benchmark"
    args = parser.parse_args(line.split())
    values = (args.gpus, args.max_steps, args.precision, args.limit_val_batches, args.benchmark)
    assert values == ("0,1", 3, "bf16-mixed", 0.5, True)


def check_a_first_stage_is_refused_with_advice():
    config = ldm_tiny.config()["model"]["params"]["first_stage_config"]
    model = instantiate_from_config(OmegaConf.create(config))
    with raises(ValueError, match="first stages do not"):
        fit(model)


class Callback14:
    """Stands for a class that an old checkpoint names."""


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def check_old_checkpoints_load_without_running_their_code():
    weights = {"w": torch.arange(3.0), "half": torch.ones(2, dtype=torch.float16)}
    extras = {"callbacks": {Callback14: {"best": np.float64(0.5)}}, "bomb": Bomb(), "step": 7}
    torch.save({"state_dict": weights} | extras, "old.ckpt")
    for source in ("old.ckpt", io.BytesIO(Path("old.ckpt").read_bytes())):
        loaded = torch.load(source, map_location="cpu")
        assert torch.equal(loaded["state_dict"]["w"], weights["w"])
        assert loaded["state_dict"]["half"].dtype == torch.float16
        assert list(loaded["callbacks"].values()) == [{"best": 0.5}] and loaded["step"] == 7
    assert not Path("exploded").exists()
    with raises(pickle.UnpicklingError):  # where strictness is asked for, it stays
        torch.load("old.ckpt", weights_only=True)


def check_a_config_within_tamings_model_runs_nothing():
    hostile = {"target": "os.mkdir", "params": {"path": "exploded"}}
    config = {"target": "taming.models.vqgan.VQModel", "params": {
        "ddconfig": {"ch": 32, "out_ch": 1, "ch_mult": [1], "num_res_blocks": 1, "attn_resolutions": [],
                     "in_channels": 1, "resolution": 8, "z_channels": 4, "double_z": False},
        "lossconfig": hostile, "n_embed": 4, "embed_dim": 4}}  # fmt: skip
    from taming.models.vqgan import VQModel

    token = trust.GIVEN.set(False)
    with raises(trust.RefusedError, match="os.mkdir"):
        instantiate_from_config(OmegaConf.create(config))
    with raises(trust.RefusedError, match="os.mkdir"):
        VQModel(**config["params"])
    trust.GIVEN.reset(token)
    assert not Path("exploded").exists()


def check_the_stand_in_for_torchvision():
    from torchvision import transforms, utils

    images = torch.arange(5.0).reshape(5, 1, 1, 1).expand(5, 1, 2, 3)
    grid = utils.make_grid(images, nrow=4)
    assert grid.shape == (3, 2 * (2 + 2) + 2, 4 * (3 + 2) + 2)
    assert (grid[:, 6:8, 2:5] == 4).all() and (grid[:, :2] == 0).all()
    assert utils.make_grid(images[0]).shape == (3, 2, 3)
    assert utils.make_grid(grid[:2]).shape == (2, 10, 22)  # upstream cuts grids as if batches
    picture = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 6))
    for p, expected in ((0.0, np.asarray(picture)), (1.0, np.asarray(picture)[:, ::-1])):
        assert (np.asarray(transforms.RandomHorizontalFlip(p)(picture)) == expected).all()
    with raises(ImportError, match="install a torchvision"):
        from torchvision import models  # noqa: F401


def check_upstream_reads_the_lsun_layout():
    from run.data import lsun

    Path("pictures").mkdir()
    for i in range(4):
        Image.new("RGB", (40, 30), (i, 2 * i, 3 * i)).save(f"pictures/{i}.png")
    lsun.prepare(Path("pictures"), Path("prepared"), expect=4)
    assert lsun.link(Path("prepared"), Path.cwd()) and lsun.link(Path("prepared"), Path.cwd())
    from ldm.data.lsun import LSUNChurchesTrain, LSUNChurchesValidation

    for dataset in (LSUNChurchesTrain(size=16), LSUNChurchesValidation(size=16)):
        assert len(dataset) == 4 and dataset[3]["image"].shape == (16, 16, 3)
        assert np.allclose(dataset[3]["image"][0, 0], np.array([3, 6, 9]) / 127.5 - 1, atol=1e-6)


def check_samples_do_not_depend_on_the_batch_size():
    from ogdm_core.ldm.sample import sample_images

    opt = argparse.Namespace(sampler="euler", nfe=3, discretization="quadratic", rho=None, order=None, seed=1)
    model = build().eval()
    whole, _ = sample_images(model, opt, 5, 5, 1.0, None)
    parts, _ = sample_images(model, opt, 5, 2, 1.0, None)
    assert np.abs(whole.astype(int) - parts).max() <= 1
    opt.nfe = 101
    with raises(SystemExit, match="--nfe: 101 steps do not fit on a grid of T = 100; give a lower"):
        sample_images(model, opt, 5, 5, 1.0, None)
    assert schedule_of(model).T == 100


def check_class_conditional_samples_come_with_labels():
    from ogdm_core.ldm.sample import sample_images

    model = build_conditional().eval()
    opt = argparse.Namespace(sampler="s-pndm", nfe=4, discretization=None, rho=None, order=None, seed=0)
    images, labels = sample_images(model, opt, 6, 4, 1.0, None)
    assert images.shape == (6, 16, 16, 3) and labels.dtype == np.int64
    assert labels.min() >= 0 and labels.max() < 10 and len(set(labels)) > 1


def main(names: list[str]) -> None:
    pl.utilities.rank_zero.logging.getLogger("pytorch_lightning").setLevel("ERROR")
    for name in names:
        try:
            with redirect_stdout(sys.stderr):
                getattr(sys.modules[__name__], f"check_{name}")()
            print(f"#### {name}: ok", flush=True)
        except Exception:  # noqa: BLE001  every check must have its say
            print(f"#### {name}: {traceback.format_exc()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
