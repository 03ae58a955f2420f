"""guided-diffusion's U-Net for diffusers. It is the same function, but for unequal heads or another first width."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from run import backbones

from .unet import Network, NotTheSame, save_parts

OUTER = {"time_embed.0": "time_embedding.linear_1", "time_embed.2": "time_embedding.linear_2", "label_emb":
         "class_embedding", "input_blocks.0.0": "conv_in", "out.0": "conv_norm_out", "out.2": "conv_out"}  # fmt: skip
INNER = {
    "in_layers.0": "norm1", "in_layers.2": "conv1", "emb_layers.1": "time_emb_proj", "out_layers.0": "norm2",
    "out_layers.3": "conv2", "skip_connection": "conv_shortcut", "norm": "group_norm", "qkv": "qkv",
    "proj_out": "to_out.0", "op": "conv", "conv": "conv",
}  # fmt: skip

SAMPLING = """\
```python
from diffusers import DDPMPipeline, DPMSolverMultistepScheduler

pipeline = DDPMPipeline.from_pretrained("DIR")
pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
images = pipeline(batch_size=16, num_inference_steps=10).images
```"""
WITH_LABELS = '`UNet2DModel.from_pretrained("DIR", subfolder="unet")`; it needs `class_labels`.'


def read(checkpoint: Path, native: list[str], third_party: Path) -> Network:
    """The network of a checkpoint with its weights."""
    from diffusers import DDPMScheduler

    plain = {"use_fp16": False, "use_checkpoint": False}
    flags, net, _ = backbones.get("adm").built(checkpoint, third_party, native, **plain)
    widths = [int(net.model_channels * m) for m in net.channel_mult]
    attention = [2**i in net.attention_resolutions for i in range(len(widths))]
    at = {w for w, attends in zip(widths, attention, strict=True) if attends} | {widths[-1]}
    if net.num_head_channels != -1:
        heads = {net.num_head_channels}
    else:  # None: one head, of whatever width
        heads = {None} if net.num_heads == 1 else {w // net.num_heads for w in at}
    resample = "resnet" if flags["resblock_updown"] else "conv"
    T, linear = flags["diffusion_steps"], flags["noise_schedule"] == "linear"

    def inner(body: str) -> tuple[object, str] | None:
        found = re.fullmatch(r"((?:input_blocks|output_blocks)\.\d+\.\d+|middle_block\.\d+)\.(.+)", body)
        return found and (found[1], INNER[found[2]])

    def split(qkv: Tensor, width: int | None) -> list[Tensor]:
        """q, k and v of a layer whose outputs are ordered by head (by q, k and v with the new order)."""
        width = width or len(qkv) // 3
        first = (3, -1) if flags["use_new_attention_order"] else (-1, 3)
        parts = qkv.reshape(*first, width, *qkv.shape[1:]).unbind(0 if first[0] == 3 else 1)
        return [part.reshape(len(qkv) // 3, *qkv.shape[1:]) for part in parts]

    config = {
        "sample_size": net.image_size, "in_channels": net.in_channels, "out_channels": net.out_channels,
        "layers_per_block": net.num_res_blocks, "dropout": flags["dropout"], "num_class_embeds": net.num_classes,
        "downsample_type": resample, "upsample_type": resample,
        "resnet_time_scale_shift": "scale_shift" if flags["use_scale_shift_norm"] else "default",
    }  # fmt: skip
    scheduler = DDPMScheduler(
        T, 0.1 / T, 20 / T, beta_schedule="linear" if linear else "squaredcos_cap_v2",
        variance_type="learned_range" if flags["learn_sigma"] else "fixed_large",
        prediction_type="sample" if flags["predict_xstart"] else "epsilon",
    )  # fmt: skip
    times = torch.tensor([0, T // 2, T - 1])
    return Network(
        net, net.state_dict(), net, times, flags, widths, attention, heads, config, OUTER, inner, split, scheduler
    )


def check(network: Network) -> None:
    """Raises NotTheSame for what the walk over the weights does not see."""
    net, flags = network.module, network.flags
    if net.channel_mult[0] != 1:
        raise NotTheSame(f"its first level is {net.channel_mult[0]} times as wide as its embedding of t")
    if flags["rescale_timesteps"] and flags["diffusion_steps"] != 1000:
        raise NotTheSame("it is asked at rescaled times, which diffusers' schedulers do not give")
    if net.num_head_channels == -1 and net.num_heads_upsample != net.num_heads:
        raise NotTheSame("it has another number of heads in its upper half")


def save(unet: Any, network: Network, folder: Path) -> str:
    """Writes a pipeline's folder, or without one its parts; returns how to sample them, for the card."""
    from diffusers import DDPMPipeline

    if unet.config.num_class_embeds:
        save_parts(unet, network, folder)
        return WITH_LABELS
    DDPMPipeline(unet, network.scheduler).save_pretrained(folder)
    return SAMPLING
