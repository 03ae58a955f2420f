"""Times a few steps of a row's own network on this machine; `--plan` multiplies them out.

    python -m run.tables.measure PRESET --third-party DIR

runs alone, since each codebase brings modules that the others must not see, and prints JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ogdm_core.config import OGDMConfig
from ogdm_core.observer import Observer
from ogdm_core.schedule import DiscreteVP, KarrasVE, Schedule
from run.train.presets import PRESETS, Preset

from .recipes import RECIPES


@dataclass
class Network:
    """A denoiser: eps(x [N, channels, size, size], t [N]); for LDM also its autoencoder."""

    module: nn.Module
    eps: Callable[[Tensor, Tensor], Tensor]
    schedule: Schedule
    t: Tensor  # a time in the middle
    channels: int
    size: int
    labels: int = 0
    encode: Callable[[], object] | None = None
    decode: Callable[[], object] | None = None


def build_adm(preset: Preset, home: Path, device: torch.device) -> Network:
    """guided-diffusion's U-Net with the preset's flags."""
    from guided_diffusion import script_util

    from ogdm_core.splice import adm

    parser = argparse.ArgumentParser()
    defaults = script_util.model_and_diffusion_defaults()
    script_util.add_dict_to_argparser(parser, defaults)
    flags = parser.parse_args(shlex.split(f"{adm.MODEL[preset.dataset]} {adm.DIFFUSION}"))
    model, diffusion = script_util.create_model_and_diffusion(
        **script_util.args_to_dict(flags, defaults.keys())
    )
    model.to(device)
    schedule = DiscreteVP(diffusion.alphas_cumprod)
    eps = adm.make_eps_fn(diffusion, model, {})
    return Network(model, eps, schedule, torch.tensor([500]), 3, flags.image_size)


def build_edm(preset: Preset, home: Path, device: torch.device) -> Network:
    """EDM's DDPM++ for CIFAR-10."""
    from ogdm_core.splice import edm

    edm.install()
    from training.networks import EDMPrecond

    labels = 10 if preset.conditional else 0
    net = EDMPrecond(32, 3, labels, model_type="SongUNet", channel_mult=[2, 2, 2], augment_dim=9)
    net.to(device)

    def eps(x: Tensor, sigma: Tensor) -> Tensor:
        classes = torch.eye(10, device=device)[torch.zeros(len(x), dtype=int)] if labels else None
        return (x - net(x, sigma, classes)) / sigma.reshape(-1, 1, 1, 1)

    return Network(net, eps, KarrasVE(), torch.tensor([1.0]), 3, 32, labels)


def build_ldm(preset: Preset, home: Path, device: torch.device) -> Network:
    """latent-diffusion's U-Net and autoencoder for LSUN-Church, without weights."""
    from ogdm_core.compat import ldm as compat

    compat.install()
    from ldm.util import instantiate_from_config
    from omegaconf import OmegaConf

    from ogdm_core.splice import ldm

    params = OmegaConf.load(home / ldm.BASE).model.params
    params.first_stage_config.params.pop("ckpt_path")
    unet = instantiate_from_config(params.unet_config).to(device)
    first = instantiate_from_config(params.first_stage_config).to(device).eval()
    images = torch.randn(1, 3, 256, 256, device=device)
    latents = torch.randn(1, params.channels, params.image_size, params.image_size, device=device)
    return Network(
        unet, lambda x, t: unet(x, t - 1), DiscreteVP.linear(sigma_data=1.0), torch.tensor([500]),
        params.channels, params.image_size,
        encode=lambda: first.encode(images), decode=lambda: first.decode(latents),
    )  # fmt: skip


BUILD = {"adm": build_adm, "edm": build_edm, "ldm": build_ldm}


def timed(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median seconds of a call, after one that does not count.

    On a CPU that is processor time over the number of threads: what else the machine is doing does
    not count.
    """
    seconds = []
    for i in range(repeats + 1):
        started = _clock(device)
        call()
        if i:
            seconds.append(_clock(device) - started)
    return statistics.median(seconds)


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() / torch.get_num_threads()


def training_step(network: Network, batch: int, device: torch.device, projection: str | None):
    """A function that takes one whole training step, with an observer if `projection` is given."""
    optimizer = torch.optim.Adam(network.module.parameters(), lr=1e-4)
    observer = None
    if projection:
        config = OGDMConfig(projection=projection)
        observer = Observer(config, network.schedule, network.channels, network.size,
                            network.labels, device)  # fmt: skip
    shape = (batch, network.channels, network.size, network.size)

    def step() -> None:
        x_0, eps = torch.randn(shape, device=device), torch.randn(shape, device=device)
        t = network.t.to(device).expand(batch)
        x_t = network.schedule.diffuse(x_0, eps, t)
        eps_t = network.eps(x_t, t)
        loss = (eps_t - eps).square().mean()
        if observer is not None:
            label = torch.zeros(batch, network.labels, device=device) if network.labels else None
            loss = (
                loss
                + observer.observe(
                    x_0=x_0, eps=eps, x_t=x_t, t=t, eps_t=eps_t, eps_fn=network.eps, label=label
                ).mean()
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if observer is not None:
            observer.step(1.0)

    return step


def measure(
    preset: Preset, home: Path, projections: list[str | None], batch: int, repeats: int
) -> dict:
    """Seconds an image: of training steps, of one evaluation in sampling, of the autoencoder."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sys.path.insert(0, str(home))
    network = BUILD[preset.backbone](preset, home, device)
    found = {
        "preset": preset.name,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "batch": batch,
        "repeats": repeats,
        "parameters": sum(p.numel() for p in network.module.parameters()),
        "train": {},
    }
    shape = (batch, network.channels, network.size, network.size)
    x, t = torch.randn(shape, device=device), network.t.to(device).expand(batch)
    with torch.no_grad():
        found["evaluate"] = timed(lambda: network.eps(x, t), repeats, device) / batch
        for name in ("encode", "decode"):
            call = getattr(network, name)
            found[name] = timed(call, 1, device) if call else 0.0
    for projection in projections:
        step = training_step(network, batch, device, projection)
        found["train"][projection or "none"] = timed(step, repeats, device) / batch
    return found


def main(argv: list[str] | None = None) -> None:
    """Prints the measurement as JSON, last line of stdout."""
    parser = argparse.ArgumentParser(prog="python -m run.tables.measure", description=__doc__)
    parser.add_argument("preset", choices=list(PRESETS))
    parser.add_argument("--third-party", type=Path, required=True, help="the patched codebases")
    parser.add_argument("--projections", default="none", help="training steps: none, euler, heun")
    parser.add_argument("--batch", type=int, default=1, help="images a step (default: 1)")
    parser.add_argument("--repeats", type=int, default=2, help="timed steps (default: 2)")
    args = parser.parse_args(argv)
    preset = PRESETS[args.preset]
    home = args.third_party / RECIPES[preset.backbone].upstream
    names = [None if name == "none" else name for name in args.projections.split(",") if name]
    print(json.dumps(measure(preset, home, names, args.batch, args.repeats)))


if __name__ == "__main__":
    main()
