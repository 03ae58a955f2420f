"""Precision and recall in ADM's half precision, rounding only the pairs that can matter.

ADM's evaluator computes a squared distance as

    fl(fl(|u|^2 - 2uv) + |v|^2),  every result rounded to float16, sums accumulated in float32

and compares it with radii. Rounding every pair costs as much as the products themselves, and nearly
all pairs are far from any radius. So products stay in float32, and a pair is rounded only if the
bound below lets it be within a radius. With S = |u|^2 + |v|^2 and eps = 2^-11 the two norms are
each off by at most 2 eps of themselves, 2uv (at most S) by eps of itself, and the two sums, at most
2 S each, by eps of theirs: 2 S + S + 2 S + 2 S = 7 S eps. So

    |u - v|^2 - 7 S eps  <=  the rounded distance

and the result is that of rounding every pair. Only for features that do not overflow float16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

EPS = 2.0**-11  # half of float16's unit in the last place, relative


@dataclass(frozen=True)
class Cloud:
    """A set of features, prepared.

    half   [N, D] float16, as ADM's evaluator casts them
    norm   [N] float16, |u|^2 with its rounding
    low    [N] float32, |u|^2 less its share of what rounding may take off a distance
    """

    half: Tensor
    norm: Tensor
    low: Tensor

    def __len__(self) -> int:
        return len(self.half)


def cloud(x: Tensor, rows: int = 4096) -> Cloud:
    """Features [N, D], prepared."""
    half = x.half()
    norm, low = [], []
    for part in half.split(rows):
        squared = part.float().square().sum(1)
        # 8 S eps where 7 are due, float32's own errors, and results that are subnormal halves.
        low.append(squared * (1 - 8 * EPS - 1e-5) - x.shape[1] * 2.0**-22)
        norm.append((part * part).float().sum(1).half())
    return Cloud(half, torch.cat(norm), torch.cat(low))


class Tile(NamedTuple):
    """Images i of one cloud against images j of another.

    product   u v^T in float32, [len(i), len(j)]
    bounds    what the rounded distances cannot fall below, of the same shape
    """

    u: Cloud
    v: Cloud
    i: Tensor
    j: Tensor
    product: Tensor
    bounds: Tensor

    def pairs(self, mask: Tensor) -> Pairs:
        """The pairs in `mask`, with their distances."""
        rows, columns = mask.nonzero(as_tuple=True)
        i, j = self.i[rows], self.j[columns]
        product = self.product[rows, columns].half().mul_(-2)
        u, v = self.u.norm[i], self.v.norm[j]
        there, back = (product + u).add_(v), (product + v).add_(u)
        return Pairs(i, j, there.clamp_(min=0).float(), back.clamp_(min=0).float())


class Pairs(NamedTuple):
    """Indices [n], and |u_i - v_j|^2 and |v_j - u_i|^2 [n], which round in another order."""

    i: Tensor
    j: Tensor
    there: Tensor
    back: Tensor


def tile(u: Cloud, v: Cloud, i: Tensor, j: Tensor) -> Tile:
    """All that is known about i x j without rounding."""
    product = u.half[i].float() @ v.half[j].float().T
    bounds = (u.low[i, None] + v.low[j]).sub_(product, alpha=2)
    return Tile(u, v, i, j, product, bounds)


def radii(x: Cloud, k: int, size: int) -> Tensor:
    """Squared distance [N] of each image to its k-th nearest neighbour, itself not counted."""
    smallest = torch.full((len(x), k + 1), torch.inf, device=x.half.device)
    ranges = list(_ranges(len(x), size, x.half.device))
    for i in ranges:
        here = tile(x, x, i, i)
        limit = torch.full((len(i), 1), torch.inf, device=i.device)
        if len(i) > k:
            # Any k + 1 images give a limit, near ones a good one: no image beyond it can count.
            near = here.bounds.topk(k + 1, dim=1, largest=False).indices
            mask = torch.zeros_like(here.bounds, dtype=torch.bool).scatter_(1, near, True)
            limit = here.pairs(mask).there.view(len(i), k + 1).amax(1, keepdim=True)
        found = here.pairs(here.bounds <= limit)
        _insert(smallest, found.i, found.there)
    for number, i in enumerate(ranges):
        for j in ranges[number + 1 :]:
            here = tile(x, x, i, j)
            mask = (here.bounds <= smallest[i, k, None]).logical_or_(here.bounds <= smallest[j, k])
            found = here.pairs(mask)
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
    group = torch.arange(len(there), device=row.device).repeat_interleave(counts)
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[group]
    k = smallest.shape[1]
    best = smallest.new_full((len(there), k), torch.inf)
    least = place < k
    best[group[least], place[least]] = value[least]
    smallest[there] = torch.cat([smallest[there], best], 1).sort(dim=1).values[:, :k]


def covered(
    x: Cloud, y: Cloud, radii_x: Tensor, radii_y: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Which of x [N] lie within a radius of some y, and which of y [M] within one of some x."""

    def look(i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        here = tile(x, y, i, j)
        mask = (here.bounds <= radii_x[i, None]).logical_or_(here.bounds <= radii_y[j])
        found = here.pairs(mask)
        return (
            found.i[found.there <= radii_y[found.j]],
            found.j[found.there <= radii_x[found.i]],
        )

    return cover(len(x), len(y), size, x.half.device, look)


def cover(
    rows: int, columns: int, size: int, device: torch.device,
    look: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], whole: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Asks `look(i, j) -> (covered of i, covered of j)` about tiles, less what is decided by then.

    Of each tile: first the rows still open with all columns, then the other rows with the columns
    still open. Or all of it at once, if tiles must be `whole`. Returns bool [rows] and [columns].
    """
    x_in = torch.zeros(rows, dtype=torch.bool, device=device)
    y_in = torch.zeros(columns, dtype=torch.bool, device=device)
    for i in _ranges(rows, size, device):
        for j in _ranges(columns, size, device):
            closed = torch.zeros_like(i, dtype=torch.bool) if whole else x_in[i]
            for chosen, only_open in ((i[~closed], False), (i[closed], True)):
                others = j[~y_in[j]] if only_open else j
                if len(chosen) and len(others):
                    a, b = look(chosen, others)
                    x_in[a] = True
                    y_in[b] = True
    return x_in, y_in


def _ranges(length: int, size: int, device: torch.device) -> Iterator[Tensor]:
    for start in range(0, length, size):
        yield torch.arange(start, min(start + size, length), device=device)
