"""Do samples copy the training images? Nearest neighbours (appendix F.5) and their distances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ogdm_core.trainer.images import Images
from run.evaluate import metrics

from . import style

LEFT_OUT = 10_000  # training images, at most, that are compared with the others


@dataclass(frozen=True)
class Memorisation:
    """Distances to the nearest training image: of samples, and of real images not trained on.

    closer      share of samples nearer to a training image than the nearest 1 % of real ones
    copies      number of samples at distance 0
    p_nearer    chance that a sample is nearer than a real image (a half: no difference)
    """

    samples: Tensor
    real: Tensor
    closer: float
    copies: int
    p_nearer: float


def memorisation(samples: Tensor, train: Tensor, held_out: Tensor | None) -> Memorisation:
    """From features [N, D]. Without held-out images each training image stands in as one.

    Leave-one-out is fair where training images are independent draws: an image and the others are
    then exactly like a new image and a training set smaller by one.
    """
    near = nearest_distance(samples, train)
    real = leave_one_out(train) if held_out is None else nearest_distance(held_out, train)
    threshold = torch.quantile(real, 0.01)
    below = torch.searchsorted(real.sort().values, near)  # real images strictly nearer
    above = len(real) - torch.searchsorted(real.sort().values, near, right=True)
    p_nearer = (above + (len(real) - above - below) / 2).double().mean() / len(real)
    return Memorisation(
        near, real, float((near < threshold).double().mean()), int((near == 0).sum()),
        float(p_nearer),
    )  # fmt: skip


def nearest_distance(queries: Tensor, train: Tensor) -> Tensor:
    """Distance [M] of each of queries [M, D] to the nearest of train [N, D]."""
    return metrics.nearest_neighbours(queries, train)[0][:, 0]


def leave_one_out(train: Tensor, count: int = LEFT_OUT) -> Tensor:
    """Distance of each of train [N, D] to the nearest other; a duplicate is at distance 0.

    Of more than `count` images, that many are drawn, always the same: [min(N, count)].
    """
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:count]
    chosen = chosen.sort().values
    distances, indices = metrics.nearest_neighbours(train[chosen], train, k=2)
    own = indices == chosen[:, None]
    # With several duplicates an image may not be in its own list; then all of it is at distance 0.
    return torch.where(own[:, 0], distances[:, 1], distances[:, 0])


def draw_neighbours(
    samples: Tensor, train: Images, distances: Tensor, indices: Tensor, path: Path, command: str
) -> Path:
    """Samples [N, C, H, W] on top, under each its nearest training images with their distances."""
    count, k = distances.shape
    fig = style.plt.figure(figsize=(0.95 * count + 0.8, 1.18 * (k + 1) + 0.2))
    cells = [samples.split(1), *(train.pixels(indices[:, row]).split(1) for row in range(k))]
    axes = style.grid(fig, cells, 1)
    for ax in axes[0]:
        ax.spines[:].set(visible=True, color=style.BLUE, linewidth=2)
    axes[0, 0].set_ylabel("sample", fontsize=8, color=style.BLUE)
    for row, line in enumerate(axes[1:]):
        line[0].set_ylabel(f"nearest {row + 1}", fontsize=8)
        for ax, distance in zip(line, distances[:, row].tolist(), strict=True):
            ax.set_xlabel(f"{distance:.3g}", fontsize=7, labelpad=2)
    fig.tight_layout(rect=(0, 0.02, 1, 1), h_pad=0.3, w_pad=0.3)
    return style.save(fig, path, command)


def draw_memorisation(result: Memorisation, real_name: str, path: Path, command: str) -> Path:
    """Cumulative distributions of nearest distances: copying pushes the samples' to the left."""
    fig, ax = style.figure(size=(7.6, 3.4))
    for distances, colour, line, name in (
        (result.real, style.GREY, "--", f"{real_name} ({len(result.real)})"),
        (result.samples, style.BLUE, "-", f"samples ({len(result.samples)})"),
    ):
        x = np.sort(distances.numpy())
        ax.plot(x, np.arange(1, len(x) + 1) / len(x), color=colour, ls=line, label=name,
                drawstyle="steps-post")  # fmt: skip
    ax.axvline(float(torch.quantile(result.real, 0.01)), color=style.ORANGE, lw=1, ls=":")
    ax.set(title="distance to the nearest training image", xlabel="distance in feature space",
           ylabel="share of images at most this far", xlim=(0, None), ylim=(0, 1.02))  # fmt: skip
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    ax.text(
        1.03, 0.6,
        f"nearer than the nearest 1 % of\nreal images (dotted line):\n"
        f"{100 * result.closer:.1f} % of samples\n\nexact copies: {result.copies}\n\n"
        f"a sample is nearer than a real\nimage in {100 * result.p_nearer:.0f} % of pairs",
        transform=ax.transAxes, ha="left", va="top", fontsize=9,
    )  # fmt: skip
    fig.tight_layout(rect=(0, 0.03, 1, 1))
    return style.save(fig, path, command)


def table(distances: Tensor, indices: Tensor) -> Sequence[dict]:
    """One dict per sample and neighbour, for csv."""
    return [
        {"sample": i, "rank": j + 1, "train_index": int(indices[i, j]),
         "distance": float(distances[i, j])}
        for i in range(len(distances)) for j in range(distances.shape[1])
    ]  # fmt: skip
