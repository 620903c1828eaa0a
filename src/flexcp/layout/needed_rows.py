"""Which rows of keys a rank's queries see, exactly, without looking at what is clear already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flexcp.grid import BlockGrid, BlockKind
from flexcp.grid.analysis.axis import Axis
from flexcp.grid.analysis.indexing import in_parts, take
from flexcp.grid.analysis.measured import measure_mask, run_mask
from flexcp.grid.row_ranges import KeyColumn, row_ranges
from flexcp.grid.rows import runs_of_rows
from flexcp.layout.layout import Layout
from flexcp.layout.row_sets import RowSets, cut, expand, row_sets, without
from flexcp.masks import trace_mask

_MOST_PAIRS = 1 << 22
"""Pairs evaluated together."""


def rows_needed(grids: Sequence[BlockGrid], layout: Layout) -> RowSets:
    """Rows that each rank's queries see under any of the masks, and that others own.

    >>> import flexcp
    >>> from flexcp.layout.rules import contiguous
    >>> grid = flexcp.build_block_grid(flexcp.masks.sliding_window(3), 100)
    >>> rows_needed([grid], contiguous(100, 4)).of(2)
    [(47, 50)]
    """
    found = [layout.owned]
    for grid in grids:
        ranges, all_ = row_ranges(grid).planes, grid.planes.of
        for element in range(layout.batch_elements):
            chosen = all_ if layout.batch_elements == 1 else all_[element]
            for plane in torch.unique(chosen).tolist():
                if ranges is not None:
                    found += (_of_column(column, element, layout) for column in ranges[plane])
                else:
                    found.append(_of_plane(grid, plane, element, layout, joined_sets(found)))
    return without(joined_sets(found), layout.owned)


def _of_column(column: KeyColumn, element: int, layout: Layout) -> RowSets:
    """Rows that a batch element's queries see in one range of keys each."""
    offset = element * layout.seq_len
    rank, start, stop = layout.runs_in(element)
    edges = torch.cat([torch.zeros(1, dtype=torch.int64), column.breaks])
    ends = torch.cat([column.breaks, torch.full((1,), layout.seq_len)])
    which, _, begin, end = cut(start, stop, edges, ends)
    first, last = take(column.start, begin), take(column.stop, end - 1)
    return row_sets(rank[which], first + offset, last + offset)


def joined_sets(sets: Sequence[RowSets]) -> RowSets:
    """The union of several sets of each rank."""
    if len(sets) == 1:
        return sets[0]
    columns = ([s.rank for s in sets], [s.start for s in sets], [s.stop for s in sets])
    return row_sets(*(torch.cat(column) for column in columns))


@dataclass(frozen=True, eq=False)
class Pieces:
    """A rank's part of a block of rows."""

    rank: Tensor
    block: Tensor
    first: Tensor
    """First row, counted from the block's first."""
    last: Tensor
    """Row after the last, counted from the block's first."""

    @classmethod
    def of(cls, layout: Layout, element: int, block: int) -> Pieces:
        """All runs of a batch element, cut into blocks, in order of position."""
        rank, start, stop = layout.runs_in(element)
        edges = torch.arange(0, layout.seq_len, block)
        which, piece, begin, end = cut(start, stop, edges, edges + block)
        order = torch.argsort(begin)
        which, piece, begin, end = (x[order] for x in (which, piece, begin, end))
        return cls(rank[which], piece, begin - edges[piece], end - edges[piece])


