"""Precision and recall in ADM's half precision, without computing most of the distances.

A pair of images matters only if it is closer than a radius, and nearly all pairs are not. With an
orthonormal P [q, D], c any centre, z = u - c and r the part of z that P leaves out,

    |u - v|^2 >= |z_u|^2 + |z_v|^2 - 2 (P z_u . P z_v + |r_u| |r_v|)            (Cauchy-Schwarz)

so a product in q + 1 dimensions rules pairs out. Where it rules out too few, the tile is done with
all D dimensions. For the pairs that are left the distance is computed as ADM's evaluator rounds it:

    fl(fl(|u|^2 - 2uv) + |v|^2),  every result rounded to float16, sums accumulated in float32

Its rounding is bounded, and the bound is taken off before a pair is ruled out: with
S = |u|^2 + |v|^2 the two norms are each off by at most 2 eps of themselves, 2uv (at most S) by eps
of itself, and the two sums, at most 2 S each, by eps of theirs: 2 S + S + 2 S + 2 S = 7 S eps, with
eps = 2^-11. So the result is exactly that of computing every pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SKETCH = 8  # q = D / SKETCH dimensions for the bound ...
LARGEST = 256  # ... but no more than these,
SMALLEST = 64  # and no bound where q would be smaller: the whole product is cheap then
SHARE = 0.015  # of a tile's pairs: with more left, the whole product is cheaper
PAIRS = 1024  # to compute at once
_HALF_ULP = 2.0**-11
_BASIS_ROWS = 2_000


@dataclass
class Cloud:
    """A set of features, prepared.

    half      [N, D] float16, as ADM's evaluator casts them
    norm      [N] float16, |u|^2 with its rounding
    low       [N] float32, |z|^2 less all that rounding may have added to a distance
    sketch    [N, q + 1] float32, P z and |r|; None where it would not pay
    """

    half: Tensor
    norm: Tensor
    low: Tensor
    sketch: Tensor | None
    centre: Tensor

    def __len__(self) -> int:
        return len(self.half)


def clouds(*sets: Tensor) -> list[Cloud]:
    """The sets [N, D], prepared with one centre and one P, that of their principal directions."""
    few = torch.cat([x[:: -(-len(x) // _BASIS_ROWS)].half().float().cpu() for x in sets])
    centre = few.mean(0)
    q = min(few.shape[1] // SKETCH, LARGEST, len(few))
    basis = None
    if q >= SMALLEST:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            basis = torch.svd_lowrank(few - centre, q, niter=1)[2].to(sets[0].device)
    return [_cloud(x, centre.to(x.device), basis) for x in sets]


def _cloud(x: Tensor, centre: Tensor, basis: Tensor | None, rows: int = 4096) -> Cloud:
    half = x.half()
    norms, lows, sketches = [], [], []
    for part in half.split(rows):
        single = part.float()
        norms.append((part * part).float().sum(1).half())
        z = single - centre
        squared = z.square().sum(1)
        # 8 S eps where 7 S eps are due, subnormal halves, and float32's own errors in the bound.
        slack = 8 * _HALF_ULP * single.square().sum(1) + 1e-4 * squared + x.shape[1] * 2.0**-22
        lows.append(squared - slack)
        if basis is not None:
            shadow = z @ basis
            rest = (squared - shadow.square().sum(1)).clamp_(min=0).sqrt_()
            sketches.append(torch.cat([shadow, rest[:, None]], 1))
    sketch = torch.cat(sketches) if basis is not None else None
    return Cloud(half, torch.cat(norms), torch.cat(lows), sketch, centre)


class Found(NamedTuple):
    """Pairs of indices [n], and |u - v|^2 and |v - u|^2 of each: they round in another order."""

    i: Tensor
    j: Tensor
    there: Tensor
    back: Tensor


class Pairs:
    """Finds the pairs of two clouds that may be closer than given limits."""

    def __init__(self, u: Cloud, v: Cloud):
        self.u, self.v = u, v
        self._misses = 0  # tiles in a row that the sketch did not help with
        self._tile = 0

    def bounds(self, i: Tensor, j: Tensor, whole: bool) -> Tensor:
        """Lower bounds [len(i), len(j)] of the distances as ADM's evaluator rounds them."""
        u, v = self.u, self.v
        if whole:
            a, b = u.half[i].float() - u.centre, v.half[j].float() - v.centre
        else:
            a, b = u.sketch[i], v.sketch[j]
        ones = a.new_ones
        left = torch.cat([a * -2, u.low[i, None], ones(len(a), 1)], 1)
        right = torch.cat([b, ones(len(b), 1), v.low[j, None]], 1)
        return left @ right.T

    def near(self, i: Tensor, j: Tensor, keep: Callable[[Tensor], Tensor]) -> Found:
        """The pairs of i x j that `keep(bounds) -> bool [len(i), len(j)]` does not rule out."""
        self._tile += 1
        if self.u.sketch is not None and (self._misses < 4 or self._tile % 16 == 0):
            mask = keep(self.bounds(i, j, whole=False))
            if int(mask.sum()) <= SHARE * mask.numel():
                self._misses = 0
                return self.measured(mask, i, j)
            self._misses += 1
        return self.measured(keep(self.bounds(i, j, whole=True)), i, j)

    def measured(self, mask: Tensor, i: Tensor, j: Tensor) -> Found:
        """The pairs of i x j in `mask`, with their distances in ADM's rounding."""
        rows, columns = mask.nonzero(as_tuple=True)
        a, b, u, v = i[rows], j[columns], self.u, self.v
        if len(a) > SHARE * mask.numel():  # then the whole product is cheaper
            product = (u.half[i].float() @ v.half[j].float().T)[rows, columns]
        else:
            product = self.products(a, b)
        product = product.half().mul_(-2)
        there = (product + u.norm[a]).add_(v.norm[b]).clamp_(min=0).float()
        back = product.add_(v.norm[b]).add_(u.norm[a]).clamp_(min=0).float()
        return Found(a, b, there, back)

    def products(self, i: Tensor, j: Tensor) -> Tensor:
        """u_i . v_j of the pairs [n] in float32, a few at a time."""
        u, v = self.u.half, self.v.half
        parts = zip(i.split(PAIRS), j.split(PAIRS), strict=True)
        return torch.cat([u[a].float().mul_(v[b].float()).sum(1) for a, b in parts])


