"""How much work rows are, over all masks, batch elements and heads of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.grid import BlockGrid
from flexcp.grid.row_areas import row_areas
from flexcp.grid.row_ranges import row_ranges
from flexcp.grid.rows import areas_by_plane, hull_of_tiles, tile_seams, token_areas
from flexcp.layout.balance.objective import Objective
from flexcp.layout.layout import Layout


@dataclass(frozen=True, eq=False)
class Work:
    """Exact areas: allowed pairs of blocks of rows, over all that one assignment of tokens is for.

    That is one batch element, or all of them: then a grid that differs between them counts once for
    each.
    """

    grids: tuple[BlockGrid, ...]
    """The masks of the plan; all with the same blocks."""
    weights: tuple[Tensor, ...]
    """int64 [planes] per grid: how many of these batch elements and heads have each plane."""
    per_token: int = 0
    """Work of every row besides, in pairs."""

    @classmethod
    def of(
        cls,
        grids: Sequence[BlockGrid],
        element: int | None = None,
        heads: range | None = None,
        *,
        pairs_per_token: int = 0,
    ) -> Work:
        """The work of one batch element or of all together; of some heads or of all.

        `pairs_per_token` is what a token of one batch element is besides attention.
        """
        _require_alike(grids)
        every = [g.planes.of for g in grids]
        chosen = every if element is None else [of[element : element + 1] for of in every]
        if heads is not None:
            chosen = [of[:, heads.start : heads.stop] for of in chosen]
        weights = tuple(
            torch.bincount(of.reshape(-1), minlength=len(g.runs))
            for g, of in zip(grids, chosen, strict=True)
        )
        elements = 1 if element is not None else max(grid.batch for grid in grids)
        return cls(tuple(grids), weights, pairs_per_token * elements)

    @property
    def planes(self) -> Iterator[tuple[BlockGrid, list[int]]]:
        """Every grid, with those of its planes that are counted."""
        for grid, weight in zip(self.grids, self.weights, strict=True):
            yield grid, torch.nonzero(weight).squeeze(1).tolist()

    @property
    def seq_len(self) -> int:
        """How many tokens the sequence has."""
        return self.grids[0].q_len

    @property
    def block(self) -> int:
        """Rows of a block."""
        return self.grids[0].block_size[0]

    @cached_property
    def blocks(self) -> Tensor:
        """int64 [n] Pairs of each block of rows."""
        return sum(
            (w[:, None] * areas_by_plane(g)).sum(0)
            for g, w in zip(self.grids, self.weights, strict=True)
        )  # type: ignore[return-value]

    def tokens(self, blocks: Tensor) -> Tensor:
        """int64 [n, block] Pairs of each row of some blocks."""
        return sum(
            (w[planes][:, None, None] * token_areas(g, blocks, planes)).sum(0)
            for (g, planes), w in zip(self.planes, self.weights, strict=True)
        )  # type: ignore[return-value]

    @cached_property
    def before(self) -> Tensor:
        """int64 [n + 1] Pairs of all blocks before each."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.blocks.cumsum(0)])

    @cached_property
    def _exact_rows(self) -> Tensor | None:
        """int64 [S + 1] Pairs of all rows before each; None if that takes a look at the tiles."""
        total = torch.empty(self.seq_len + 1, dtype=torch.int64)
        parts: list[tuple[Tensor, int]] = []
        for (grid, planes), weight in zip(self.planes, self.weights, strict=True):
            areas = row_areas(grid).planes
            if areas is None:
                return None
            parts += [(areas[plane], int(weight[plane])) for plane in planes]
        total[: 1 if parts else None] = 0
        for i, (areas, times) in enumerate(parts):
            torch.mul(areas, times, out=total[1:]) if i == 0 else total[1:].add_(areas, alpha=times)
        return total.cumsum_(0)

    @cached_property
    def before_rows(self) -> Tensor:
        """int64 [S + 1] Work of all rows before each, that of tokens included.

        Of other masks than those with row ranges it is exact at the borders of blocks, and within
        blocks that have a seam or much of the work.
        """
        pairs = self._exact_rows if self._exact_rows is not None else self._rows_by_blocks()
        return pairs + torch.arange(self.seq_len + 1) * self.per_token if self.per_token else pairs

    def _rows_by_blocks(self) -> Tensor:
        """int64 [S + 1] Pairs of all rows before each, from those of blocks."""
        size = torch.full((self.blocks.numel(),), self.block)
        size[-1] = self.seq_len - self.block * (size.numel() - 1)
        rows = (self.blocks // size).repeat_interleave(size)
        rows[size.cumsum(0) - 1] += self.blocks % size
        seams = torch.div(self.seams, self.block, rounding_mode="floor")
        limit = Objective.small**2 * float(self.before[-1]) * self.block / size.numel()
        heavy = torch.nonzero(self.blocks > limit)
        fine = torch.unique(torch.cat([seams, heavy.squeeze(1)]))
        at = fine[:, None] * self.block + torch.arange(self.block)
        inside = at < self.seq_len
        rows[at[inside]] = self.tokens(fine)[inside]
        return torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])

    def until(self, edges: Tensor) -> Tensor:
        """int64 Pairs of all rows before some positions, exactly."""
        if not bool((edges % self.block).any()):
            return self.before[torch.div(edges, self.block, rounding_mode="floor")]
        if self._exact_rows is not None:
            return self._exact_rows[edges]
        edges, back = torch.unique(edges, return_inverse=True)
        within = (edges % self.block != 0) & (edges < self.seq_len)
        block = torch.div(edges, self.block, rounding_mode="floor")
        cut_blocks, place = torch.unique(block[within], return_inverse=True)
        tokens = self.tokens(cut_blocks)
        ahead = torch.cat([torch.zeros_like(tokens[:, :1]), tokens.cumsum(1)], dim=1)
        known = self.before[block.clamp(max=self.blocks.numel())]
        known = torch.where(edges >= self.seq_len, self.before[-1], known)
        known[within] += ahead[place, edges[within] % self.block]
        return known[back]

    def of_stretches(self, start: Tensor, stop: Tensor) -> Tensor:
        """int64 Pairs of stretches of rows, exactly: cut blocks are looked at row by row."""
        return self.until(torch.cat([stop, start])).view(2, -1).diff(dim=0).neg()[0]

    @cached_property
    def hull(self) -> tuple[Tensor, Tensor]:
        """int64 [S] First key that each row sees, and the key after the last; its own is between.

        Exact where row ranges are known, else to whole tiles.
        """
        known = [(row_ranges(grid).planes, grid, planes) for grid, planes in self.planes]
        columns = [c for of, _, planes in known if of for plane in planes for c in of[plane]]
        if len(known) == len(columns) == 1 and columns[0].has_own_keys:
            return columns[0].start, columns[0].stop
        first, last = torch.arange(self.seq_len), torch.arange(1, self.seq_len + 1)
        for column in columns:
            begin, end, firsts = column.start.numpy(), column.stop.numpy(), first.numpy()
            torch.maximum(last, column.stop, out=last)
            np.minimum(firsts, begin, out=firsts, where=begin < end)
        for low, high in (hull_of_tiles(grid, at) for of, grid, at in known if of is None):
            torch.minimum(first, low, out=first)
            torch.maximum(last, high, out=last)
        return first, last

    @cached_property
    def seams(self) -> Tensor:
        """int64 [n] Positions where documents begin: tokens before and after are strangers."""
        if all(row_ranges(grid).planes is not None for grid in self.grids):
            return _uncrossed(*self.hull)
        found, *others = (tile_seams(grid, planes) for grid, planes in self.planes)
        for other in others:
            found = found[torch.isin(found, other)]
        return found


