"""Where each rank's work lies along the keys, from which the work of every round follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexcp.grid import BlockGrid, BlockKind
from flexcp.grid.row_areas import row_areas
from flexcp.grid.rows import areas_by_plane, runs_of_rows
from flexcp.layout import Layout, area_per_rank
from flexcp.layout.balance.objective import Objective
from flexcp.layout.needed_rows import Pieces
from flexcp.layout.row_sets import cut
from flexcp.schedule import Tasks
from flexcp.schedule.exchange import OwnWork


@dataclass(frozen=True, eq=False)
class WorkProfile:
    """Pairs of each group's queries with all keys before a block, over batch and query heads."""

    before: Tensor
    """float64 [groups, batch_elements * blocks + 1] Running sums."""
    block: int
    """Keys of a block."""
    blocks: int
    """Blocks of keys of one batch element."""
    seq_len: int
    """Tokens of one batch element."""

    @classmethod
    def of(cls, grids: Sequence[BlockGrid], groups: Layout) -> WorkProfile:
        """From the tiles of the masks. A partial tile counts as the mean one of its row.

        Where row ranges are known, all keys together are exactly the pairs of a group: parts of a
        block, in which short documents begin and end, may have much more or less than their share.
        """
        cols, size = grids[0].shape[1], grids[0].block_size[1]
        width = cols * groups.batch_elements + 1
        slope = torch.zeros(groups.ranks * width, dtype=torch.float64)
        for grid in grids:
            for element in range(groups.batch_elements):
                of = (
                    grid.planes.of
                    if groups.batch_elements == 1
                    else grid.planes.of[element : element + 1]
                )
                pieces = Pieces.of(groups, element, grid.block_size[0])
                for plane, copies in enumerate(
                    torch.bincount(of.reshape(-1), minlength=len(grid.runs)).tolist()
                ):
                    if copies:
                        _add(slope, width, grid, plane, copies, pieces, element * cols)
        pairs = slope.view(groups.ranks, width).cumsum(1)[:, :-1]
        if all(row_areas(grid).planes is not None for grid in grids):
            exact, total = area_per_rank(grids, groups).double(), pairs.sum(1)
            pairs *= torch.where(total > 0, exact / total, 1.0).unsqueeze(1)
        before = torch.nn.functional.pad(pairs.cumsum(1), (1, 0))
        return cls(before, size, cols, groups.seq_len)

    def grouped(self, group_size: int) -> WorkProfile:
        """The work of groups of consecutive ranks, from that of their ranks."""
        if group_size == 1:
            return self
        before = self.before.view(-1, group_size, self.before.shape[1]).sum(1)
        return WorkProfile(before, self.block, self.blocks, self.seq_len)

    def of_tasks(self, work: Tasks, rounds: int) -> Any:
        """float64 [rounds, groups] Pairs of every round, of a schedule that leaves none out.

        Where documents meet within a block, some pairs are counted at keys that nobody needs: the
        rounds of a group are scaled to what it has to do in all.
        """
        groups, total = self.before.shape[0], self.before.numpy()[:, -1]
        pairs = self._of_keys(work.rank, work.start, work.stop).numpy()
        place = work.round.numpy() * groups + work.rank.numpy()
        by_round = np.bincount(place, pairs, minlength=rounds * groups).reshape(rounds, groups)
        have = by_round.sum(0)
        return by_round * np.where(have > 0, total / np.maximum(have, 1e-9), 1.0)

    def own(self, groups: Layout) -> OwnWork:
        """The pairs of every group's queries with its own keys, a block or a few at a time."""
        own, rows, parts = groups.owned, groups.rows, round(Objective.small**-2)
        step = self.block * max(1, int(groups.counts.max()) // (self.block * parts))
        edges = torch.arange(0, rows, step)
        which, _, start, stop = cut(own.start, own.stop, edges, edges + step)
        rank = own.rank[which]
        return OwnWork(rank, start, stop, self._of_keys(rank, start, stop), self._of_keys)

    def _of_keys(self, group: Tensor, start: Tensor, stop: Tensor) -> Tensor:
        """float64 [N] Pairs of some groups with stretches of keys, from and up to."""
        end, begin = (self._until(group.numpy(), row.numpy()) for row in (stop, start))
        return torch.from_numpy(end - begin)

    def _until(self, group: Any, row: Any) -> Any:
        """float64 [N] Pairs of some groups with all keys before some rows."""
        one = self.before.shape[1] == self.blocks + 1
        element = 0 if one else row // self.seq_len
        position = row - element * self.seq_len
        block = position // self.block
        width = np.clip(self.seq_len - block * self.block, 1, self.block)
        part = (position - block * self.block) / width
        flat = group * self.before.shape[1] + element * self.blocks + block
        values = self.before.numpy().reshape(-1)
        low = values[flat]
        high = values[np.minimum(flat + 1, values.size - 1)]
        return np.where(part > 0, low + part * (high - low), low)


def _add(
    slope: Tensor,
    width: int,
    grid: BlockGrid,
    plane: int,
    copies: int,
    pieces: Pieces,
    first_col: int,
) -> None:
    """Adds the pairs of pieces of rows, as changes from one column of tiles to the next."""
    runs = grid.runs[plane]
    size = grid.kv_axis.sizes
    columns = torch.cat([torch.zeros(1, dtype=torch.int64), size.cumsum(0)])
    length = columns[runs.stop] - columns[runs.start]
    full = runs.kind == BlockKind.FULL
    rows = grid.q_axis.sizes
    in_full = torch.zeros(runs.rows, dtype=torch.int64)
    in_full.index_add_(0, runs.row[full], (length * rows[runs.row])[full])
    tiles = torch.zeros(runs.rows, dtype=torch.int64)
    tiles.index_add_(0, runs.row[~full], (runs.stop - runs.start)[~full])
    mean = (areas_by_plane(grid)[plane] - in_full).double() / (tiles * rows).clamp(min=1)
    at, run = runs_of_rows(runs, pieces.block)
    height = (pieces.last - pieces.first)[at].double() * copies
    each = torch.where(full[run], height * size[0], height * mean[runs.row[run]])
    base = pieces.rank[at] * width + first_col
    slope.index_add_(0, base + runs.start[run], each)
    slope.index_add_(0, base + runs.stop[run], -each)
