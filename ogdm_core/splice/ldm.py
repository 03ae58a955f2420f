"""OGDM in CompVis/latent-diffusion: what its configs name, its patches call and people type.

    OGDMLatentDiffusion     the model that a config asks for (`ldm_model`)
    prepare, sampler, ...   --sampler, --nfe and their kind for upstream's sample_diffusion.py
    train_argv,             the paper's rows as full command lines;
    sample_argv             `python -m ogdm_core.splice.ldm PRESET ...` runs them
    export                  `python -m ogdm_core.splice.ldm export CKPT DIR`: a trained model in the
                            layout of upstream's released ones

Upstream counts a network's time from 0, the paper from 1: t = index + 1.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ogdm_core.samplers import SAMPLERS, sample, steps_for_nfe
from ogdm_core.schedule import DISCRETISATIONS, DiscreteVP
from ogdm_core.solvers import EpsFn

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM_TARGET = "ldm.models.diffusion.ddpm.LatentDiffusion"


def __getattr__(name: str):
    """The model, imported when asked for: only then must upstream be on the path."""
    if name == "OGDMLatentDiffusion":
        from ogdm_core.compat.ldm import install

        install()  # upstream's modules do not import on today's stack without it
        from .ldm_model import OGDMLatentDiffusion

        return OGDMLatentDiffusion
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---- the denoiser, as the method sees it ------------------------------------------------------


def schedule_of(model) -> DiscreteVP:
    """The model's noise schedule. Latents are scaled to unit variance, hence sigma_data = 1."""
    return DiscreteVP(model.alphas_cumprod, sigma_data=1.0)


def to_eps(model, output: Tensor, x_t: Tensor, index: Tensor) -> Tensor:
    """eps [N, C, H, W] from what the network predicts, which is eps or x_0."""
    if model.parameterization == "eps":
        return output
    return model._predict_eps_from_xstart(x_t, index, output)


def make_eps_fn(model, cond=None) -> EpsFn:
    """The denoiser as eps(x [N, C, H, W], t [N]), with t = 1..T, under upstream's `cond`."""

    def eps_fn(x: Tensor, t: Tensor) -> Tensor:
        return to_eps(model, model.apply_model(x, t - 1, cond), x, t - 1)

    return eps_fn


def classes_of(model) -> int:
    """Number of classes of a class-conditional model, 0 for any other."""
    embedding = getattr(model.cond_stage_model, "embedding", None)
    by_class = model.cond_stage_key == "class_label" and isinstance(embedding, torch.nn.Embedding)
    return embedding.num_embeddings if by_class else 0


# ---- scripts/sample_diffusion.py --------------------------------------------------------------


def add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that the patched sample_diffusion.py has more than upstream's."""
    group = parser.add_argument_group("few-step sampling")
    group.add_argument("--sampler", default="", choices=("", *SAMPLERS), metavar="NAME",
                       help=f"{', '.join(SAMPLERS)}; upstream's own if not given")  # fmt: skip
    group.add_argument("--nfe", type=int, default=10, metavar="INT",
                       help="network evaluations an image (default: 10)")  # fmt: skip
    group.add_argument("--discretization", default=None, choices=DISCRETISATIONS,
                       help="spacing of the time steps (default: linear)")  # fmt: skip
    group.add_argument("--npz", default="", metavar="FILE",
                       help="write all images there, as ADM's evaluator reads them")  # fmt: skip
    group.add_argument("--seed", type=int, default=0, metavar="INT",
                       help="with --sampler: image i is made from (seed, i), whatever the batch "
                            "size (default: 0)")  # fmt: skip


def prepare(opt: argparse.Namespace) -> list[str]:
    """Checks the flags before anything is loaded; returns the configs of the model.

    Upstream looks for `config.yaml` beside the checkpoint. A checkpoint of a training run has its
    configs in RUN/configs.
    """
    if opt.sampler:
        try:
            steps_for_nfe(opt.sampler, opt.nfe)
        except ValueError as error:
            raise SystemExit(f"--nfe: {error}") from error
    configs = opt.base or run_configs(opt.resume)
    if not configs:
        raise SystemExit(
            f"--resume: no config.yaml beside {opt.resume}, and it is in no training run either; "
            "name the model's config with --base"
        )
    if opt.npz:
        Path(opt.npz).resolve().parent.mkdir(parents=True, exist_ok=True)
    return configs


def run_configs(checkpoint: str) -> list[str]:
    """The project configs of the run that RUN/checkpoints/NAME.ckpt belongs to, oldest first."""
    run = Path(checkpoint).resolve().parents[1]
    return sorted(glob.glob(str(run / "configs" / "*-project.yaml")))


