"""FID, precision and recall in torch, with the definitions of ADM's evaluator."""

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ogdm_core.random import generator_of

from . import metrics
from .classifier import load_classifier
from .extract import features_of
from .features import INCEPTION, OTHER_NET, Features, check_features, load_features
from .sources import Source, Statistics
from .spectrum import bands

NEIGHBOURS = 3


def check(reference: Source, samples: Source, args: argparse.Namespace) -> None:
    """Raises ValueError for whatever can be known to be wrong before anything is computed."""
    if args.save_statistics and not reference.count:
        raise ValueError(
            f"--save-statistics needs a reference of images, and {reference.path} is statistics already: "
            "leave the flag out"
        )
    if reference.count or samples.count:
        for net in _nets(args):
            check_features(net, args.weights)
            if reference.count and net and net.endswith(".pt"):
                _check_classifier(Path(net), reference)
    if args.save_statistics and len(_nets(args)) > 1:
        raise ValueError(f"--save-statistics is for one net; leave all but one out of --features {args.features}")
    if args.floor and not 0 < samples.count <= min(reference.count // 2, args.pr_images):
        raise ValueError(
            f"--floor compares {samples.count} images of the reference, as many as there are samples, with the others; "
            f"{reference.path} has {reference.count}, and --pr-images keeps {args.pr_images}: give fewer samples, or "
            "leave --floor out"
        )
    if reference.count and samples.count:
        sizes = [f"{s.images.shape[2]}x{s.images.shape[1]}" for s in (reference, samples)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{reference.path} has images of {sizes[0]}, {samples.path} of {sizes[1]}: give a reference at "
                "the samples' size; run/prepare_data.sh folder brings pictures of any size to one"
            )
    for source in (reference, samples):
        if 0 < source.count <= NEIGHBOURS:
            raise ValueError(
                f"{source.path} has {source.count} images; precision and recall look at {NEIGHBOURS} neighbours of "
                f"each image, so give {NEIGHBOURS + 1} at least, and 50,000 for numbers beside published ones"
            )
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"--device {args.device}: {why}; use --device cpu") from error


def _check_classifier(path: Path, reference: Source) -> None:
    """Raises ValueError for a classifier of images of another size, or of grey ones for a reference in colours.

    Samples may have colours: networks of three channels learn grey images nearly.
    """
    net, (height, width) = load_classifier(path)[0], reference.images.shape[1:]
    if net.size and (height, width) != (net.size, net.size):
        sizes = f"images of {net.size}x{net.size}, {reference.path} has {width}x{height}"
        raise ValueError(f"{path.name} was made for {sizes}; {OTHER_NET}")
    pixels = reference.images.pixels(torch.arange(min(64, reference.count)))
    if net.body[0].in_channels == 1 and not torch.equal(pixels[:, :1].expand_as(pixels), pixels):
        raise ValueError(f"{path.name} was made for grey images, {reference.path} has colours; {OTHER_NET}")


def evaluate(reference: Source, samples: Source, args: argparse.Namespace) -> dict[str, Any]:
    """The numbers, in the features of the first net; those of further nets under `also`. None is what the inputs do
    not allow, and `notes` says why."""
    found, *also = [in_features_of(net, reference, samples, args) for net in _nets(args)]
    if also:
        found["also"] = also
    if reference.images and samples.images:
        found["spectrum"] = (bands(samples.images) / bands(reference.images)).tolist()
    return found


def _nets(args: argparse.Namespace) -> list[str | None]:
    """The nets that --features names; None is Inception."""
    return args.features.split(",") if args.features else [None]


def key(args: argparse.Namespace) -> list[str]:
    """Changes when a net's features may."""
    cache = None if args.no_cache else args.cache
    return [load_features(net, args.weights, "cpu", cache).key for net in _nets(args)]


def in_features_of(
    spec: str | Features | None, reference: Source, samples: Source, args: argparse.Namespace, keep: bool = False
) -> dict[str, Any]:
    """The numbers in the features of one net, by its name or as it was loaded.

    `keep` leaves the features of the samples in the cache, too.
    """
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    cache = None if args.no_cache else args.cache
    sources = [reference, samples]
    net = spec if isinstance(spec, Features) else None
    if net is None and any(s.count for s in sources):
        net = load_features(spec, args.weights, device, cache)
    options = {"keep": args.pr_images, "seed": args.seed, "batch": args.batch, "cache": cache}
    real, fake = (features_of(s, net, **options, stay=keep or s is reference) if s.count else None for s in sources)
    notes = list(net.notes) if net else []
    if real and args.save_statistics:
        real[1].save(args.save_statistics)
    a = _statistics(reference, real and real[1], net, notes)
    b = _statistics(samples, fake and fake[1], net, notes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        fid = metrics.frechet_distance(a.mu, a.sigma, b.mu, b.sigma)
        notes += [f"FID: {warning.message}" for warning in caught]
    precision = recall = images = None
    if real and fake:
        x, y = real[0].to(device), fake[0].to(device)
        images = (len(x), len(y))
        precision, recall = metrics.precision_recall(x, y, NEIGHBOURS)
    else:
        notes.append("no precision and recall: they need the images of both sets, not statistics")
    found = {
        "fid": fid, "precision": precision, "recall": recall,
        "reference_images": a.images, "sample_images": b.images, "precision_recall_images": images,
        "features": net.name if net else a.features or b.features or "saved statistics",
        "notes": notes,
    }  # fmt: skip
    return found | ({"floor": _floor(*real, samples.count, args.seed)} if args.floor else {})


def _floor(kept: Tensor, all_of_it: Statistics, count: int, seed: int) -> float:
    """FID of `count` of the reference's images, drawn with `seed`, against the others: real against real."""
    mu_a, cov_a = metrics.statistics(kept[torch.randperm(len(kept), generator=generator_of(seed, "floor"))[:count]])
    mu, cov, n = torch.from_numpy(all_of_it.mu), torch.from_numpy(all_of_it.sigma), all_of_it.images
    rest = n - count
    mu_b = (n * mu - count * mu_a) / rest
    products = (n - 1) * cov + n * mu.outer(mu) - (count - 1) * cov_a - count * mu_a.outer(mu_a)
    return metrics.frechet_distance(mu_a, cov_a, mu_b, (products - rest * mu_b.outer(mu_b)) / (rest - 1))


def _statistics(source: Source, computed: Statistics | None, net: Features | None, notes: list[str]) -> Statistics:
    """Uses saved statistics if this net made them, or if there are no images, as ADM's evaluator does."""
    saved = source.statistics
    if saved is None:
        return computed
    label = saved.features or INCEPTION
    if computed and label != net.name:
        return computed
    if computed:
        notes.append(f"FID uses the statistics that {source.path.name} brings, not its images'")
    elif net and label != net.name:
        raise ValueError(
            f"the statistics in {source.path} are of {label}, not of {net.name}: give the images, or statistics of "
            "the same net (--save-statistics writes them)"
        )
    return saved
