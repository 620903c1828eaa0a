"""What single rows of a grid see: exact areas, and links between neighbouring tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexcp.grid.analysis.axis import Axis
from flexcp.grid.analysis.descent import Descent, count_pairs
from flexcp.grid.analysis.indexing import in_parts
from flexcp.grid.analysis.measured import MeasuredMask, measure_mask
from flexcp.grid.grid import BlockGrid
from flexcp.grid.planes import Planes
from flexcp.grid.row_areas import row_areas
from flexcp.grid.runs import BlockKind, Runs
from flexcp.masks import trace_mask

_MOST_PAIRS = 1 << 22
"""Pairs evaluated together."""


def token_areas(grid: BlockGrid, blocks: Tensor, planes: Sequence[int] | None = None) -> Tensor:
    """int64 [planes, n, bq] Allowed pairs of every query in some rows of tiles, exactly.

    Args:
        grid: The mask.
        blocks: int64 [n] The rows of tiles.
        planes: Which of its planes; all of them by default.

    >>> import flexcp
    >>> grid = flexcp.build_block_grid(flexcp.masks.causal(), 5, block_size=2)
    >>> token_areas(grid, torch.tensor([1, 2]))
    tensor([[[3, 4],
             [5, 0]]])
    """
    bq = grid.block_size[0]
    chosen = list(range(len(grid.runs)) if planes is None else planes)
    areas = torch.zeros(len(chosen), blocks.numel(), bq, dtype=torch.int64)
    if areas.numel() == 0:
        return areas
    by_token = row_areas(grid).planes
    if by_token is not None:
        rows = blocks[:, None] * bq + torch.arange(bq)
        return torch.where(
            rows < grid.q_len, by_token[chosen][:, rows.clamp(max=grid.q_len - 1)], 0
        )
    inside = torch.arange(bq) < grid.q_axis.sizes[blocks][:, None]
    widths = torch.cat([torch.zeros(1, dtype=torch.int64), grid.kv_axis.sizes.cumsum(0)])
    row = (grid.q_axis.first[blocks][:, None] + torch.arange(bq))[inside]
    of_row = torch.nonzero(inside)[:, 0]
    fine = measure_mask(
        trace_mask(grid.mask.mask_mod),
        Planes(grid.planes.b[chosen], grid.planes.h[chosen], grid.planes.of),
        Axis(row, row, torch.ones_like(row)),
        grid.kv_axis,
    )
    single = Descent(fine).run().unstacked(len(chosen))
    for plane, own in enumerate(areas):
        runs = grid.runs[chosen[plane]]
        which, run = runs_of_rows(runs, blocks)
        full = runs.kind[run] == BlockKind.FULL
        pairs = widths[runs.stop[run]] - widths[runs.start[run]]
        whole = torch.zeros(blocks.numel(), dtype=torch.int64)
        whole.index_add_(0, which[full], pairs[full])
        # Only within PARTIAL tiles does the mask itself decide.
        decided = _overlaps(single[plane], of_row, which[~full], runs, run[~full])
        per_row = whole[of_row].index_add_(0, *_areas(fine, plane, widths, *decided))
        own[inside] = per_row
    return areas


def _overlaps(
    single: Runs, of_row: Tensor, which: Tensor, runs: Runs, run: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs of single rows, cut to the runs of tiles that are given for their block."""
    wide = single.cols + 1
    key = which * wide + runs.start[run]
    stop = which * wide + runs.stop[run]
    base = of_row[single.row] * wide
    begin, end = base + single.start, base + single.stop
    first = torch.searchsorted(stop, begin, right=True)
    last = torch.searchsorted(key, end)
    sizes = (last - first).clamp(min=0)
    at = torch.repeat_interleave(torch.arange(len(single)), sizes)
    piece = first[at] + torch.arange(at.numel()) - (sizes.cumsum(0) - sizes)[at]
    left = torch.maximum(begin[at], key[piece]) - base[at]
    right = torch.minimum(end[at], stop[piece]) - base[at]
    return single.row[at], left, right, single.kind[at]


