"""From images to features and their statistics, in chunks that are kept in a cache.

A chunk is a file with the features of CHUNK images, in a folder that is named by a hash of the
images' content and of the net. A stopped run goes on behind the last chunk, and a later one reads
them all.
"""

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ogdm_core.files import atomic_write
from run.lock import exclusive

from .features import Features
from .metrics import RunningStatistics
from .sources import Source, Statistics

CHUNK = 2_048
FORMAT = 2  # of the cached files
Progress = Callable[[int], None]


def features_of(
    source: Source, net: Features, *, keep: int, seed: int = 0, batch: int = 64,
    cache: Path | None = None, stay: bool = True, progress: Progress = lambda images: None,
) -> tuple[Tensor, Statistics]:  # fmt: skip
    """Features [M, D] of at most `keep` images, drawn with `seed`, and the statistics of all.

    stay       whether the chunks stay in the cache when all are there; unfinished work always does
    progress   is called with the number of images that are done
    """
    folder, held = None, nullcontext()
    if cache:
        key = json.dumps([FORMAT, source.digest(), net.key, CHUNK])
        folder = cache / hashlib.sha256(key.encode()).hexdigest()[:32]
        folder.mkdir(parents=True, exist_ok=True)
        # Evaluations of several models at once often share the reference: one computes, all read.
        held = exclusive(folder.with_suffix(".lock"), f"computing the features of {source.path}")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(source.count, generator=generator)[:keep].sort().values
    running, kept = RunningStatistics(), []
    with held:
        for index in torch.arange(source.count).split(CHUNK):
            x = _chunk(source, net, index, batch, folder, progress)
            running.add(x)
            kept.append(x[torch.isin(index, chosen)])
        if folder and not stay:
            shutil.rmtree(folder)
    mu, sigma = (t.numpy() for t in running.result())
    return torch.cat(kept), Statistics(mu, sigma, net.name, source.count)


def _chunk(
    source: Source, net: Features, index: Tensor, batch: int, folder: Path | None,
    progress: Progress,
) -> Tensor:  # fmt: skip
    """Features [n, D] of the images at `index` [n], from the cache unless absent or damaged."""
    file = folder / f"{int(index[0]):08d}.npz" if folder else None
    if file and file.exists():
        with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            with np.load(file, allow_pickle=False) as archive:
                x = torch.from_numpy(archive["features"])
            if len(x) == len(index):
                progress(int(index[-1]) + 1)
                return x
    parts = []
    for some in index.split(batch):
        parts.append(net(source.images.pixels(some)))
        bad = (~parts[-1].isfinite()).any(1)
        if bool(bad.any()):
            raise ValueError(
                f"{source.path}: the features of image {int(some[bad][0])} hold NaN or infinity. "
                f"Look at that image; if it is a picture, {net.name} has overflowed."
            )
        progress(int(some[-1]) + 1)
    x = torch.cat(parts)
    if file:
        with atomic_write(file) as out:
            np.savez(out, features=x.numpy())
    return x
