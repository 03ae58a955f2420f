"""EDM's networks for diffusers: --arch=adm is a UNet2DModel under EDM's preconditioning, the others are not."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from run import backbones

from .unet import Network, NotTheSame, save_parts

OUTER = {"map_layer0": "time_embedding.linear_1", "map_layer1": "time_embedding.linear_2", "map_label":
         "class_embedding", "out_norm": "conv_norm_out", "out_conv": "conv_out"}  # fmt: skip
RESIDUAL = {"norm0": "norm1", "conv0": "conv1", "affine": "time_emb_proj", "norm1": "norm2", "conv1": "conv2",
            "skip": "conv_shortcut"}  # fmt: skip
ATTENTION = {"norm2": "group_norm", "qkv": "qkv", "proj": "to_out.0"}

SAMPLING = """\
The network is F of EDM's preconditioning, which `EDMEulerScheduler` and `EDMDPMSolverMultistepScheduler` apply:

```python
import torch
from diffusers import EDMDPMSolverMultistepScheduler, UNet2DModel

unet = UNet2DModel.from_pretrained("DIR", subfolder="unet")
scheduler = EDMDPMSolverMultistepScheduler.from_pretrained("DIR", subfolder="scheduler")
scheduler.set_timesteps(10)
size = unet.config.sample_size
x = torch.randn(16, unet.config.in_channels, size, size) * scheduler.init_noise_sigma
with torch.no_grad():
    for t in scheduler.timesteps:
        F = unet(scheduler.scale_model_input(x, t), t).sample
        x = scheduler.step(F, t, x).prev_sample
images = (x.clamp(-1, 1) + 1) / 2
```"""


def read(checkpoint: Path, native: list[str], third_party: Path) -> Network:
    """The network `ema` of a snapshot."""
    from diffusers import EDMEulerScheduler

    backbone = backbones.get("edm")
    whole = backbone.build(*backbone.pack(checkpoint, third_party), third_party)
    net, settings = whole.model, dict(whole.init_kwargs)
    flags = {"class": type(whole).__name__, "arguments": list(whole.init_args), "keywords": settings}
    size, levels = whole.img_resolution, settings.get("channel_mult", [1, 2, 3, 4])
    widths = [settings.get("model_channels", 192) * m for m in levels]
    attention = [(size >> i) in settings.get("attn_resolutions", [32, 16, 8]) for i in range(len(levels))]
    at = {w for w, attends in zip(widths, attention, strict=True) if attends} | {widths[-1]}
    first = f"enc.{size}x{size}_conv"

    def inner(body: str) -> tuple[object, str] | None:
        found = re.fullmatch(r"((?:enc|dec)\.\w+)\.(\w+)", body)
        attends = found and found[2] in ATTENTION
        return found and ((found[1], attends), (ATTENTION if attends else RESIDUAL)[found[2]])

    def split(qkv: Tensor, width: int) -> list[Tensor]:
        """q, k and v of a layer whose outputs are ordered by head, channel, then q, k and v."""
        return list(qkv.reshape(-1, 3, *qkv.shape[1:]).unbind(1))

    def call(x: Tensor, c_noise: Tensor, label: Tensor | None) -> Tensor:
        return net(x, c_noise, None if label is None else torch.eye(whole.label_dim)[label])

    config = {
        "sample_size": size, "in_channels": whole.img_channels, "out_channels": whole.img_channels,
        "layers_per_block": settings.get("num_blocks", 3), "dropout": settings.get("dropout", 0.1),
        "num_class_embeds": whole.label_dim or None, "downsample_type": "resnet", "upsample_type": "resnet",
        "resnet_time_scale_shift": "scale_shift", "time_embedding_dim": net.map_layer1.out_features,
    }  # fmt: skip
    state = net.state_dict()
    if "map_label.weight" in state:  # of a linear layer on one-hot vectors
        state["map_label.weight"] = state["map_label.weight"].T
    heads = {w // (w // 64) if w >= 64 else 0 for w in at}
    scheduler = EDMEulerScheduler(sigma_data=getattr(whole, "sigma_data", 0.5))
    outer, times = OUTER | {first: "conv_in"}, torch.tensor([-1.5, 0.0, 1.0])
    return Network(net, state, call, times, flags, widths, attention, heads, config, outer, inner, split, scheduler)


def check(network: Network) -> None:
    """Raises NotTheSame for what the walk over the weights does not see."""
    if (kind := network.flags["class"]) != "EDMPrecond":
        raise NotTheSame(f"{kind} scales its network's input and output as no scheduler of diffusers does")
    if (kind := type(network.module).__name__) != "DhariwalUNet":
        raise NotTheSame(
            f"{kind} (--arch=ddpmpp and ncsnpp) divides each block's sum by sqrt(2), projects the skip of its "
            "resampling blocks, has attention in one block of each upper level, and its classes enter before the "
            "time's layers"
        )
    if 0 in network.heads:
        raise NotTheSame("levels with attention that are narrower than 64 channels have none in upstream's code")


def save(unet: Any, network: Network, folder: Path) -> str:
    """Writes the parts, for which diffusers has no pipeline; returns how to sample them, for the card."""
    save_parts(unet, network, folder)
    labels = f", class_labels=torch.arange(16) % {classes}" if (classes := unet.config.num_class_embeds) else ""
    return SAMPLING.replace(", t).sample", f", t{labels}).sample")
