"""Own rows among those of others: where a group has to hold both in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexcp.grid.analysis.indexing import take
from flexcp.layout import Layout

if TYPE_CHECKING:
    from flexcp.schedule.tables import Pass


def reads_both(what: Pass, groups: Layout) -> Tensor:
    """Bool [groups] Whether a group reads own rows and others' together in some round of a pass.

    It does if it computes against both, or sends both to one other.
    """
    moves, work = what.moves, what.work
    by_task = work.round * groups.ranks + work.rank
    by_message = (moves.round * groups.ranks + moves.target) * groups.ranks + moves.source
    found = torch.zeros(groups.ranks, dtype=torch.bool)
    for who, table, key in ((work.rank, work, by_task), (moves.source, moves, by_message)):
        own = _owned_before(groups, who, table.stop) - _owned_before(groups, who, table.start)
        _, which = torch.unique(key, return_inverse=True)
        rows = torch.stack([own, table.stop - table.start - own])
        sums = torch.zeros(2, int(which.max()) + 1 if which.numel() else 0, dtype=torch.int64)
        both = (sums.index_add_(1, which, rows) > 0).all(0)
        found[who[take(both, which)]] = True
    return found


def _owned_before(groups: Layout, who: Tensor, row: Tensor) -> Tensor:
    """int64 [N] Rows of all groups before some, and of these the own ones before some rows."""
    owned, wide = groups.owned, groups.rows + 1
    if not owned.rank.numel():
        return torch.zeros_like(row)
    size = owned.stop - owned.start
    last = torch.searchsorted(owned.rank * wide + owned.start, who * wide + row, right=True) - 1
    at = last.clamp(min=0)
    within = who * wide + row - take(owned.rank * wide + owned.start, at)
    part = torch.minimum(within.clamp(min=0), take(size, at))
    return take(size.cumsum(0) - size, at) + part