def _of_plane(grid: BlockGrid, plane: int, element: int, layout: Layout, known: RowSets) -> RowSets:
    """Rows that the queries see in one plane; what is `known` need not be found again."""
    runs, size = grid.runs[plane], grid.block_size[1]
    pieces = Pieces.of(layout, element, grid.block_size[0])
    at, run = runs_of_rows(runs, pieces.block)
    offset = element * layout.seq_len
    full = runs.kind[run] == BlockKind.FULL
    whole = row_sets(
        pieces.rank[at[full]],
        runs.start[run[full]] * size + offset,
        (runs.stop[run[full]] * size).clamp(max=grid.kv_len) + offset,
    )
    found = joined_sets([known, whole])
    group, place = expand((runs.stop - runs.start)[run[~full]])
    tiles = _Tiles(pieces, at[~full][group], runs.start[run[~full]][group] + place)
    tiles = tiles.where(_open(grid, offset, tiles, found))
    for rows in ("all", "first", "last"):
        tiles, found = _decided(grid, plane, offset, tiles, rows, found)
    tiles, found = _decided_by_key(grid, plane, offset, tiles, found)
    return _looked_at(grid, plane, offset, tiles, found)


def _decided(
    grid: BlockGrid, plane: int, offset: int, tiles: _Tiles, rows: str, found: RowSets
) -> tuple[_Tiles, RowSets]:
    """What some rows of the pieces surely see or surely don't; and the tiles that remain open.

    In a block with a border between documents, the first and the last row see all there is to see.
    """
    if len(tiles) == 0:
        return tiles, found
    used, place = torch.unique(tiles.piece, return_inverse=True)
    axes = _axis(grid, tiles, used, rows), grid.kv_axis
    mask = measure_mask(trace_mask(grid.mask.mask_mod), grid.planes, *axes)
    verdict = mask.ranges(0, torch.full_like(place, plane), place, tiles.col)
    sure = tiles.where(verdict.lo)
    size = grid.block_size[1]
    begin = sure.col * size + offset
    found = joined_sets([found, row_sets(sure.rank, begin, _end(begin, size, offset, grid))])
    open_ = ~verdict.lo
    if rows == "all":
        open_ &= verdict.hi
    tiles = tiles.where(open_)
    return tiles.where(_open(grid, offset, tiles, found)), found


