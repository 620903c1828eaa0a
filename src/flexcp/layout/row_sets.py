"""Sets of rows as sorted stretches, for many ranks at once.

A row is a token of one batch element: `element * seq_len + position`. Where all batch elements
share one layout, a row is a position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowSets:
    """One set of rows per rank: stretches that neither touch nor overlap, sorted by rank, start."""

    rank: Tensor
    """int64 [N] Whose set the stretch belongs to."""
    start: Tensor
    """int64 [N] First row."""
    stop: Tensor
    """int64 [N] Row after the last."""

    def __len__(self) -> int:
        return self.rank.numel()

    def counts(self, ranks: int) -> Tensor:
        """int64 [ranks] Rows in each set."""
        found = torch.zeros(ranks, dtype=torch.int64)
        return found.index_add_(0, self.rank, self.stop - self.start)

    def of(self, rank: int) -> list[tuple[int, int]]:
        """The stretches of one rank."""
        at = self.rank == rank
        return list(zip(self.start[at].tolist(), self.stop[at].tolist(), strict=True))


def row_sets(rank: Tensor, start: Tensor, stop: Tensor) -> RowSets:
    """The union of stretches that may overlap, per rank.

    >>> sets = row_sets(torch.tensor([1, 0, 1]), torch.tensor([5, 0, 2]), torch.tensor([8, 3, 6]))
    >>> sets.of(0), sets.of(1)
    ([(0, 3)], [(2, 8)])
    """
    keep = start < stop
    rank, start, stop = rank[keep], start[keep], stop[keep]
    if rank.numel() == 0:
        return RowSets(rank, start, stop)
    wide = int(stop.max()) + 1
    key, order = torch.sort(rank * wide + start)
    last = (rank * wide + stop)[order]
    covered = torch.cummax(last, dim=0).values
    opens = torch.ones_like(key, dtype=torch.bool)
    opens[1:] = key[1:] > covered[:-1]
    begin, end = key[opens], covered[opens.roll(-1)]
    rank = torch.div(begin, wide, rounding_mode="floor")
    return RowSets(rank, begin - rank * wide, end - rank * wide)


def expand(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """For groups of given sizes: the group of each member, and its place within the group.

    >>> expand(torch.tensor([2, 0, 3]))
    (tensor([0, 0, 2, 2, 2]), tensor([0, 1, 0, 1, 2]))
    """
    group = torch.repeat_interleave(torch.arange(sizes.numel()), sizes)
    ends = sizes.cumsum(0)
    return group, torch.arange(group.numel()) - (ends - sizes)[group]


def cut(
    start: Tensor, stop: Tensor, edge_start: Tensor, edge_stop: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stretches cut at the borders of sorted, disjoint pieces.

    Returns, for every overlap: the stretch, the piece, and the overlap's start and stop.

    >>> cut(torch.tensor([2]), torch.tensor([7]), torch.tensor([0, 4]), torch.tensor([4, 9]))
    (tensor([0, 0]), tensor([0, 1]), tensor([2, 4]), tensor([4, 7]))
    """
    first = torch.searchsorted(edge_stop, start, right=True)
    last = torch.searchsorted(edge_start, stop)
    which, offset = expand((last - first).clamp(min=0))
    piece = first[which] + offset
    begin = torch.maximum(start[which], edge_start[piece])
    end = torch.minimum(stop[which], edge_stop[piece])
    return which, piece, begin, end


def without(sets: RowSets, other: RowSets) -> RowSets:
    """Rows of `sets` that are not in `other`, rank by rank.

    >>> a = row_sets(torch.tensor([0]), torch.tensor([0]), torch.tensor([10]))
    >>> b = row_sets(torch.tensor([0, 1]), torch.tensor([3, 0]), torch.tensor([5, 9]))
    >>> without(a, b).of(0)
    [(0, 3), (5, 10)]
    """
    if len(sets) == 0 or len(other) == 0:
        return sets
    wide = int(torch.maximum(sets.stop.max(), other.stop.max())) + 1
    gaps = _complement(other, wide, int(torch.maximum(sets.rank.max(), other.rank.max())) + 1)
    offset = sets.rank * wide
    which, _, begin, end = cut(offset + sets.start, offset + sets.stop, *gaps)
    rank = sets.rank[which]
    return row_sets(rank, begin - rank * wide, end - rank * wide)


def _complement(sets: RowSets, wide: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Starts and stops of all that is in no set, with rank r's rows at r * wide."""
    start, stop = sets.rank * wide + sets.start, sets.rank * wide + sets.stop
    zero, end = torch.zeros(1, dtype=torch.int64), torch.full((1,), ranks * wide)
    return torch.cat([zero, stop]), torch.cat([start, end])
