"""FID, improved precision and recall, nearest neighbours: on features, whatever net made them.

The definitions are those of ADM's evaluator, so that numbers can be set beside published ones:

    FID(a, b)  = |mu_a - mu_b|^2 + tr(C_a) + tr(C_b) - 2 tr((C_a C_b)^(1/2)),  C with N - 1, float64
    r_i        = squared distance from x_i to its k-th nearest neighbour, itself not counted
    precision  = share of samples y with |y - x_i|^2 <= r_i for some reference image x_i
    recall     = the same with the two sets exchanged

Everything runs in blocks: no N x N matrix is ever held. Where ADM's half precision does not
overflow, `halves` rounds only the pairs that can matter.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import halves

# ADM's evaluator compares sets in tiles of this many rows and columns. When half precision
# overflows somewhere in a tile it redoes that tile in single precision, so the tile's size is part
# of its definition. 10,000 x 10,000 takes 0.4 GB in float32.
BLOCK = 10_000
# Where nothing overflows tiles are free, and those that stay in the cache are quickest.
TILE = 1_000
ARITHMETICS = ("adm", "float32", "float64")


class SingularCovarianceWarning(UserWarning):
    """FID was computed from covariances without full rank: right, but biased."""


def fid(features_a: Any, features_b: Any) -> float:
    """Frechet distance of two sets of features [N_a, D] and [N_b, D] (tensors or arrays)."""
    a, b = _features(features_a, "features_a"), _features(features_b, "features_b")
    _same_size(a, b, "features_a", "features_b")
    return frechet_distance(*statistics(a), *statistics(b))


def statistics(features: Any) -> tuple[Tensor, Tensor]:
    """Mean [D] and covariance [D, D] (divided by N - 1) of features [N, D], in float64."""
    x = _features(features, "features")
    if len(x) < 2:
        raise ValueError(f"a covariance needs at least 2 images, but features has {len(x)}")
    mean = sum(block.double().sum(0) for block in x.split(BLOCK)) / len(x)
    cov = x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    for block in x.split(BLOCK):
        centred = block.double() - mean
        cov += centred.T @ centred
    return mean, cov / (len(x) - 1)


class RunningStatistics:
    """`statistics` of features that come in batches [n, D] and are not kept.

    Sums are in float64 and about the mean of the first batch, so that a large common offset does
    not eat digits.
    """

    def __init__(self) -> None:
        self.count = 0
        self._shift = self._sum = self._products = None

    def add(self, features: Any) -> None:
        """Takes a batch in."""
        x = _features(features, "features").double()
        if self._shift is None:
            self._shift = x.mean(0)
            self._sum = torch.zeros_like(self._shift)
            self._products = x.new_zeros(x.shape[1], x.shape[1])
        centred = x - self._shift
        self.count += len(x)
        self._sum += centred.sum(0)
        self._products += centred.T @ centred

    def result(self) -> tuple[Tensor, Tensor]:
        """Mean [D] and covariance [D, D] (divided by N - 1) of all that was added."""
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 images, but there are {self.count}")
        offset = self._sum / self.count
        products = self._products - self.count * torch.outer(offset, offset)
        return self._shift + offset, products / (self.count - 1)


def frechet_distance(mu1: Any, cov1: Any, mu2: Any, cov2: Any) -> float:
    """Frechet distance of the Gaussians N(mu1, cov1) and N(mu2, cov2).

    tr((C1 C2)^(1/2)) is the sum of the square roots of the eigenvalues of R C2 R, R = C1^(1/2):
    the same number as the trace of the square root of the product, through symmetric matrices only.
    These always have a real square root, so a singular covariance (fewer images than features, or
    features that never fire) needs no multiple of the identity added, which is what ADM's evaluator
    falls back to when its square root fails. A singular one is reported with a
    SingularCovarianceWarning, for FID is then biased upwards.
    """
    mu1, cov1 = _gaussian(mu1, cov1, "1")
    mu2, cov2 = _gaussian(mu2, cov2, "2")
    if mu1.shape != mu2.shape:
        raise ValueError(
            f"the statistics come from different feature nets: {len(mu1)} against {len(mu2)} "
            "features. Compute both with the same one."
        )
    values, vectors = torch.linalg.eigh(cov1)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    product = torch.linalg.eigvalsh(root @ cov2 @ root)
    tolerance = product.max().clamp(min=0) * len(product) * torch.finfo(torch.float64).eps
    rank = int((product > tolerance).sum())
    if rank < len(product):
        warnings.warn(
            f"the product of the covariances is singular: rank {rank} of {len(product)} features. "
            "FID is still well defined, but biased; more images than features cure it.",
            SingularCovarianceWarning,
            stacklevel=2,
        )
    trace = product.clamp(min=0).sqrt().sum()
    distance = (mu1 - mu2).square().sum() + cov1.trace() + cov2.trace() - 2 * trace
    return float(distance)


def precision_recall(
    reference: Any, samples: Any, k: int = 3, arithmetic: str = "adm", block: int = BLOCK
) -> tuple[float, float]:
    """Improved precision and recall of samples [M, D] against a reference [N, D].

    arithmetic:
        "adm"      squared distances rounded to half precision, as ADM's evaluator asks for (tiles
                   that overflow: single), with sums accumulated in single. TensorFlow's own
                   kernels may round otherwise: its CPU's moved either number by up to 0.002 on
                   1,500 to 10,000 images. Use it for numbers beside published ones.
        "float32"  no rounding. Half precision keeps 3 digits of a squared norm, so features with a
        "float64"  large common offset and small spread are better served by these.
    """
    x, y = _features(reference, "reference"), _features(samples, "samples")
    _same_size(x, y, "reference", "samples")
    if arithmetic not in ARITHMETICS:
        raise ValueError(f"arithmetic={arithmetic!r} is not one of {', '.join(ARITHMETICS)}")
    _enough(x, k)
    _enough(y, k)
    if arithmetic == "adm" and _fits_half(x, y):
        a, b, size = halves.cloud(x), halves.cloud(y), _tile(block)
        radii_a, radii_b = halves.radii(a, k, size), halves.radii(b, k, size)
        x_in, y_in = halves.covered(a, b, radii_a, radii_b, size)
        return float(y_in.double().mean()), float(x_in.double().mean())
    radii_x = manifold_radii(x, k, arithmetic, block)
    radii_y = manifold_radii(y, k, arithmetic, block)

    def look(i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        d = _squared_distances(x[i], y[j], arithmetic)
        # A difference keeps the sign of a comparison, and its extremes are quick to find.
        return i[(radii_y[j] - d).amax(1) >= 0], j[(radii_x[i, None] - d).amax(0) >= 0]

    whole = arithmetic == "adm"
    size = block if whole else _tile(block)
    x_in, y_in = halves.cover(len(x), len(y), size, x.device, look, whole)
    return float(y_in.double().mean()), float(x_in.double().mean())


def manifold_radii(
    features: Any, k: int = 3, arithmetic: str = "adm", block: int = BLOCK
) -> Tensor:
    """Squared distance [N] of each of features [N, D] to its k-th nearest neighbour.

    As in ADM's evaluator an image itself takes the first place of its own list, so the k-th
    neighbour is the (k + 1)-th smallest entry of its row; exact duplicates count as neighbours.
    """
    x = _features(features, "features")
    _enough(x, k)
    if arithmetic == "adm" and _fits_half(x):
        return halves.radii(halves.cloud(x), k, _tile(block))
    dtype = torch.float64 if arithmetic == "float64" else torch.float32
    smallest = torch.full((len(x), k + 1), torch.inf, dtype=dtype, device=x.device)
    tiles = list(_ranges(len(x), block if arithmetic == "adm" else _tile(block)))
    for n, rows in enumerate(tiles):
        for columns in tiles[n:]:
            d, back = _squared_distances_both_ways(x[rows], x[columns], arithmetic)
            smallest[rows] = _least(smallest[rows], d)
            if columns != rows:
                smallest[columns] = _least(smallest[columns], back)
    return smallest[:, k]


def _least(smallest: Tensor, d: Tensor) -> Tensor:
    """The K least of each row of smallest [N, K] and d [N, M] together, ascending."""
    k = smallest.shape[1]
    best = d.topk(min(k, d.shape[1]), dim=1, largest=False).values.to(smallest.dtype)
    return torch.cat([smallest, best], 1).sort(dim=1).values[:, :k]


def nearest_neighbours(
    queries: Any, reference: Any, k: int = 1, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """The k nearest of reference [N, D] to each of queries [M, D].

    Returns Euclidean distances [M, k], ascending, and indices [M, k] into reference. The distances
    are computed from differences, so an exact copy is at distance 0.
    """
    q, x = _features(queries, "queries"), _features(reference, "reference")
    _same_size(q, x, "queries", "reference")
    if not 1 <= k <= len(x):
        raise ValueError(f"k={k} neighbours: it must be in 1..{len(x)}, the reference's images")
    arithmetic = "float64" if torch.float64 in (q.dtype, x.dtype) else "float32"
    distances, indices = [], []
    for rows in _ranges(len(q), block):
        best, where = None, None
        for columns in _ranges(len(x), block):
            d = _squared_distances(q[rows], x[columns], arithmetic)
            d, i = d.topk(min(k, d.shape[1]), dim=1, largest=False)
            i = i + columns.start
            best = d if best is None else torch.cat([best, d], 1)
            where = i if where is None else torch.cat([where, i], 1)
            best, order = best.topk(min(k, best.shape[1]), dim=1, largest=False)
            where = where.gather(1, order)
        exact = torch.stack([(q[rows] - x[where[:, j]]).norm(dim=1) for j in range(k)], 1)
        exact, order = exact.sort(dim=1, stable=True)
        distances.append(exact)
        indices.append(where.gather(1, order))
    return torch.cat(distances), torch.cat(indices)


def _squared_distances(u: Tensor, v: Tensor, arithmetic: str) -> Tensor:
    """|u_i - v_j|^2 as [len(u), len(v)] through one matrix product."""
    return _squared_distances_both_ways(u, v, arithmetic, back=False)[0]


def _squared_distances_both_ways(
    u: Tensor, v: Tensor, arithmetic: str, back: bool = True
) -> tuple[Tensor, Tensor | None]:
    """|u_i - v_j|^2 and, from the same product, |v_j - u_i|^2 as [len(v), len(u)].

    The two differ in half precision, where (|u|^2 - 2uv) + |v|^2 rounds in another order.
    """
    if arithmetic == "adm":
        both = _expand(*_half_products(u, v), back)
        if all(bool(d.amax().isfinite()) for d in both if d is not None):
            return both
        # ADM's evaluator decides for each direction by itself.
        single = _squared_distances_both_ways(u, v, "float32", back)
        return tuple(
            d if d is None or bool(d.amax().isfinite()) else other
            for d, other in zip(both, single, strict=True)
        )
    dtype = torch.float64 if arithmetic == "float64" else torch.float32
    u, v = u.to(dtype), v.to(dtype)
    return _expand(u @ v.T, u.square().sum(1), v.square().sum(1), back)


def _half_products(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u v^T, |u|^2 and |v|^2 with every result rounded to float16, sums accumulated in float32.

    Products of halves are exact in float32, so a float32 product of the rounded features, rounded
    once, is a half precision product with a single precision accumulator; and a CPU is fast at it.
    """
    u, v = u.half(), v.half()
    norm_u, norm_v = ((x * x).float().sum(1).half() for x in (u, v))
    return (u.float() @ v.float().T).half(), norm_u, norm_v


