"""Do samples copy the training images? Nearest neighbours (appendix F.5) and their distances."""

import argparse
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ogdm_core.images import Images, load
from run.evaluate.metrics import nearest_neighbours

from . import style
from .samples import feature_net, load_images, load_method, shared_noise

LEFT_OUT = 10_000  # training images, at most, that are compared with the others


@dataclass(frozen=True)
class Memorisation:
    """Distances to the nearest training image: of samples, and of real images not trained on."""

    samples: Tensor
    real: Tensor
    closer: float  # share of samples nearer to a training image than the nearest 1 % of real ones
    copies: int  # number of samples at distance 0
    p_nearer: float  # chance that a sample is nearer than a real image (a half: no difference)

    @property
    def words(self) -> list[str]:
        """The findings, one sentence each."""
        return [
            f"samples nearer than the nearest 1 % of real images: {100 * self.closer:.1f} %",
            f"exact copies: {self.copies} of {len(self.samples)}",
            f"a sample is nearer than a real image: {100 * self.p_nearer:.1f} % of pairs",
        ]


def memorisation(samples: Tensor, train: Tensor, held_out: Tensor | None) -> Memorisation:
    """From features [N, D]. Without held-out images each training image stands in as one.

    Leave-one-out is fair where training images are independent draws: an image and the others are
    then exactly like a new image and a training set smaller by one.
    """
    near = nearest_neighbours(samples, train)[0][:, 0]
    real = leave_one_out(train) if held_out is None else nearest_neighbours(held_out, train)[0][:, 0]
    ranks = [torch.searchsorted(real.sort().values, near, right=end) for end in (False, True)]
    return Memorisation(
        near, real, float((near < torch.quantile(real, 0.01)).double().mean()),
        int((near == 0).sum()), float(1 - (ranks[0] + ranks[1]).double().mean() / (2 * len(real))),
    )  # fmt: skip


def leave_one_out(train: Tensor, count: int = LEFT_OUT) -> Tensor:
    """Distance of each of train [N, D] to the nearest other; a duplicate is at distance 0.

    Of more than `count` images, that many are drawn, always the same: [min(N, count)].
    """
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:count]
    chosen = chosen.sort().values
    distances, indices = nearest_neighbours(train[chosen], train, k=2)
    own = indices == chosen[:, None]
    # With several duplicates an image may not be in its own list; then all of it is at distance 0.
    return torch.where(own[:, 0], distances[:, 1], distances[:, 0])


def neighbours(args: argparse.Namespace, command: str) -> list[Path]:
    """Prints whether samples are copies; writes neighbours.csv, .png and memorisation.png."""
    features = feature_net(args)
    if args.samples is not None:
        samples = load_images(args.samples)
    else:
        method = load_method(args.method, args.device)
        samples = method.draw(shared_noise([method], args.count, args.seed), args.nfe, args.sampler)
    train = load(args.train)
    phi_samples, phi_train = features(samples), features(train)
    distances, indices = nearest_neighbours(phi_samples, phi_train, args.k)
    held_out = features(load(args.held_out)) if args.held_out else None
    result = memorisation(phi_samples, phi_train, held_out)
    print(*result.words, sep="\n")
    table = [
        {"sample": i, "rank": j + 1, "train_index": int(indices[i, j]), "distance": float(distances[i, j])}
        for i in range(len(distances))
        for j in range(args.k)
    ]
    n = min(args.images, len(samples))
    name = "held-out images" if args.held_out else "training images, leave-one-out"
    return [
        style.write_csv(args.out / "neighbours.csv", table),
        draw_neighbours(samples[:n], train, distances[:n], indices[:n], args.out / "neighbours.png", command),
        draw_memorisation(result, name, args.out / "memorisation.png", command),
    ]


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
        ax.ecdf(distances.numpy(), color=colour, ls=line, label=name)
    limit = float(torch.quantile(result.real, 0.01))
    ax.axvline(limit, color=style.ORANGE, lw=1, ls=":", label="nearest 1 % of real images")
    ax.set(title="distance to the nearest training image", xlabel="distance in feature space",
           ylabel="share of images at most this far", xlim=(0, None), ylim=(0, 1.02))  # fmt: skip
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    words = "\n\n".join(textwrap.fill(line, 34) for line in result.words)
    ax.text(1.03, 0.6, words, transform=ax.transAxes, ha="left", va="top", fontsize=9)
    fig.tight_layout(rect=(0, 0.03, 1, 1))
    return style.save(fig, path, command)
