"""From images to features and their statistics, in chunks that are kept in a cache.

A chunk is a file with the features of CHUNK images, in a folder that is named by a hash of the
images' content and of the net. A stopped run goes on behind the last chunk, and a later run reads
all chunks.
"""

import hashlib
import json
import shutil
import zipfile
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ogdm_core.cli import bar_interval
from ogdm_core.files import atomic_write
from ogdm_core.lock import exclusive

from .features import Features
from .metrics import RunningStatistics
from .sources import Source, Statistics

CHUNK = 2_048
FORMAT = 2  # of the cached files


def features_of(
    source: Source, net: Features, *, keep: int, seed: int = 0, batch: int = 64, cache: Path | None = None,
    stay: bool = True,
) -> tuple[Tensor, Statistics]:  # fmt: skip
    """Features [M, D] of at most `keep` images, drawn with `seed`, and the statistics of all.

    `stay` says whether the chunks stay in the cache when all are there; unfinished work always does.
    """
    folder, held = None, nullcontext()
    if cache:
        key = json.dumps([FORMAT, source.digest(), net.key, CHUNK])
        folder = cache / hashlib.sha256(key.encode()).hexdigest()[:32]
        folder.mkdir(parents=True, exist_ok=True)
        # Evaluations of several models at once often share the reference: one computes, all read.
        held = exclusive(folder.with_suffix(".lock"), f"computing the features of {source.path}")
    chosen = torch.randperm(source.count, generator=torch.Generator().manual_seed(seed))[:keep]
    summary = folder / "statistics.npz" if folder and stay else None
    saved = _read(summary, None, "mu", "sigma")
    running, kept = RunningStatistics(), []
    with held, tqdm(total=source.count, desc=source.path.name, unit=" images", mininterval=bar_interval()) as progress:
        for index in torch.arange(source.count).split(CHUNK):
            file = folder / f"{int(index[0]):08d}.npz" if folder else None
            (x,) = _read(file, len(index), "features") or (None,)
            if x is None:
                x = torch.cat([_compute(source, net, some, progress) for some in index.split(batch)])
                if file:
                    with atomic_write(file) as out:
                        np.savez(out, features=x.numpy())
            progress.update(int(index[-1]) + 1 - progress.n)
            if not saved:
                running.add(x)
            kept.append(x[torch.isin(index, chosen)])
        mu, sigma = (t.numpy() for t in saved or running.result())
        if summary and not saved:
            with atomic_write(summary) as out:
                np.savez(out, mu=mu, sigma=sigma)
        if folder and not stay:
            shutil.rmtree(folder)
    return torch.cat(kept), Statistics(mu, sigma, net.name, source.count)


def _read(file: Path | None, count: int | None, *names: str) -> list[Tensor] | None:
    """The arrays of a cached file, the first one [count, ...]; None if it is absent or damaged."""
    if file and file.exists():
        with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            with np.load(file, allow_pickle=False) as archive:
                arrays = [torch.from_numpy(archive[name]) for name in names]
            return arrays if count in (None, len(arrays[0])) else None
    return None


def _compute(source: Source, net: Features, index: Tensor, progress: tqdm) -> Tensor:
    """The features [n, D] of the images at `index` [n]."""
    x = net(source.images.pixels(index))
    bad = (~x.isfinite()).any(1)
    if bool(bad.any()):
        raise ValueError(
            f"{source.path}: the features of image {int(index[bad][0])} hold NaN or infinity. Look at that image; "
            f"if it is a picture, {net.name} has overflowed."
        )
    progress.update(len(index))
    return x
