"""Few-step sampling in CompVis/latent-diffusion: what the patched sample_diffusion.py calls."""

import argparse
import glob
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import trange

from .. import fewstep
from ..files import atomic_write
from ..random import generator_of
from ..samplers import sample
from ..trust import TrustFlag
from .export import run_configs, without_checkpoints
from .train import classes_of, make_eps_fn, schedule_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that the patched sample_diffusion.py has more than upstream's."""
    names = ("sampler", "nfe", "discretization", "rho", "order", "npz", "seed")
    fewstep.add_arguments(parser, names, own=("vanilla_sample", "custom_steps"), seed=0)
    parser.add_argument("--trust", action=TrustFlag)


def configs_of(opt: argparse.Namespace) -> list[str]:
    """The configs of the model; without any the script ends before anything is loaded.

    Upstream looks for `config.yaml` beside the checkpoint. A checkpoint of a training run has its
    configs in RUN/configs.
    """
    configs = opt.base or run_configs(opt.resume)
    if not configs:
        raise SystemExit(
            f"--resume: no config.yaml beside {opt.resume}, and it is in no training run either; "
            "name the model's config with --base"
        )
    return configs


def load_model_from_config(config, state_dict: dict[str, Tensor]):
    """Upstream's function of that name, on the device there is.

    Weights come from `state_dict` alone, so files that training started from need not exist. It
    must hold all weights; the noise schedule, and what only trains the first stage, may be absent.
    """
    from ldm.util import instantiate_from_config

    model = instantiate_from_config(without_checkpoints(config))
    missing = model.load_state_dict(state_dict, strict=False).missing_keys
    networks = ("model.", "model_ema.", "first_stage_model.", "cond_stage_model.")
    lost = [k for k in missing if k.startswith(networks) and ".loss." not in k]
    if lost:
        raise SystemExit(
            f"--resume: the checkpoint lacks {len(lost)} of the model's weights, such as "
            f"{lost[0]}; is it of another model than the config?"
        )
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def sampler(opt: argparse.Namespace, upstream: Callable) -> Callable:
    """A function with the signature of upstream's `run`; upstream's own without --sampler."""

    def few_steps(model, logdir, *, batch_size, eta, n_samples, nplog, **own: Any) -> None:
        images, labels = sample_images(model, opt, n_samples, batch_size, eta, Path(logdir))
        shape = "x".join(map(str, images.shape))
        fewstep.write_npz(f"{nplog}/{shape}-samples.npz", images, labels)

    run = few_steps if opt.sampler else upstream
    if not opt.npz:
        return run

    def run_and_copy(*args: Any, nplog: str, **kwargs: Any) -> None:
        run(*args, nplog=nplog, **kwargs)
        (written,) = glob.glob(f"{glob.escape(nplog)}/*.npz")
        with atomic_write(opt.npz) as file:
            file.write(Path(written).read_bytes())
        print(f"wrote {opt.npz}")

    return run_and_copy


@torch.no_grad()
def sample_images(
    model, opt: argparse.Namespace, count: int, batch_size: int, eta: float, folder: Path | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """uint8 images [count, H, W, 3] from the EMA weights and, by class, int64 labels [count].

    Every image is also written to `folder` as upstream writes them.
    """
    schedule, classes = schedule_of(model), classes_of(model)
    size = model.model.diffusion_model.image_size
    fewstep.check_grid(schedule, vars(opt))
    if model.cond_stage_model is not None and not classes:
        raise SystemExit(
            "--sampler: unconditional and class-conditional models only; for others call "
            "ogdm_core.samplers.sample with ogdm_core.ldm.train.make_eps_fn(model, cond)"
        )
    images = np.empty(0, dtype=np.uint8)  # made in one piece: 50,000 of them take 10 GB
    labels, cond = np.zeros(count, dtype=np.int64), None
    with model.ema_scope("Sampling"):
        for first in trange(0, count, batch_size, desc=f"{opt.sampler}, NFE {opt.nfe}"):
            numbers = range(first, min(first + batch_size, count))
            generators = [generator_of(opt.seed, i) for i in numbers]
            noise = fewstep.normal(generators, (model.channels, size, size)).to(model.device)
            if classes:
                drawn = fewstep.labels(generators, classes)
                labels[numbers.start : numbers.stop] = drawn
                key = model.cond_stage_model.key
                cond = model.get_learned_conditioning({key: drawn.to(model.device)})
            z = sample(
                make_eps_fn(model, cond), schedule.prior(noise), schedule, **fewstep.solver_of(vars(opt)), eta=eta,
                generator=generator_of(opt.seed, "z", first, device=model.device),
            )  # fmt: skip
            batch = fewstep.to_uint8(model.decode_first_stage(z))
            if first == 0:
                images = np.empty((count, *batch.shape[1:]), dtype=np.uint8)
            images[numbers.start : numbers.stop] = batch
            for i, image in zip(numbers, batch, strict=True):
                if folder is not None:
                    Image.fromarray(image).save(folder / f"sample_{i:06}.png")
    return images, labels if classes else None