def _expand(
    product: Tensor, norm_u: Tensor, norm_v: Tensor, back: bool
) -> tuple[Tensor, Tensor | None]:
    """(|u|^2 - 2uv) + |v|^2 and, where wanted, (|v|^2 - 2uv) + |u|^2 transposed; never negative."""
    product = product.mul_(-2)
    d = (product + norm_u[:, None]).add_(norm_v[None, :]).clamp_(min=0)
    if not back:
        return d, None
    return d, product.add_(norm_v[None, :]).add_(norm_u[:, None]).clamp_(min=0).T.contiguous()


def _fits_half(*sets: Tensor) -> bool:
    """Whether half precision overflows nowhere, so that ADM's evaluator never leaves it.

    All that is computed on the way to a distance is below 4 times the largest squared norm.
    """
    largest = max(float(part.half().float().square().sum(1).max())
                  for x in sets for part in x.split(BLOCK))  # fmt: skip
    return 4.01 * largest < torch.finfo(torch.float16).max


def _tile(block: int) -> int:
    """Rows and columns to compare at once where tiles do not change the result."""
    if block < 1:
        raise ValueError(f"block={block}: it must be at least 1")
    return min(block, TILE)


def _enough(x: Tensor, k: int) -> None:
    if k < 1:
        raise ValueError(f"k={k} neighbours: it must be at least 1")
    if len(x) <= k:
        raise ValueError(
            f"k={k} neighbours of each image need at least {k + 1} images, but there are {len(x)}"
        )


