"""Trains a guide between diffused data and diffused samples of one model."""

import copy
import math
import sys

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from tqdm import trange

from ogdm_core.cli import bar_interval
from ogdm_core.guidance import Guide
from ogdm_core.images import Images, batch_index, load
from ogdm_core.random import generator_of

HELD = 10  # one image in ten is held out
CHECKS = 20  # how often the loss on held-out images is measured


def load_samples(name: str, channels: int, size: int | None = None) -> Images:
    """Samples in an npz or a folder; grey ones are made grey again, since npz files hold RGB."""
    samples = load(name, size)
    if (channels, samples.channels) != (1, 3):
        return samples
    grey = samples.pixels(torch.arange(len(samples)))[:, :1]
    return Images(grey.numpy(), None if samples.labels is None else samples.labels.numpy())


def train_guide(
    real: Images, fake: Images, *, steps: int = 2000, batch: int = 128, lr: float = 1e-3,
    kind: str = "light", width: float = 1.0, labels: int = 0, flip: bool = False, seed: int = 0,
    device: str = "cpu",
) -> tuple[Guide, float]:  # fmt: skip
    """The guide with the least cross-entropy on held-out images, and that cross-entropy.

    Every step takes `batch` images of each kind, at noise levels that are uniform in Karras time.
    A guide that knows nothing has log 2 = 0.693; one that cannot be told from it gives no guidance.
    """
    if (real.channels, real.size) != (fake.channels, fake.size):
        raise ValueError(
            f"the data has {real.channels} channels at {real.size}x{real.size}, the samples have "
            f"{fake.channels} at {fake.size}x{fake.size}"
        )
    if labels and (real.labels is None or fake.labels is None):
        raise ValueError("a guide with labels needs data and samples with labels")
    if min(len(real), len(fake)) < HELD:
        raise ValueError(f"{len(real)} images and {len(fake)} samples are too few to hold some out")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        guide = Guide(real.channels, real.size, labels, width, kind).to(device)
    optimizer = torch.optim.Adam(guide.parameters(), lr=lr, betas=(0.9, 0.99))
    shuffled = [torch.randperm(len(s), generator=generator_of(seed, "held out"))
                for s in (real, fake)]  # fmt: skip
    held = [order[: len(order) // HELD] for order in shuffled]
    train = [order[len(order) // HELD :] for order in shuffled]

    def loss(index: list[Tensor], generator: torch.Generator) -> Tensor:
        """Mean of the two kinds' cross-entropies, at the images of `index`."""
        total = 0.0
        for images, chosen, target in zip((real, fake), index, (1.0, 0.0), strict=True):
            x_0 = images.batch(chosen)
            if flip:
                mirrored = torch.rand(len(x_0), generator=generator) < 0.5
                x_0 = torch.where(mirrored[:, None, None, None], x_0.flip(3), x_0)
            sigma = guide.levels.from_unit_time(torch.rand(len(x_0), generator=generator))
            y = guide.levels.diffuse(x_0, torch.randn(x_0.shape, generator=generator), sigma)
            label = images.labels[chosen].to(device) if labels else None
            logit = guide(y.to(device), sigma.to(device), label)
            total += cross_entropy(logit, torch.full_like(logit, target)) / 2
        return total

    @torch.no_grad()
    def held_out() -> float:
        """The same on held-out images, with the same noise every time."""
        generator = generator_of(seed, "held-out noise")
        repeated = [index.repeat(math.ceil(2000 / len(index)))[:2000] for index in held]
        return float(loss(repeated, generator))

    best, least, every = guide.state_dict(), math.inf, -(-steps // CHECKS)
    progress = trange(1, steps + 1, desc="guide", unit="step", mininterval=bar_interval())
    for step in progress:
        index = [order[batch_index(len(order), batch, step, seed)] for order in train]
        value = loss(index, generator_of(seed, step))
        optimizer.zero_grad()
        value.backward()
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - (step - 1) / steps)
        optimizer.step()
        if step % every == 0 or step == steps:
            now = held_out()
            if now < least:
                best, least = copy.deepcopy(guide.state_dict()), now
            words = f"loss {value.item():.3f}, held out {now:.4f}, least so far {least:.4f}"
            progress.write(f"guide: step {step}/{steps}, {words}", file=sys.stderr)
    guide.load_state_dict(best)
    return guide.eval().requires_grad_(False), least
