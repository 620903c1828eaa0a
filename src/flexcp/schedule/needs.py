"""Who needs which rows of whom: grids and a layout become a table of pairs of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flexcp.grid import BlockGrid
from flexcp.layout import Layout, rows_needed
from flexcp.layout.row_sets import RowSets, cut, row_sets, without


@dataclass(frozen=True, eq=False)
class Needs:
    """The rows of K and V that each rank's queries see and that another rank owns, exactly."""

    layout: Layout
    """Who owns what."""
    rows: RowSets
    """By user, whoever owns them."""

    @classmethod
    def of(cls, grids: Sequence[BlockGrid], layout: Layout) -> Needs:
        """What the masks and the layout make necessary.

        >>> import flexcp
        >>> from flexcp.layout import contiguous
        >>> grid = flexcp.build_block_grid(flexcp.masks.causal(), 12, block_size=4)
        >>> needs = Needs.of([grid], contiguous(12, 3))
        >>> needs.received
        tensor([0, 4, 8])
        """
        return cls(layout, rows_needed(grids, layout))

    def grouped(self, groups: Layout, group_size: int) -> Needs:
        """What groups of consecutive ranks need: what any of theirs needs of other groups."""
        group = torch.div(self.rows.rank, group_size, rounding_mode="floor")
        together = row_sets(group, self.rows.start, self.rows.stop)
        return Needs(groups, without(together, groups.owned))

    @cached_property
    def received(self) -> Tensor:
        """int64 [ranks] Rows that each rank has to receive."""
        return self.rows.counts(self.layout.ranks)

    def exceed(self, share: float) -> bool:
        """Whether ranks need more than such a share of all rows of the others."""
        most = self.layout.rows * max(1, self.layout.ranks - 1)
        return float(self.received.sum()) > share * most

    @cached_property
    def by_owner(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """int64 [N] User, owner, start and stop of every stretch, by user and start."""
        start, stop, owner = self.layout.by_row
        which, piece, begin, end = cut(self.rows.start, self.rows.stop, start, stop)
        return self.rows.rank[which], owner[piece], begin, end


def everything(layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """int64 [N] User, owner, start and stop, if every rank that has tokens needs all rows."""
    start, stop, owner = layout.by_row
    users = torch.nonzero(layout.counts > 0).squeeze(1)
    user = users.repeat_interleave(start.numel())
    owner, start, stop = (x.repeat(users.numel()) for x in (owner, start, stop))
    other = user != owner
    return user[other], owner[other], start[other], stop[other]
