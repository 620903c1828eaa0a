"""Columns: sets of keys for every row at once, as a few ranges of which each is two vectors."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_RANGES = 4
"""Ranges per row at most; masks with more are left to the tiles."""

Column = tuple[Tensor, Tensor]
"""int64 [Q] First key, and the key after the last, of one range of every row."""


def intersection(a: list[Column], b: list[Column]) -> list[Column] | None:
    """The keys of each row that are in both; None if that is too many ranges."""
    found = []
    for x in a:
        for y in b:
            start = torch.maximum(x[0], y[0])
            stop = torch.maximum(torch.minimum(x[1], y[1]), start)
            found.append((start, stop))
    return _without_empty(found)


def union(a: list[Column], b: list[Column]) -> list[Column] | None:
    """The keys of each row that are in either; None if that is too many ranges."""
    found = list(a)
    for start, stop in b:
        for i, (x, y) in enumerate(found):
            # What overlaps or touches moves over into the new range.
            meets = (x < y) & (start < stop) & (start <= y) & (x <= stop)
            start = torch.where(meets, torch.minimum(start, x), start)
            stop = torch.where(meets, torch.maximum(stop, y), stop)
            found[i] = (torch.where(meets, 0, x), torch.where(meets, 0, y))
        for i, (x, y) in enumerate(found):
            free = (x >= y) & (start < stop)
            found[i] = (torch.where(free, start, x), torch.where(free, stop, y))
            start, stop = torch.where(free, 0, start), torch.where(free, 0, stop)
        found.append((start, stop))
    return _without_empty(found)


def _without_empty(columns: list[Column]) -> list[Column] | None:
    """Columns that have a range in any row; None if those are too many."""
    kept = [column for column in columns if bool((column[0] < column[1]).any())]
    return kept if len(kept) <= MOST_RANGES else None