def _decided_by_key(
    grid: BlockGrid, plane: int, offset: int, tiles: _Tiles, found: RowSets
) -> tuple[_Tiles, RowSets]:
    """What the pieces surely see or surely don't of each single key of the tiles still open."""
    if len(tiles) == 0:
        return tiles, found
    used, place = torch.unique(tiles.piece, return_inverse=True)
    cols, column = torch.unique(tiles.col, return_inverse=True)
    size = grid.block_size[1]
    keys = (grid.kv_axis.first[cols][:, None] + torch.arange(size)).reshape(-1)
    keys = keys.clamp(max=grid.kv_start + grid.kv_len - 1)
    axes = _axis(grid, tiles, used, "all"), Axis(keys, keys, torch.ones_like(keys))
    mask = measure_mask(trace_mask(grid.mask.mask_mod), grid.planes, *axes)
    open_ = torch.zeros(len(tiles), dtype=torch.bool)
    for part in in_parts(torch.arange(len(tiles)), max(1, _MOST_PAIRS // (4 * size))):
        i = place[part].repeat_interleave(size)
        j = (column[part][:, None] * size + torch.arange(size)).reshape(-1)
        verdict = mask.ranges(0, torch.full_like(i, plane), i, j)
        inside = torch.arange(size) < grid.kv_axis.sizes[tiles.col[part]][:, None]
        seen = verdict.some_hi.view(-1, size) & inside
        open_[part] = ((verdict.hi & ~verdict.some_hi).view(-1, size) & inside).any(1)
        first = tiles.col[part] * size + offset
        found = joined_sets([found, _stretches(seen, tiles.rank[part], first)])
    tiles = tiles.where(open_)
    return tiles.where(_open(grid, offset, tiles, found)), found


def _axis(grid: BlockGrid, tiles: _Tiles, used: Tensor, rows: str) -> Axis:
    """All rows of the pieces that are used, or the first or the last of each."""
    begin, end = tiles.pieces.first[used], tiles.pieces.last[used]
    begin, end = (end - 1 if rows == "last" else begin), (begin + 1 if rows == "first" else end)
    first = grid.q_axis.first[tiles.pieces.block[used]]
    return Axis(first + begin, first + end - 1, end - begin)


def _looked_at(grid: BlockGrid, plane: int, offset: int, tiles: _Tiles, found: RowSets) -> RowSets:
    """What open tiles show, row by row, as long as anything is left to see.

    Each turn looks at twice as many rows of every tile.
    """
    if len(tiles) == 0:
        return found
    size = grid.block_size[1]
    graph = trace_mask(grid.mask.mask_mod)
    b, h = grid.planes.b[plane], grid.planes.h[plane]
    done, looks = torch.zeros_like(tiles.piece), 2
    while True:
        first = grid.q_axis.first[tiles.pieces.block[tiles.piece]] + tiles.pieces.first[tiles.piece]
        height = (tiles.pieces.last - tiles.pieces.first)[tiles.piece]
        open_ = (done < height) & _open(grid, offset, tiles, found)
        if not bool(open_.any()):
            return found
        tiles, first, height, done = tiles.where(open_), first[open_], height[open_], done[open_]
        place = torch.minimum(done[:, None] + torch.arange(looks), height[:, None] - 1)
        for part in in_parts(torch.arange(len(tiles)), max(1, _MOST_PAIRS // (size * looks))):
            q = first[part][:, None] + place[part]
            kv = grid.kv_axis.first[tiles.col[part]][:, None] + torch.arange(size)
            end = grid.kv_axis.last[tiles.col[part]][:, None]
            kv_inside = torch.minimum(kv, end)[:, None, :]
            bits = run_mask(partial(graph.evaluate, b, h, q[:, :, None], kv_inside))
            seen = bits.expand(part.numel(), looks, size).any(1) & (kv <= end)
            start = tiles.col[part] * size + offset
            found = joined_sets([found, _stretches(seen, tiles.rank[part], start)])
        done = done + looks
        looks *= 2


def _open(grid: BlockGrid, offset: int, tiles: _Tiles, found: RowSets) -> Tensor:
    """Bool Whether something of a tile's columns is not known to be needed."""
    begin = tiles.col * grid.block_size[1] + offset
    return ~_covered(found, tiles.rank, begin, _end(begin, grid.block_size[1], offset, grid))


def _end(begin: Tensor, size: int, offset: int, grid: BlockGrid) -> Tensor:
    return (begin + size).clamp(max=offset + grid.kv_len)


@dataclass(frozen=True, eq=False)
class _Tiles:
    """Tiles that pieces have."""

    pieces: Pieces
    piece: Tensor
    col: Tensor

    def __len__(self) -> int:
        return self.piece.numel()

    @property
    def rank(self) -> Tensor:
        return self.pieces.rank[self.piece]

    def where(self, chosen: Tensor) -> _Tiles:
        return _Tiles(self.pieces, self.piece[chosen], self.col[chosen])


def _covered(sets: RowSets, rank: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """Bool Whether stretches are within a set."""
    if len(sets) == 0:
        return torch.zeros_like(rank, dtype=torch.bool)
    wide = int(torch.maximum(sets.stop.max(), stop.max() if stop.numel() else sets.stop.max())) + 1
    at = torch.searchsorted(sets.rank * wide + sets.start, rank * wide + start, right=True) - 1
    near = at.clamp(min=0)
    return (at >= 0) & (sets.rank[near] == rank) & (sets.stop[near] >= stop)


def _stretches(seen: Tensor, rank: Tensor, first: Tensor) -> RowSets:
    """Runs of True, as rows that begin at `first`."""
    edges = torch.nn.functional.pad(seen.to(torch.int8), (1, 1)).diff(dim=1)
    tile, begin = torch.nonzero(edges == 1, as_tuple=True)
    end = torch.nonzero(edges == -1, as_tuple=True)[1]
    return row_sets(rank[tile], first[tile] + begin, first[tile] + end)
