"""FID, sFID, precision and recall in torch, with the definitions of ADM's evaluator."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import metrics, nets
from .extract import FeatureSet, features_of, save_statistics
from .sources import Source, Statistics

NEIGHBOURS = 3


@dataclass(frozen=True)
class Settings:
    """How to evaluate; the fields are the command line's flags."""

    weights: Path | None = None
    features: str | None = None
    batch: int = 64
    device: str = "cpu"
    cache: Path | None = None
    pr_images: int = 50_000
    seed: int = 0
    save_statistics: Path | None = None


@dataclass
class Scores:
    """The numbers; None is what the inputs do not allow, and `notes` says why."""

    fid: float
    sfid: float | None
    precision: float | None
    recall: float | None
    reference_images: int | None
    sample_images: int | None
    precision_recall_images: tuple[int, int] | None
    features: str
    notes: list[str] = field(default_factory=list)


def check(reference: Source, samples: Source, settings: Settings) -> None:
    """Raises ValueError for whatever can be known to be wrong before anything is computed."""
    if settings.save_statistics and not reference.count:
        raise ValueError(
            f"--save-statistics needs a reference of images, and {reference.path} is statistics "
            "already: leave the flag out"
        )
    if reference.count or samples.count:
        nets.check(settings.weights, settings.features)
    if reference.count and samples.count and reference.size != samples.size:
        sizes = [f"{w}x{h}" for h, w in (reference.size, samples.size)]
        raise ValueError(
            f"{reference.path} has images of {sizes[0]}, {samples.path} of {sizes[1]}: give a "
            "reference at the samples' size"
        )
    for source in (reference, samples):
        if 0 < source.count <= NEIGHBOURS:
            raise ValueError(
                f"{source.path} has {source.count} images; precision and recall look at "
                f"{NEIGHBOURS} neighbours of each image, so give {NEIGHBOURS + 1} at least, and "
                "50,000 for numbers beside published ones"
            )
    if settings.batch < 1 or settings.pr_images <= NEIGHBOURS:
        raise ValueError(f"--batch must be at least 1, --pr-images at least {NEIGHBOURS + 1}")
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {settings.device}: no CUDA here; use --device cpu")


def evaluate(reference: Source, samples: Source, settings: Settings, progress) -> Scores:
    """Compares samples with a reference. `progress(what, images)` follows the feature net."""
    check(reference, samples, settings)
    net = None
    if reference.count or samples.count:
        net = nets.load(settings.weights, settings.features, settings.device, settings.cache)

    def extract(source: Source, what: str, stay: bool) -> FeatureSet | None:
        if not source.count:
            return None
        return features_of(
            source, net, keep=settings.pr_images, seed=settings.seed, batch=settings.batch,
            device=settings.device, cache=settings.cache, stay=stay,
            progress=lambda images: progress(what, images),
        )  # fmt: skip

    real, fake = extract(reference, "reference", True), extract(samples, "samples", False)
    notes = list(net.notes) if net else []
    if settings.save_statistics:
        save_statistics(settings.save_statistics, real.statistics)
    a = _statistics(reference, real, net, notes)
    b = _statistics(samples, fake, net, notes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", metrics.SingularCovarianceWarning)
        fid = metrics.frechet_distance(a.mu, a.sigma, b.mu, b.sigma)
        notes += [f"FID: {warning.message}" for warning in caught]
    sfid = None
    if a.mu_s is not None and b.mu_s is not None:
        with warnings.catch_warnings():
            # Thousands of neighbouring pixels: spatial covariances are nearly always singular.
            warnings.simplefilter("ignore", metrics.SingularCovarianceWarning)
            sfid = metrics.frechet_distance(a.mu_s, a.sigma_s, b.mu_s, b.sigma_s)
    else:
        notes.append("no sFID: it needs spatial features of both sets")
    precision = recall = images = None
    if real and fake:
        images = (len(real.features), len(fake.features))
        where = settings.device
        precision, recall = metrics.precision_recall(
            real.features.to(where), fake.features.to(where), NEIGHBOURS
        )
    else:
        notes.append("no precision and recall: they need the images of both sets, not statistics")
    return Scores(
        fid, sfid, precision, recall, a.images, b.images, images,
        net.name if net else a.features or b.features or "saved statistics", notes,
    )  # fmt: skip


def _statistics(source: Source, found: FeatureSet | None, net, notes: list[str]) -> Statistics:
    """Saved statistics where they are Inception's or all there is, as ADM's evaluator does."""
    saved = source.statistics
    if saved is None:
        return found.statistics
    label = saved.features or nets.INCEPTION
    if found is None:
        if net is not None and label != net.name:
            raise ValueError(
                f"the statistics in {source.path} are of {label}, not of {net.name}: give the "
                "images, or statistics of the same net (--save-statistics writes them)"
            )
        return saved
    if net.name != label:
        return found.statistics
    notes.append(f"FID uses the statistics that {source.path.name} brings, not its images'")
    images = saved.images
    return Statistics(saved.mu, saved.sigma, saved.mu_s, saved.sigma_s, saved.features, images)
