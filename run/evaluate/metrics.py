"""FID, improved precision and recall, nearest neighbours: on features, whatever net made them.

The definitions are those of ADM's evaluator, so that numbers can be set beside published ones:

    FID(a, b)  = |mu_a - mu_b|^2 + tr(C_a) + tr(C_b) - 2 tr((C_a C_b)^(1/2)),  C with N - 1, float64
    r_i        = squared distance from x_i to its k-th nearest neighbour, itself not counted
    precision  = share of samples y with |y - x_i|^2 <= r_i for some reference image x_i
    recall     = the same with the two sets exchanged

Everything runs in tiles: no N x N matrix is ever held.
"""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

TILE = 1_000
# ADM's evaluator compares sets in tiles of this many rows and columns, and computes a tile again in
# single precision if half precision overflows in it. Only then does the tile's size matter.
ADM_TILE = 10_000
LARGE = 2.0**50  # single precision holds the squared distances of features below this


def fid(features_a: Tensor, features_b: Tensor) -> float:
    """Frechet distance of two sets of features [N_a, D] and [N_b, D]."""
    a, b = _finite(features_a, "features_a"), _finite(features_b, "features_b")
    return frechet_distance(*statistics(a), *statistics(b))


def statistics(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [D] and covariance [D, D] (divided by N - 1) of features [N, D], in float64."""
    running = RunningStatistics()
    for part in features.split(ADM_TILE):
        running.add(part)
    return running.result()


class RunningStatistics:
    """`statistics` of features that come in batches [n, D] and are not kept.

    Sums are in float64 and about the mean of the first batch, so that a large common offset costs
    no digits.
    """

    def __init__(self) -> None:
        self.count = 0

    def add(self, features: Tensor) -> None:
        """Adds a batch."""
        x = features.double()
        if not self.count:
            self._shift = x.mean(0)
            self._sum = torch.zeros_like(self._shift)
            self._products = x.new_zeros(x.shape[1], x.shape[1])
        centred = x - self._shift
        self.count += len(x)
        self._sum += centred.sum(0)
        self._products.addmm_(centred.T, centred)

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
    the trace of the square root of the product, through symmetric matrices only. These always have
    a real square root, so a singular covariance (fewer images than features, or features that never
    fire) needs no multiple of the identity added, which is what ADM's evaluator falls back to when
    its square root fails. A RuntimeWarning reports it, for FID is then biased upwards.
    """
    mu1, mu2 = (torch.as_tensor(mu).double() for mu in (mu1, mu2))
    cov1, cov2 = (torch.as_tensor(cov).double() for cov in (cov1, cov2))
    cov1, cov2 = ((cov + cov.T) / 2 for cov in (cov1, cov2))
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
            RuntimeWarning,
            stacklevel=2,
        )
    trace = product.clamp(min=0).sqrt().sum()
    return float((mu1 - mu2).square().sum() + cov1.trace() + cov2.trace() - 2 * trace)


def precision_recall(reference: Tensor, samples: Tensor, k: int = 3) -> tuple[float, float]:
    """Improved precision and recall of samples [M, D] against a reference [N, D]."""
    x, y = _in_range(_finite(reference, "reference"), _finite(samples, "samples"))
    radii_x, radii_y = manifold_radii(x, k), manifold_radii(y, k)
    x_in, y_in = (torch.zeros_like(radii, dtype=torch.bool) for radii in (radii_x, radii_y))
    size = _tile(x, y)
    for u, r_u, u_in in zip(*(t.split(size) for t in (x, radii_x, x_in)), strict=True):
        for v, r_v, v_in in zip(*(t.split(size) for t in (y, radii_y, y_in)), strict=True):
            d = _squared_distances(u, v)
            u_in |= (d <= r_v).any(1)
            v_in |= (d <= r_u[:, None]).any(0)
    return int(y_in.sum()) / len(y_in), int(x_in.sum()) / len(x_in)