def _areas(
    fine: MeasuredMask,
    plane: int,
    widths: Tensor,
    row: Tensor,
    start: Tensor,
    stop: Tensor,
    kind: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rows, and the pairs of their runs."""
    full = kind == BlockKind.FULL
    partial = torch.nonzero(~full).squeeze(1)
    sizes = (stop - start)[partial]
    at = torch.repeat_interleave(partial, sizes)
    col = start[at] + torch.arange(at.numel())
    col -= (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    found = torch.zeros(at.numel(), dtype=torch.int64)
    widest = int(fine.kv.sizes.max())
    for part in in_parts(torch.arange(at.numel()), _MOST_PAIRS // widest):
        which = torch.full_like(part, plane)
        found[part] = count_pairs(fine, which, row[at[part]], col[part])[0]
    pairs = (widths[stop] - widths[start])[full]
    return torch.cat([row[full], row[at]]), torch.cat([pairs, found])


def areas_by_plane(grid: BlockGrid) -> Tensor:
    """int64 [planes, rows] Allowed pairs of every row of tiles, once for each pattern."""
    by_token = row_areas(grid).planes
    if by_token is None:
        return grid._plane_areas
    size = grid.block_size[0]
    whole = grid.q_len - grid.q_len % size  # a copy with a last whole block would take longer
    found = by_token[:, :whole].unflatten(1, (-1, size)).sum(2) if whole else by_token[:, :0]
    rest = by_token[:, whole:].sum(1, keepdim=True)
    return torch.cat([found, rest], dim=1) if whole < grid.q_len else found


def runs_of_rows(runs: Runs, rows: Tensor) -> tuple[Tensor, Tensor]:
    """For some rows of tiles: place in `rows`, and index of the run, of each of their runs."""
    first, last = runs.row_ptr[rows], runs.row_ptr[rows + 1]
    which = torch.repeat_interleave(torch.arange(rows.numel()), last - first)
    before = (last - first).cumsum(0) - (last - first)
    return which, first[which] + torch.arange(which.numel()) - before[which]


def unlinked_neighbours(grid: BlockGrid, planes: Sequence[int] | None = None) -> Tensor:
    """int64 [n] Positions t such that t and t - 1 never see each other, in either direction.

    Documents, chunks and branches begin at such positions.

    Args:
        grid: The mask.
        planes: Those of its planes in which they don't; all of them by default.

    >>> import flexcp
    >>> unlinked_neighbours(flexcp.build_block_grid(flexcp.masks.document(lengths=[3, 2]), 5))
    tensor([3])
    """
    graph = trace_mask(grid.mask.mask_mod)
    later = torch.arange(1, min(grid.q_len, grid.kv_len))
    for plane in range(len(grid.runs)) if planes is None else planes:
        b, h = grid.planes.b[plane], grid.planes.h[plane]
        strangers = [later[:0]]
        for t in in_parts(later, _MOST_PAIRS):
            q, kv = t + grid.q_start, t + grid.kv_start
            linked = graph.evaluate(b, h, q, kv - 1) | graph.evaluate(b, h, q - 1, kv)
            strangers.append(t[~linked.expand(t.shape)])
        later = torch.cat(strangers)
    return later


def hull_of_tiles(grid: BlockGrid, planes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """int64 [q_len] First key of the tiles that each row looks into, and the key after the last."""
    height, width = grid.block_size
    first, last = (
        (x * width).repeat_interleave(height)[: grid.q_len] for x in _tile_hull(grid, planes)
    )
    return first, last.clamp(max=grid.kv_len)


def tile_seams(grid: BlockGrid, planes: Sequence[int]) -> Tensor:
    """int64 [n] Where documents begin, by neighbours that are strangers, and by tiles."""
    found = unlinked_neighbours(grid, planes)
    return found[
        _bridges(grid, planes)[torch.div(found, grid.block_size[0], rounding_mode="floor")]
    ]


def _tile_hull(grid: BlockGrid, planes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """int64 [rows] First column of tiles, and the one after the last, of each row of tiles."""
    rows, cols = grid.shape
    first, last = torch.full((rows,), cols), torch.zeros(rows, dtype=torch.int64)
    for runs in (grid.runs[plane] for plane in planes):
        first.scatter_reduce_(0, runs.row, runs.start, "amin")
        last.scatter_reduce_(0, runs.row, runs.stop, "amax")
    return first, last


def _bridges(grid: BlockGrid, planes: Sequence[int]) -> Tensor:
    """Per block: whether all that is before it and all that is after meet in it at most."""
    rows, cols = grid.shape
    first, last = _tile_hull(grid, planes)
    after = torch.cat([first[1:], torch.full((1,), cols)])
    earliest_after = after.flip(0).cummin(0).values.flip(0)
    before = torch.cat([torch.zeros(1, dtype=torch.int64), last[:-1]])
    latest_before = before.cummax(0).values - 1
    here = torch.arange(rows)
    meets = torch.ones(max(rows, cols), dtype=torch.bool)
    meets[:rows] = (earliest_after >= here) & (latest_before <= here)
    return meets