def _ranges(length: int, block: int) -> Iterator[slice]:
    if block < 1:
        raise ValueError(f"block={block}: it must be at least 1")
    return (slice(start, min(start + block, length)) for start in range(0, length, block))


def _features(features: Any, name: str) -> Tensor:
    """Checks features [N, D]; integers become float32."""
    x = torch.as_tensor(features).detach()
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"{name} must be [images, features], but its shape is {tuple(x.shape)}")
    if not x.is_floating_point():
        x = x.float()
    bad = (~x.isfinite()).any(1)
    if bool(bad.any()):
        raise ValueError(
            f"{name}: {int(bad.sum())} of {len(x)} rows hold NaN or infinity, the first is row "
            f"{int(bad.nonzero()[0])}. Look at those images: a sampler has diverged, or the "
            "feature net has overflowed."
        )
    return x


def _same_size(a: Tensor, b: Tensor, name_a: str, name_b: str) -> None:
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"{name_a} has {a.shape[1]} features an image but {name_b} has {b.shape[1]}: "
            "compute both with the same feature net"
        )


def _gaussian(mu: Any, cov: Any, name: str) -> tuple[Tensor, Tensor]:
    mu = torch.as_tensor(mu).detach().double().reshape(-1)
    cov = torch.as_tensor(cov).detach().double()
    cov = cov.reshape(1, 1) if cov.numel() == 1 else cov
    if cov.shape != (len(mu), len(mu)):
        raise ValueError(
            f"cov{name} has shape {tuple(cov.shape)}, but mu{name} with {len(mu)} features needs "
            f"({len(mu)}, {len(mu)})"
        )
    if not bool(mu.isfinite().all() and cov.isfinite().all()):
        raise ValueError(f"mu{name} or cov{name} holds NaN or infinity: recompute the statistics")
    return mu, (cov + cov.T) / 2
