"""Exact areas of partial tiles: the descent goes on below the size of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.grid.analysis.axis import Axis
from flexcp.grid.analysis.descent import MOST_PAIRS, count_pairs
from flexcp.grid.analysis.indexing import in_parts, take
from flexcp.grid.analysis.measured import MeasuredMask, measure_mask
from flexcp.grid.planes import Planes
from flexcp.grid.runs import BlockKind, Runs
from flexcp.masks import Mask, trace_mask

_SMALLEST = 16
"""Tokens along each side of the pieces of which, at last, every pair is evaluated."""
_PIECES = 8
"""Pieces that a tile, or a piece, is cut into along each side."""
_MOST_PIECES = 1 << 19
"""Pieces looked at together."""


def partial_areas(mask: Mask, planes: Planes, runs: Sequence[Runs], q: Axis, kv: Axis) -> Tensor:
    """int64 [planes, rows] Allowed pairs within the PARTIAL tiles of every row of tiles."""
    areas = torch.zeros(len(runs), len(q), dtype=torch.int64)
    if not any(bool((own.kind == BlockKind.PARTIAL).any()) for own in runs):
        return areas
    levels = _levels(mask, planes, q, kv)
    for plane, own in enumerate(runs):
        for row, col in _partial_tiles(own, _MOST_PIECES // _PIECES**2):
            found = _areas(levels, torch.full_like(row, plane), row, col)
            areas[plane].index_add_(0, row, found)
    return areas


def partial_tile_areas(
    mask: Mask, planes: Planes, plane: int, runs: Runs, q: Axis, kv: Axis
) -> Tensor:
    """int64 [T] Allowed pairs of each PARTIAL tile of a plane, row after row."""
    levels = _levels(mask, planes, q, kv)
    found = [
        _areas(levels, torch.full_like(row, plane), row, col)
        for row, col in _partial_tiles(runs, _MOST_PIECES // _PIECES**2)
    ]
    return torch.cat([*found, torch.zeros(0, dtype=torch.int64)])


@dataclass(frozen=True, eq=False)
class _Level:
    """A mask looked at in pieces of the cells of the level above."""

    mask: MeasuredMask
    per_cell: tuple[int, int]
    """Pieces of each cell, along both sides."""


def _levels(mask: Mask, planes: Planes, q: Axis, kv: Axis) -> list[_Level]:
    """Finer and finer pieces, down to those that are evaluated."""
    graph = trace_mask(mask.mask_mod)
    levels: list[_Level] = []
    while True:
        largest = max(int(axis.sizes.max()) for axis in (q, kv))
        if levels and largest <= _SMALLEST:
            return levels
        size = max(_SMALLEST, -(-largest // _PIECES))
        pieces = q.subdivided(size)
        fine = (pieces, pieces if kv is q else kv.subdivided(size))
        per_cell = (len(fine[0]) // len(q), len(fine[1]) // len(kv))
        levels.append(_Level(measure_mask(graph, planes, *fine), per_cell))
        q, kv = fine


def _areas(levels: Sequence[_Level], plane: Tensor, row: Tensor, col: Tensor) -> Tensor:
    """int64 [T] Allowed pairs of cells, from the pieces that they consist of."""
    fine, (high, wide) = levels[0].mask, levels[0].per_cell
    # Cells vary fastest, so that every operation runs over long contiguous stretches.
    i = row * high + torch.arange(high)[:, None, None]
    j = col * wide + torch.arange(wide)[None, :, None]
    shape = (high, wide, row.numel())
    surely, possibly = fine.bounds(plane, i, j)
    pairs = take(fine.q.sizes, i) * take(fine.kv.sizes, j)
    area = torch.where(surely, pairs, 0).expand(shape).flatten()
    open_ = torch.nonzero((possibly & ~surely & (pairs > 0)).expand(shape).flatten()).squeeze(1)
    i, j, plane = (take(x.expand(shape).reshape(-1), open_) for x in (i, j, plane))
    together = MOST_PAIRS // _SMALLEST**2 if len(levels) == 1 else _MOST_PIECES // _PIECES**2
    for at in in_parts(torch.arange(open_.numel()), together):
        some = take(plane, at), take(i, at), take(j, at)
        found = count_pairs(fine, *some)[0] if len(levels) == 1 else _areas(levels[1:], *some)
        area.index_copy_(0, take(open_, at), found)
    return area.view(shape).sum((0, 1))


def _partial_tiles(runs: Runs, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and columns of the PARTIAL tiles, in parts of at most `size`."""
    at = torch.nonzero(runs.kind == BlockKind.PARTIAL).squeeze(1)
    before = (runs.stop[at] - runs.start[at]).cumsum(0)
    part = torch.div(before - 1, max(size, 1), rounding_mode="floor")
    for p in torch.unique(part).tolist():
        some = at[part == p]
        chosen = Runs(
            runs.rows, runs.cols, runs.row[some], runs.start[some], runs.stop[some], runs.kind[some]
        )
        rows, cols = chosen.tiles(BlockKind.PARTIAL)
        yield from zip(in_parts(rows, size), in_parts(cols, size), strict=True)
