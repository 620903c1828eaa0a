"""Key ranges: the keys that each query row sees, as few ranges, at the precision of tokens.

Most masks say them by their comparisons (`grid/row_ranges.py`). Of other masks, a BlockGrid knows
tiles: partial ones are evaluated, and what every row sees is joined across tile borders. Tiles
without a pattern (many short ranges in a row) keep their bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.grid import BlockGrid, BlockKind
from flexcp.grid.row_ranges import KeyColumn, row_ranges
from flexcp.masks.graph import MaskGraph
from flexcp.masks.trace import trace_mask

_CHUNK_PAIRS = 1 << 24
"""Pairs evaluated at a time, which bounds the memory."""
_RANGES_PER_ROW = 2
"""A tile with more ranges than this in its rows, on average, keeps its bits."""


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """The ranges of keys that each row of each plane of a grid sees, counted within the grid."""

    planes: int
    q_len: int
    kv_len: int
    row: Tensor
    """int64 [n] plane * q_len + row of each range; ascending."""
    start: Tensor
    """int64 [n] First key of the range; ascending within a row, with a gap before the next."""
    stop: Tensor
    """int64 [n] One past its last key."""
    tile_plane: Tensor
    """int64 [t] Plane of each tile that keeps its bits; tiles are sorted by plane, row, column."""
    tile_row: Tensor
    """int64 [t] First row of the tile."""
    tile_col: Tensor
    """int64 [t] First column of the tile."""
    tile_bits: Tensor
    """bool [t, bq, bk] The bits; False beyond the ends of the grid."""


def key_ranges_of(grid: BlockGrid) -> KeyRanges:
    """What each row of `grid` sees, from its mask's comparisons or from its tiles."""
    known = row_ranges(grid).planes
    return _of_tiles(grid) if known is None else _of_columns(grid, known)


def _of_columns(grid: BlockGrid, planes: tuple[tuple[KeyColumn, ...], ...]) -> KeyRanges:
    """From one or a few ranges for every row of every plane."""
    found = [torch.zeros(3, 0, dtype=torch.int64)]
    every = torch.arange(grid.q_len)
    for plane, columns in enumerate(planes):
        for column in columns:
            some = column.start < column.stop
            parts = (plane * grid.q_len + every[some], column.start[some], column.stop[some])
            found.append(torch.stack(parts))
    row, start, stop = torch.cat(found, dim=1).unbind(0)
    if any(len(columns) > 1 for columns in planes):  # else they are in order, and none touch
        row, start, stop = joined(row, start, stop)
    none = torch.zeros(0, dtype=torch.int64)
    bits = torch.zeros(0, *grid.block_size, dtype=torch.bool)
    sizes = (len(planes), grid.q_len, grid.kv_len)
    return KeyRanges(*sizes, row, start, stop, none, none, none, bits)