def load_model_from_config(config, state_dict: dict[str, Tensor]):
    """Upstream's function of that name, on the device there is.

    Weights come from `state_dict` alone, so files that training started from need not exist.
    """
    from ldm.util import instantiate_from_config

    model = instantiate_from_config(_without_checkpoints(config))
    model.load_state_dict(state_dict, strict=False)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _without_checkpoints(config):
    """A copy of a model's config that loads no weights of its own."""
    from omegaconf import OmegaConf

    config = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    config.params.pop("ckpt_path", None)
    for stage in ("first_stage_config", "cond_stage_config"):
        node = config.params.get(stage)
        if OmegaConf.is_dict(node) and "params" in node:
            node.params.pop("ckpt_path", None)
    return config


def sampler(opt: argparse.Namespace, upstream: Callable) -> Callable:
    """A function with the signature of upstream's `run`; upstream's own without --sampler."""

    def ours(model, logdir, *, batch_size, eta, n_samples, nplog, **own):
        images, labels = sample_images(model, opt, n_samples, batch_size, eta, Path(logdir))
        shape = "x".join(map(str, images.shape))
        np.savez(os.path.join(nplog, f"{shape}-samples.npz"), images, *labels)

    run = ours if opt.sampler else upstream
    if not opt.npz:
        return run

    def run_and_copy(*args, nplog, **kwargs):
        run(*args, nplog=nplog, **kwargs)
        (written,) = glob.glob(os.path.join(glob.escape(nplog), "*.npz"))
        shutil.copyfile(written, f"{opt.npz}.part")
        os.replace(f"{opt.npz}.part", opt.npz)
        print(f"wrote {opt.npz}")

    return run_and_copy


@torch.no_grad()
def sample_images(
    model, opt: argparse.Namespace, count: int, batch_size: int, eta: float, folder: Path | None
) -> tuple[np.ndarray, list[np.ndarray]]:
    """uint8 images [count, H, W, 3] from the EMA weights and, by class, [int64 labels [count]].

    Every image is also written to `folder` as upstream writes them.
    """
    from PIL import Image
    from tqdm import trange

    schedule, unet = schedule_of(model), model.model.diffusion_model
    schedule.times(steps_for_nfe(opt.sampler, opt.nfe), opt.discretization)
    classes = classes_of(model)
    if model.cond_stage_model is not None and not classes:
        raise SystemExit(
            "--sampler: unconditional and class-conditional models only; for others call "
            "ogdm_core.samplers.sample with ogdm_core.splice.ldm.make_eps_fn(model, cond)"
        )
    shape = (model.channels, unet.image_size, unet.image_size)
    images, labels = None, np.zeros(count if classes else 0, dtype=np.int64)
    with model.ema_scope("Sampling"):
        for first in trange(0, count, batch_size, desc=f"{opt.sampler}, NFE {opt.nfe}"):
            numbers = range(first, min(first + batch_size, count))
            generators = [torch.Generator().manual_seed(_seed(opt.seed, i)) for i in numbers]
            x_T = torch.stack([torch.randn(shape, generator=g) for g in generators])
            cond = None
            if classes:
                drawn = torch.stack([torch.randint(classes, (), generator=g) for g in generators])
                labels[first : first + len(drawn)] = drawn
                key = model.cond_stage_model.key
                cond = model.get_learned_conditioning({key: drawn.to(model.device)})
            z = sample(
                make_eps_fn(model, cond),
                schedule.prior(x_T.to(model.device)),
                schedule,
                sampler=opt.sampler,
                nfe=opt.nfe,
                discretisation=opt.discretization,
                eta=eta,
                generator=torch.Generator(model.device).manual_seed(_seed(opt.seed, "z", first)),
            )
            x = ((model.decode_first_stage(z) + 1) * 127.5).clamp(0, 255).to(torch.uint8)
            x = x.permute(0, 2, 3, 1).cpu().numpy()
            if images is None:
                images = np.empty((count, *x.shape[1:]), dtype=np.uint8)
            images[first : first + len(x)] = x
            for i, image in zip(numbers, x, strict=True) if folder else ():
                Image.fromarray(image).save(folder / f"sample_{i:06}.png")
    return images, [labels] if classes else []


def _seed(*key) -> int:
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


# ---- export -----------------------------------------------------------------------------------


def export(checkpoint: str, folder: str) -> None:
    """Writes DIR/model.ckpt and DIR/config.yaml, which untouched upstream code loads and samples.

    The weights are `state_dict` as it is; optimisers, D and random states stay behind.
    """
    from omegaconf import OmegaConf

    saved = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    kept = {name: saved[name] for name in ("state_dict", "global_step", "epoch")}
    torch.save(kept, out / "model.ckpt")
    configs = run_configs(checkpoint)
    if not configs:
        print(f"wrote {out / 'model.ckpt'}; no run around {checkpoint}, so no config.yaml")
        return
    config = OmegaConf.merge(*map(OmegaConf.load, configs))
    config.model = _without_checkpoints(config.model)
    config.model.target = UPSTREAM_TARGET
    config.model.params.pop("ogdm", None)
    OmegaConf.save(config, out / "config.yaml")
    print(f"wrote {out / 'model.ckpt'} and config.yaml, step {kept['global_step']}")
