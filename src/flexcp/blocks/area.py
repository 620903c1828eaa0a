"""Exact areas of partial tiles: the descent goes on below the size of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flexcp.blocks.axis import Axis
from flexcp.blocks.descent import count_pairs
from flexcp.blocks.measured import MeasuredMask, Planes, measure_mask
from flexcp.blocks.pick import in_parts, pick
from flexcp.blocks.runs import BlockKind, Runs
from flexcp.masks import Mask, trace_mask

_PIECE = 16
"""Tokens along each side of the pieces that a partial tile is cut into."""
_MOST_PIECES = 1 << 19
"""Pieces looked at together."""
_MOST_PAIRS = 1 << 20
"""Pairs evaluated together: few enough that intermediate results stay in the cache."""


def partial_areas(mask: Mask, planes: Planes, runs: Sequence[Runs], q: Axis, kv: Axis) -> Tensor:
    """int64 [planes, rows] Allowed pairs within the PARTIAL tiles of every row of tiles."""
    areas = torch.zeros(len(runs), len(q), dtype=torch.int64)
    if not any(bool((own.kind == BlockKind.PARTIAL).any()) for own in runs):
        return areas
    pieces = q.subdivided(_PIECE)
    fine = measure_mask(
        trace_mask(mask.mask_mod), planes, pieces, pieces if kv is q else kv.subdivided(_PIECE)
    )
    per_tile = (len(fine.q) // len(q), len(fine.kv) // len(kv))
    for plane, own in enumerate(runs):
        for row, col in _partial_tiles(own, _MOST_PIECES // (per_tile[0] * per_tile[1])):
            found = _areas(fine, torch.full_like(row, plane), row, col, per_tile)
            areas[plane].index_add_(0, row, found)
    return areas


def _areas(
    fine: MeasuredMask, plane: Tensor, row: Tensor, col: Tensor, per_tile: tuple[int, int]
) -> Tensor:
    """int64 [T] Allowed pairs of tiles, from the pieces that they consist of."""
    high, wide = per_tile
    # Tiles vary fastest, so that every operation runs over long contiguous stretches.
    i = row * high + torch.arange(high)[:, None, None]
    j = col * wide + torch.arange(wide)[None, :, None]
    shape = (high, wide, row.numel())
    surely, possibly = fine.bounds(plane, i, j)
    pairs = pick(fine.q.sizes, i) * pick(fine.kv.sizes, j)
    area = torch.where(surely, pairs, 0).expand(shape).flatten()
    open_ = torch.nonzero((possibly & ~surely).expand(shape).flatten()).squeeze(1)
    i, j, plane = (pick(x.expand(shape).reshape(-1), open_) for x in (i, j, plane))
    for at in in_parts(torch.arange(open_.numel()), _MOST_PAIRS // (_PIECE * _PIECE)):
        found = count_pairs(fine, pick(plane, at), pick(i, at), pick(j, at))[0]
        area.index_copy_(0, pick(open_, at), found)
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
