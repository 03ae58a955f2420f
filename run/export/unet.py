"""From an upstream's U-Net to diffusers' UNet2DModel, where both are the same function.

Both are walked in the order in which they are executed: residual blocks, attention, down- and upsampling. A part of
upstream's network that UNet2DModel does not have raises `NotTheSame` with its name.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PLAIN = {"conv": ("DownBlock2D", "UpBlock2D"), "resnet": ("ResnetDownsampleBlock2D", "ResnetUpsampleBlock2D")}


class NotTheSame(Exception):
    """What of an upstream's network diffusers' UNet2DModel does not have."""


@dataclass
class Network:
    """An upstream's network, and how it is told to diffusers.

    module      upstream's, with its weights
    state       the same weights; class embeddings as [classes, channels]
    call        its outputs at (x [N, C, H, W], times [N], classes [N] or None)
    times       some times [N] that it is asked at
    flags       what it was built with, for model.json
    widths      channels of each level
    attention   whether each level has attention
    heads       channels per head of every attention
    config      further arguments of UNet2DModel
    outer       its layers outside of the blocks -> diffusers' names
    inner       the name of a layer in a block -> (the block, diffusers' name there), or None
    split_qkv   (weights of q, k and v in one layer, channels per head) -> those of each
    scheduler   diffusers' scheduler for it
    """

    module: torch.nn.Module
    state: dict[str, Tensor]
    call: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    times: Tensor
    flags: dict[str, Any]
    widths: list[int]
    attention: list[bool]
    heads: Iterable[int]
    config: dict[str, Any]
    outer: dict[str, str]
    inner: Callable[[str], tuple[object, str] | None]
    split_qkv: Callable[[Tensor, Any], Iterable[Tensor]]
    scheduler: Any


def blocks(layers: int, attention: list[bool]) -> Iterator[str]:
    """Names of UNet2DModel's blocks in the order of their execution."""
    for way, levels, count in (("down", attention, layers), ("up", attention[::-1], layers + 1)):
        for i, attends in enumerate(levels):
            for j in range(count):
                yield f"{way}_blocks.{i}.resnets.{j}"
                if attends:
                    yield f"{way}_blocks.{i}.attentions.{j}"
            if i < len(levels) - 1:
                yield f"{way}_blocks.{i}.{way}samplers.0"
        if way == "down":
            yield from ("mid_block.resnets.0", "mid_block.attentions.0", "mid_block.resnets.1")


def convert(network: Network) -> torch.nn.Module:
    """The same function as a UNet2DModel; raises NotTheSame, also where outputs differ."""
    from diffusers import UNet2DModel

    norms = [m for m in network.module.modules() if hasattr(m, "num_groups")]
    if len(groups := {norm.num_groups for norm in norms}) > 1:
        raise NotTheSame(f"its normalisations have {sorted(groups)} groups, UNet2DModel's all have the same number")
    if len(heads := set(network.heads)) > 1:
        raise NotTheSame(f"its attentions have {sorted(heads)} channels per head, UNet2DModel's have one number")
    width, state = heads.pop(), network.state
    found = {body: network.inner(body) for body in dict.fromkeys(name.rpartition(".")[0] for name in state)}
    theirs = list(blocks(network.config["layers_per_block"], network.attention))
    ours = list(dict.fromkeys(pair[0] for pair in found.values() if pair))
    if len(ours) != len(theirs):
        raise NotTheSame(f"it has {len(ours)} residual, attention and resampling blocks, UNet2DModel has {len(theirs)}")
    where, converted = dict(zip(ours, theirs, strict=True)), {}
    for name, value in state.items():
        body, _, leaf = name.rpartition(".")
        if body in network.outer:
            converted[f"{network.outer[body]}.{leaf}"] = value
        elif (pair := found[body]) and leaf in ("weight", "bias"):
            block, layer = where[pair[0]], pair[1]
            value = value.flatten(1) if "attentions" in block and value.ndim > 1 else value
            if layer == "qkv":
                for part, v in zip("qkv", network.split_qkv(value, width), strict=True):
                    converted[f"{block}.to_{part}.{leaf}"] = v.contiguous()
            else:
                converted[f"{block}.{layer}.{leaf}"] = value
    down, up = PLAIN[network.config["downsample_type"]]
    unet = UNet2DModel(
        block_out_channels=tuple(network.widths),
        down_block_types=tuple("AttnDownBlock2D" if attends else down for attends in network.attention),
        up_block_types=tuple("AttnUpBlock2D" if attends else up for attends in reversed(network.attention)),
        attention_head_dim=width, norm_num_groups=groups.pop(), attn_norm_num_groups=norms[0].num_groups,
        norm_eps=norms[0].eps, **network.config,
    ).eval()  # fmt: skip
    try:
        unet.load_state_dict(converted)
    except RuntimeError as error:
        raise NotTheSame(f"the weights do not fit UNet2DModel's: {error}") from None
    compare(network, unet)
    return unet


@torch.no_grad()
def compare(network: Network, unet: Any) -> None:
    """Raises NotTheSame where the two networks' outputs differ by more than rounding."""
    c, rng = unet.config, torch.Generator().manual_seed(0)
    x = torch.randn((len(network.times), c.in_channels, c.sample_size, c.sample_size), generator=rng)
    label = torch.arange(len(x)) % c.num_class_embeds if c.num_class_embeds else None
    theirs = network.call(x, network.times, label)
    difference = float((theirs - unet(x, network.times, class_labels=label).sample).abs().max())
    if not difference <= 1e-3 * float(theirs.abs().max()):
        raise NotTheSame(f"its outputs differ from UNet2DModel's by {difference:g}")


def save_parts(unet: Any, network: Network, folder: Path) -> None:
    """Writes unet/ and scheduler/, as diffusers lays out a model."""
    unet.save_pretrained(folder / "unet")
    network.scheduler.save_pretrained(folder / "scheduler")