def radii(cloud: Cloud, k: int, tile: int) -> Tensor:
    """Squared distance [N] of each image to its k-th nearest neighbour, itself not counted."""
    pairs = Pairs(cloud, cloud)
    n, device = len(cloud), cloud.half.device
    smallest = torch.full((n, k + 1), torch.inf, device=device)
    tiles = [torch.arange(a, min(a + tile, n), device=device) for a in range(0, n, tile)]
    for i in tiles:
        # k + 1 images that are near give a first limit; no image beyond it can be a neighbour.
        bounds = pairs.bounds(i, i, whole=True)
        limit = torch.full((len(i), 1), torch.inf, device=device)
        if len(i) > k:
            near = bounds.topk(k + 1, dim=1, largest=False).indices
            seeds = torch.zeros_like(bounds, dtype=torch.bool).scatter_(1, near, True)
            limit = pairs.measured(seeds, i, i).there.view(len(i), k + 1).amax(1, keepdim=True)
        found = pairs.measured(bounds <= limit, i, i)
        _insert(smallest, found.i, found.there)
    for number, i in enumerate(tiles):
        for j in tiles[number + 1 :]:
            limits = smallest[i, k, None], smallest[j, k]
            found = pairs.near(i, j, lambda low, at=limits: (low <= at[0]) | (low <= at[1]))
            _insert(smallest, found.i, found.there)
            _insert(smallest, found.j, found.back)
    return smallest[:, k]


def _insert(smallest: Tensor, row: Tensor, value: Tensor) -> None:
    """Puts values [n] into their rows of smallest [N, K], which keeps the K least, ascending."""
    if not len(row):
        return
    order = value.argsort()
    order = order[row[order].argsort(stable=True)]
    row, value = row[order], value[order]
    there, counts = row.unique_consecutive(return_counts=True)
    first = counts.cumsum(0) - counts
    place = torch.arange(len(row), device=row.device) - first.repeat_interleave(counts)
    k = smallest.shape[1]
    group = torch.arange(len(there), device=row.device).repeat_interleave(counts)
    best = smallest.new_full((len(there), k), torch.inf)
    least = place < k
    best[group[least], place[least]] = value[least]
    smallest[there] = torch.cat([smallest[there], best], 1).sort(dim=1).values[:, :k]


def covered(
    x: Cloud, y: Cloud, radii_x: Tensor, radii_y: Tensor, tile: int
) -> tuple[Tensor, Tensor]:
    """Which of x [N] lie within a radius of some y, and which of y [M] within one of some x."""
    pairs = Pairs(x, y)
    x_in = torch.zeros(len(x), dtype=torch.bool, device=radii_x.device)
    y_in = torch.zeros(len(y), dtype=torch.bool, device=radii_y.device)
    for start in range(0, len(x), tile):
        for begin in range(0, len(y), tile):
            for i, j, open_rows in _undecided(x_in, y_in, start, begin, tile):
                open_columns, limit_x, limit_y = ~y_in[j], radii_x[i, None], radii_y[j]

                def keep(low, rows=open_rows, columns=open_columns, a=limit_x, b=limit_y):
                    useful = (low <= a) & columns
                    return useful | (low <= b) if rows else useful

                found = pairs.near(i, j, keep)
                x_in[found.i[found.there <= radii_y[found.j]]] = True
                y_in[found.j[found.there <= radii_x[found.i]]] = True
    return x_in, y_in


def _undecided(
    x_in: Tensor, y_in: Tensor, start: int, begin: int, tile: int
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """A tile without what is decided: open rows with all columns, other rows with open columns."""
    i = torch.arange(start, min(start + tile, len(x_in)), device=x_in.device)
    j = torch.arange(begin, min(begin + tile, len(y_in)), device=x_in.device)
    open_rows = ~x_in[i]
    if bool(open_rows.any()):
        yield i[open_rows], j, True
    i, j = i[~open_rows], j[~y_in[j]]
    if len(i) and len(j):
        yield i, j, False