def _of_tiles(grid: BlockGrid) -> KeyRanges:
    """Evaluates the partial tiles of `grid` and joins what each row sees into ranges."""
    bq, bk = grid.block_size
    graph = trace_mask(grid.mask.mask_mod)
    found = [_of_full_runs(grid, plane) for plane in range(len(grid.runs))]
    tiles = torch.cat([_partial_tiles(grid, plane) for plane in range(len(grid.runs))])
    kept = [(tiles[:0], torch.zeros(0, bq, bk, dtype=torch.bool))]
    step = max(1, _CHUNK_PAIRS // (bq * bk))
    for first in range(0, tiles.shape[0], step):
        chunk = tiles[first : first + step]
        bits = _evaluate(grid, graph, chunk)
        patterned, irregular = _split_by_pattern(bits)
        found.append(_of_bits(grid, chunk[patterned], bits[patterned]))
        kept.append((chunk[irregular], bits[irregular]))
    row, start, stop = (torch.cat(parts) for parts in zip(*found, strict=True))
    row, start, stop = joined(row, start, stop)
    where, bits = (torch.cat(parts) for parts in zip(*kept, strict=True))
    return KeyRanges(
        len(grid.runs),
        grid.q_len,
        grid.kv_len,
        row,
        start,
        stop,
        where[:, 0],
        where[:, 1] * bq,
        where[:, 2] * bk,
        bits,
    )


def _of_full_runs(grid: BlockGrid, plane: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every row of a run of full tiles sees all of its columns."""
    bq, bk = grid.block_size
    runs = grid.runs[plane]
    full = runs.kind == int(BlockKind.FULL)
    start = runs.start[full] * bk
    stop = (runs.stop[full] * bk).clamp(max=grid.kv_len)
    rows = runs.row[full][:, None] * bq + torch.arange(bq)
    inside = rows < grid.q_len
    return (
        plane * grid.q_len + rows[inside],
        start[:, None].expand_as(rows)[inside],
        stop[:, None].expand_as(rows)[inside],
    )


def _partial_tiles(grid: BlockGrid, plane: int) -> Tensor:
    """int64 [n, 3] Plane, tile row and tile column of each partial tile, in that order."""
    runs = grid.runs[plane]
    partial = runs.kind == int(BlockKind.PARTIAL)
    start, widths = runs.start[partial], (runs.stop - runs.start)[partial]
    run = torch.repeat_interleave(torch.arange(widths.numel()), widths)
    column = start[run] + torch.arange(run.numel()) - (widths.cumsum(0) - widths)[run]
    return torch.stack([torch.full_like(column, plane), runs.row[partial][run], column], dim=1)


def _evaluate(grid: BlockGrid, graph: MaskGraph, tiles: Tensor) -> Tensor:
    """The mask on tiles, bool [n, bq, bk]; False beyond the ends of the grid."""
    bq, bk = grid.block_size
    b = grid.planes.b[tiles[:, 0]][:, None, None]
    h = grid.planes.h[tiles[:, 0]][:, None, None]
    q = (tiles[:, 1] * bq)[:, None, None] + torch.arange(bq)[None, :, None]
    kv = (tiles[:, 2] * bk)[:, None, None] + torch.arange(bk)[None, None, :]
    # Indices beyond the end are out of bounds for captured tensors: repeat the last one.
    bits = graph.evaluate(
        b,
        h,
        q.clamp(max=grid.q_len - 1) + grid.q_start,
        kv.clamp(max=grid.kv_len - 1) + grid.kv_start,
    )
    return bits & (q < grid.q_len) & (kv < grid.kv_len)


def _split_by_pattern(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Which tiles have few ranges per row, and which do not."""
    begins = bits.clone()
    begins[:, :, 1:] &= ~bits[:, :, :-1]
    few = begins.sum(dim=(1, 2)) <= _RANGES_PER_ROW * bits.shape[1]
    return few.nonzero()[:, 0], (~few).nonzero()[:, 0]


def _of_bits(grid: BlockGrid, tiles: Tensor, bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The ranges in the rows of tiles."""
    bq, bk = grid.block_size
    edges = torch.nn.functional.pad(bits.to(torch.int8), (1, 1)).diff(dim=-1)
    begin, end = (edges == 1).nonzero(), (edges == -1).nonzero()  # in the same order
    tile, row = begin[:, 0], begin[:, 1]
    flat = tiles[tile, 0] * grid.q_len + tiles[tile, 1] * bq + row
    first = tiles[tile, 2] * bk
    return flat, first + begin[:, 2], first + end[:, 2]


def joined(row: Tensor, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ranges sorted by row, those that touch made one."""
    if row.numel() == 0:
        return row, start, stop
    order = torch.argsort(start, stable=True)
    order = order[torch.argsort(row[order], stable=True)]
    row, start, stop = row[order], start[order], stop[order]
    opens = torch.ones_like(row, dtype=torch.bool)
    opens[1:] = (row[1:] != row[:-1]) | (start[1:] != stop[:-1])
    closes = torch.ones_like(opens)
    closes[:-1] = opens[1:]
    return row[opens], start[opens], stop[closes]
