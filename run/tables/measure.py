"""Times a few steps of a row's own network on this machine; `--plan` multiplies them out.

python -m run.tables.measure PRESET THIRD_PARTY [none,euler,heun]     prints JSON
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

from ogdm_core import DiscreteVP, OGDMConfig
from run.benchmark.step import Network, Trainer, clock
from run.train import commands
from run.train.presets import Preset, get_preset

GPU_BATCH = 16  # images per step where a GPU is timed; on a CPU one
REPEATS = 2
Coder = dict[str, Callable[[], object]]  # an autoencoder's two halves, for one image


def build_adm(preset: Preset, home: Path, device: torch.device) -> tuple[Network, Coder]:
    """guided-diffusion's U-Net with the preset's flags."""
    from guided_diffusion import script_util

    from ogdm_core.adm import train as adm

    flags = {name.removeprefix("--"): value for name, value in commands.adm_model(preset).items()}
    known = script_util.model_and_diffusion_defaults() | flags
    model, diffusion = script_util.create_model_and_diffusion(**known)
    eps_fn = adm.make_eps_fn(diffusion, model.to(device), {})
    schedule = DiscreteVP(diffusion.alphas_cumprod)
    return Network(model, eps_fn, schedule, torch.tensor(500), 3, known["image_size"]), {}


def build_edm(preset: Preset, home: Path, device: torch.device) -> tuple[Network, Coder]:
    """EDM's DDPM++ for CIFAR-10."""
    from ogdm_core.edm import compat

    compat.install()
    from training.networks import EDMPrecond

    from ogdm_core.edm import train as edm

    classes = 10 if preset.conditional else 0
    net = EDMPrecond(32, 3, classes, model_type="SongUNet", channel_mult=[2, 2, 2], augment_dim=9)
    label = torch.eye(10, device=device)[:1] if classes else None
    eps_fn, schedule = edm.make_eps_fn(net.to(device), label), edm.schedule_of(net)
    return Network(net, eps_fn, schedule, torch.tensor(1.0), 3, 32, classes), {}


def build_ldm(preset: Preset, home: Path, device: torch.device) -> tuple[Network, Coder]:
    """latent-diffusion's U-Net and autoencoder for LSUN-Church, without weights."""
    from ogdm_core.ldm import compat

    compat.install()
    from ldm.util import instantiate_from_config
    from omegaconf import OmegaConf

    params = OmegaConf.load(home / commands.LDM_BASE).model.params
    params.first_stage_config.params.pop("ckpt_path")
    unet = instantiate_from_config(params.unet_config).to(device)
    first = instantiate_from_config(params.first_stage_config).to(device).eval()
    images = torch.randn(1, 3, 256, 256, device=device)
    latents = torch.randn(1, params.channels, params.image_size, params.image_size, device=device)
    network = Network(unet, lambda x, t: unet(x, t - 1), DiscreteVP.linear(sigma_data=1.0),
                      torch.tensor(500), params.channels, params.image_size)  # fmt: skip
    return network, {
        "encode": lambda: first.encode(images),
        "decode": lambda: first.decode(latents),
    }


def measure(preset: Preset, home: Path, projections: list[str]) -> dict:
    """Seconds per image: of training steps, of one evaluation in sampling, of the autoencoder."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch, threads = GPU_BATCH if device.type == "cuda" else 1, torch.get_num_threads()
    sys.path.insert(0, str(home))
    build = {"adm": build_adm, "edm": build_edm, "ldm": build_ldm}[preset.backbone]
    network, coder = build(preset, home, device)
    x = torch.randn(batch, network.channels, network.size, network.size, device=device)
    t = network.t.to(device).expand(batch)

    def seconds(call: Callable[[], object]) -> float:
        """Of one call, after a first one."""
        timed = Timer("call()", globals={"call": call}, num_threads=threads, timer=clock(device))
        return timed.timeit(REPEATS).mean

    def step(projection: str) -> Callable[[], object]:
        trainer = Trainer(network, batch)
        config = OGDMConfig(projection=projection) if projection != "none" else None
        return partial(trainer.step, trainer.observer(config) if config else None)

    without_gradients = torch.no_grad()
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": threads, "batch": batch, "repeats": REPEATS,
        "parameters": sum(p.numel() for p in network.module.parameters()),
        "evaluate": seconds(without_gradients(lambda: network.eps_fn(x, t))) / batch,
        **{name: seconds(without_gradients(coder[name])) if coder else 0.0
           for name in ("encode", "decode")},
        "train": {n: seconds(step(n)) / batch for n in projections},
    }  # fmt: skip


if __name__ == "__main__":
    chosen, folder = get_preset(sys.argv[1]), Path(sys.argv[2])
    names = [name for name in "".join(sys.argv[3:]).split(",") if name]
    print(json.dumps(measure(chosen, folder / commands.UPSTREAM[chosen.backbone], names)))
