"""Real images, and below them samples of several methods from the same noise, with every pixel an exact square."""

import argparse
from pathlib import Path

import numpy as np
import torch

from ogdm_core.images import load

from . import style
from .samples import load_method, shared_noise

SIDE, LABEL, LINE = 64, 130, 8  # pixels: of an image at least, of the room for names, between rows


def pairs(args: argparse.Namespace, command: str) -> list[Path]:
    """Writes pairs.png: a row of real images, then for each sampler and NFE a row per method.

    Samples are the first `images` of the noise; real images are spread evenly over the data set.
    """
    methods, real = [load_method(text, args.device) for text in args.method], load(args.real)
    noise = shared_noise(methods, args.images, args.seed)
    spread = torch.linspace(0, len(real) - 1, args.images).round().long()
    rows = [("real", real.pixels(spread))]
    for sampler, nfe in args.cells:
        for method in methods:
            name = f"{style.sampler_name(sampler)}, {nfe}\n{method.name}"
            rows.append((name, method.draw(noise, nfe, sampler)[: args.images]))
    zoom = -(-SIDE // rows[0][1].shape[2])
    tiles = [np.kron(style.tile(x.expand(-1, 3, -1, -1), args.images), np.ones((zoom, zoom, 1))) for _, x in rows]
    step = max(tile.shape[0] for tile in tiles) + LINE
    width, height, dpi = LABEL + max(tile.shape[1] for tile in tiles), step * len(tiles) + 2 * LINE, 130
    fig = style.plt.figure(figsize=(width / dpi, height / dpi), dpi=dpi)
    for i, ((name, _), tile) in enumerate(zip(rows, tiles, strict=True)):
        top = height - i * step
        fig.figimage(tile, LABEL, top - tile.shape[0], origin="upper")
        colour = style.method_colour(name.split("\n")[-1]) if i else style.BLACK
        fig.text(0.01, (top - tile.shape[0] / 2) / height, name, fontsize=6, va="center", color=colour)
    return [style.save(fig, args.out / "pairs.png", command)]