def _uncrossed(first: Tensor, last: Tensor) -> Tensor:
    """int64 [n] Positions such that no row before sees one from there on, nor the other way."""
    before, after = last.numpy(), first.numpy()
    if (before[1:] < before[:-1]).any():
        before = np.maximum.accumulate(before)
    if (after[1:] < after[:-1]).any():
        after = np.minimum.accumulate(after[::-1])[::-1]
    # No row before ends beyond its successor's first key, so that one comparison finds few.
    near = np.flatnonzero(before[:-1] <= after[1:]) + 1
    return torch.from_numpy(near[(before[near - 1] <= near) & (after[near] >= near)])


def area_per_rank(
    grids: Sequence[BlockGrid], layout: Layout, *, heads: range | None = None
) -> Tensor:
    """int64 [ranks] Allowed pairs of each rank's rows, over all masks, batch elements and heads."""
    areas = torch.zeros(layout.ranks, dtype=torch.int64)
    if layout.batch_elements == 1:
        work = Work.of(grids, None, heads).of_stretches(layout.start, layout.stop)
        return areas.index_add_(0, layout.rank, work)
    for b in range(layout.batch_elements):
        rank, *run = layout.runs_in(b)
        areas.index_add_(0, rank, Work.of(grids, b, heads).of_stretches(*run))
    return areas


def _require_alike(grids: Sequence[BlockGrid]) -> None:
    """Masks are added up block by block."""
    found = {(grid.q_len, grid.kv_len, grid.block_size) for grid in grids}
    if len(found) != 1:
        raise FlexCPError(
            "one or several block grids over the same tokens, with the same block size",
            ", ".join(f"{q} x {kv} tokens in blocks of {size}" for q, kv, size in sorted(found))
            or "none",
            "build all of them with the same lengths and the same block_size",
        )