def _in_range(*sets: Tensor) -> tuple[Tensor, ...]:
    """The sets as they are or, where one holds LARGE features, all divided by one power of two."""
    largest = max(float(torch.stack(x.aminmax()).abs().max()) for x in sets)
    return sets if largest < LARGE else tuple(x / 2.0 ** math.floor(math.log2(largest)) for x in sets)


def manifold_radii(x: Tensor, k: int = 3) -> Tensor:
    """Squared distance [N] of each of features x [N, D] to its k-th nearest neighbour.

    As in ADM's evaluator an image itself takes the first place of its own list, so the k-th
    neighbour is the (k + 1)-th smallest entry of its row; exact duplicates count as neighbours.
    """
    if len(x) <= k:
        raise ValueError(f"k={k} neighbours of each image need at least {k + 1} images, but there are {len(x)}")
    size, radii = _tile(x), []
    for rows in x.split(size):
        least = rows.new_empty(len(rows), 0, dtype=torch.float32)
        for columns in x.split(size):
            least = torch.cat([least, _squared_distances(rows, columns)], 1)
            least = least.topk(min(k + 1, least.shape[1]), largest=False, sorted=False).values
        radii.append(least.amax(1))
    return torch.cat(radii)


def _squared_distances(u: Tensor, v: Tensor) -> Tensor:
    """|u_i - v_j|^2 [len(u), len(v)] as ADM's evaluator has it: fl(fl(|u|^2 - 2uv) + |v|^2).

    Features and every result are rounded to float16; sums are accumulated in float32, in which
    products of halves are exact. The rounding moves precision and recall by up to 0.01 (see
    docs/evaluation.md), so numbers beside published ones need it.
    """
    for dtype in (torch.float16, torch.float32):
        a, b = u.to(dtype), v.to(dtype)
        norm_a, norm_b = ((z * z).float().sum(1).to(dtype) for z in (a, b))
        d = (a.float() @ b.float().T).to(dtype).mul_(-2)
        d = d.add_(norm_a[:, None]).add_(norm_b).float()
        if bool(d.amax().isfinite()):
            break
    return d.clamp_(min=0)


def _tile(*sets: Tensor) -> int:
    """Rows and columns to compare at once: ADM's number if half precision can overflow."""
    largest = max(float(part.square().sum(1).max()) for x in sets for part in x.split(TILE))
    # All that is computed on the way to a distance is below 4 times the largest squared norm.
    return TILE if 4.01 * largest < torch.finfo(torch.float16).max else ADM_TILE


def nearest_neighbours(queries: Tensor, reference: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
    """The k nearest of reference [N, D] to each of queries [M, D].

    Returns Euclidean distances [M, k], ascending, and indices [M, k] into reference. The distances
    are computed from differences, so an exact copy is at distance 0.
    """
    from sklearn.neighbors import NearestNeighbors

    q, x = _finite(queries, "queries"), _finite(reference, "reference")
    if not 1 <= k <= len(x):
        raise ValueError(f"k={k} neighbours: it must be in 1..{len(x)}, the reference's images")
    # scikit-learn works in bounded memory and by products, which lose digits: a few more, exactly.
    search = NearestNeighbors(n_neighbors=min(k + 3, len(x)), algorithm="brute").fit(x)
    near = torch.from_numpy(search.kneighbors(q, return_distance=False)).sort().values
    exact, order = torch.stack([(q - x[i]).norm(dim=1) for i in near.T], 1).sort(stable=True)
    return exact[:, :k].contiguous(), near.gather(1, order)[:, :k]


def _finite(x: Tensor, name: str) -> Tensor:
    """Features x [N, D], where all of them are numbers; else a ValueError says which are not."""
    bad = torch.cat([(~part.isfinite()).any(1) for part in x.split(TILE)])  # copies are large
    if bool(bad.any()):
        raise ValueError(
            f"{name}: {int(bad.sum())} of {len(x)} rows hold NaN or infinity, the first is row "
            f"{int(bad.nonzero()[0])}. Look at those images: a sampler has diverged, or the "
            "feature net has overflowed."
        )
    return x
