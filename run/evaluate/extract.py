"""From images to features and their statistics: streamed, resumable, cached by content.

While it runs, the features of every CHUNK images are kept in a folder of the cache; a run that was
stopped goes on behind the last of them. A finished set leaves one file, whose name is a hash of
the images' content and of the net.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .lock import alone
from .metrics import RunningStatistics
from .nets import Net
from .sources import Source, Statistics

CHUNK = 2_048
FORMAT = 1  # of the cached files
Progress = Callable[[int], None]


@dataclass(frozen=True)
class FeatureSet:
    """What is left of a source's images.

    features    [M, D] float32: of all images or of those drawn, for precision and recall
    statistics  of all images
    """

    count: int
    features: Tensor
    statistics: Statistics


def features_of(
    source: Source, net: Net, *, keep: int, seed: int = 0, batch: int = 64, device: str = "cpu",
    cache: Path | None = None, stay: bool = True, progress: Progress = lambda images: None,
) -> FeatureSet:  # fmt: skip
    """Features and statistics of a source's images, from the cache where they are in it.

    keep      at most this many images' features are kept, drawn with `seed`
    stay      whether the finished set stays in the cache; without, only an unfinished one does
    progress  is told how many images are done
    """
    if source.count < 2:
        raise ValueError(f"{source.path} has {source.count} image; FID needs at least 2")
    if cache is None:
        return _collect(source, net, keep, seed, batch, device, None, progress)
    what = [FORMAT, source.digest(), net.key, keep, seed, CHUNK]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]
    file, parts = cache / f"{key}.npz", cache / f"{key}.parts"
    # Evaluations of several models at once often share the reference: one computes, all read.
    with alone(cache / f"{key}.lock", f"computing the features of {source.path}"):
        if file.is_file():
            progress(source.count)
            return _read(file)
        parts.mkdir(parents=True, exist_ok=True)
        found = _collect(source, net, keep, seed, batch, device, parts, progress)
        if stay:
            _write(file, found, net.name)
        shutil.rmtree(parts, ignore_errors=True)
    return found


def _collect(
    source: Source, net: Net, keep: int, seed: int, batch: int, device: str, parts: Path | None,
    progress: Progress,
) -> FeatureSet:  # fmt: skip
    """Runs over the images chunk by chunk."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(source.count, generator=generator)[:keep].sort().values
    pooled, spatial, kept = RunningStatistics(), RunningStatistics(), []
    for start in range(0, source.count, CHUNK):
        stop = min(start + CHUNK, source.count)
        file = None if parts is None else parts / f"{start:08d}.npz"
        if file is not None and file.is_file():
            with np.load(file, allow_pickle=False) as archive:
                x, s = archive["features"], archive["spatial"]
        else:
            x, s = _chunk(source, net, start, stop, batch, device, progress)
            if file is not None:
                _save(file, features=x, spatial=s)
        pooled.add(x)
        if s.size:
            spatial.add(s)
        here = chosen[(chosen >= start) & (chosen < stop)] - start
        kept.append(torch.from_numpy(x)[here])
        progress(stop)
    mu, sigma = (t.numpy() for t in pooled.result())
    more = [t.numpy() for t in spatial.result()] if spatial.count else [None, None]
    statistics = Statistics(mu, sigma, *more, features=net.name, images=source.count)
    return FeatureSet(source.count, torch.cat(kept), statistics)


def _chunk(
    source: Source, net: Net, start: int, stop: int, batch: int, device: str, progress: Progress
) -> tuple[np.ndarray, np.ndarray]:
    """Features [n, D] and spatial features [n, D_s] (D_s = 0 where the net has none)."""
    features, spatial, done = [], [], start
    for images in source.batches(batch, start, stop):
        pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).to(device)
        with torch.no_grad():
            got = net.call(pixels)
        x, s = got if isinstance(got, tuple) else (got, None)
        features.append(_checked(x, len(images), done, source, net, "features"))
        if s is not None:
            spatial.append(_checked(s, len(images), done, source, net, "spatial features"))
        done += len(images)
        progress(done)
    x = np.concatenate(features)
    return x, np.concatenate(spatial) if spatial else np.zeros((len(x), 0), np.float32)


def _checked(x: Tensor, n: int, first: int, source: Source, net: Net, what: str) -> np.ndarray:
    """float32 [n, D] on the CPU, or an error that names the image."""
    if not isinstance(x, Tensor) or x.ndim != 2 or len(x) != n:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{net.name} gave {what} {got} for {n} images; it must give [{n}, D]")
    x = x.detach().float().cpu()
    bad = (~x.isfinite()).any(1)
    if bool(bad.any()):
        raise ValueError(
            f"{source.path}: the {what} of image {first + int(bad.nonzero()[0])} hold NaN or "
            f"infinity. Look at that image; if it is a picture, {net.name} has overflowed."
        )
    return x.numpy()


def save_statistics(file: Path, statistics: Statistics) -> None:
    """Writes what `Npz` reads back: mu, sigma, perhaps mu_s, sigma_s, and whose they are."""
    arrays = {"mu": statistics.mu, "sigma": statistics.sigma}
    if statistics.mu_s is not None:
        arrays |= {"mu_s": statistics.mu_s, "sigma_s": statistics.sigma_s}
    _save(file, **arrays, features=statistics.features, images=statistics.images)


def _write(file: Path, found: FeatureSet, name: str) -> None:
    s = found.statistics
    spatial = {} if s.mu_s is None else {"mu_s": s.mu_s, "sigma_s": s.sigma_s}
    _save(file, kept=found.features.numpy(), count=found.count, mu=s.mu, sigma=s.sigma, name=name,
          made=time.strftime("%Y-%m-%d"), **spatial)  # fmt: skip


def _read(file: Path) -> FeatureSet:
    with np.load(file, allow_pickle=False) as a:
        spatial = [a.get(name) for name in ("mu_s", "sigma_s")]
        count = int(a["count"])
        statistics = Statistics(
            a["mu"], a["sigma"], *spatial, features=str(a["name"]), images=count
        )
        return FeatureSet(count, torch.from_numpy(a["kept"]), statistics)


def _save(file: Path, **arrays) -> None:
    """np.savez, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}.part")
    with partial.open("wb") as out:
        np.savez(out, **arrays)
    os.replace(partial, file)
