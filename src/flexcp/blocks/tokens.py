"""What single rows of a grid see: exact areas, and links between neighbouring tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.blocks.grid import BlockGrid
from flexcp.blocks.runs import BlockKind, Runs, in_parts
from flexcp.masks import trace_mask
from flexcp.masks.graph import MaskGraph

_MOST_PAIRS = 1 << 22
"""Pairs evaluated together."""


def tile_bits(grid: BlockGrid, plane: int, row: Tensor, col: Tensor) -> Tensor:
    """Bool [n, bq, bk] The pairs of some tiles of one plane; False beyond the grid's ends.

    >>> import flexcp
    >>> grid = flexcp.build_block_grid(flexcp.masks.causal(), 5, block_size=2)
    >>> tile_bits(grid, 0, torch.tensor([1]), torch.tensor([1])).int()
    tensor([[[1, 0],
             [1, 1]]], dtype=torch.int32)
    """
    return _bits(grid, trace_mask(grid.mask.mask_mod), plane, row, col)


def token_areas(grid: BlockGrid, blocks: Tensor) -> Tensor:
    """int64 [planes, n, bq] Allowed pairs of every query in some rows of tiles, exactly.

    >>> import flexcp
    >>> grid = flexcp.build_block_grid(flexcp.masks.causal(), 5, block_size=2)
    >>> token_areas(grid, torch.tensor([1, 2]))
    tensor([[[3, 4],
             [5, 0]]])
    """
    bq = grid.block_size[0]
    areas = torch.zeros(len(grid.runs), blocks.numel(), bq, dtype=torch.int64)
    if blocks.numel() == 0:
        return areas
    rows = grid.q_axis.sizes[blocks]
    inside = torch.arange(bq) < rows[:, None]
    widths = torch.cat([torch.zeros(1, dtype=torch.int64), grid.kv_axis.sizes.cumsum(0)])
    graph = trace_mask(grid.mask.mask_mod)
    for plane, (own, runs) in enumerate(zip(areas, grid.runs, strict=True)):
        which, run = runs_of_rows(runs, blocks)
        full = runs.kind[run] == BlockKind.FULL
        pairs = widths[runs.stop[run]] - widths[runs.start[run]]
        whole = torch.zeros(blocks.numel(), dtype=torch.int64)
        whole.index_add_(0, which[full], pairs[full])
        own += torch.where(inside, whole[:, None], 0)
        at, col = _columns(runs, run[~full])
        at = which[~full][at]
        for part in in_parts(torch.arange(at.numel()), max(1, _MOST_PAIRS // (bq * bq))):
            bits = _bits(grid, graph, plane, blocks[at[part]], col[part])
            own.index_add_(0, at[part], bits.sum(2))
    return areas


def runs_of_rows(runs: Runs, rows: Tensor) -> tuple[Tensor, Tensor]:
    """For some rows of tiles: place in `rows`, and index of the run, of each of their runs."""
    first, last = runs.row_ptr[rows], runs.row_ptr[rows + 1]
    which = torch.repeat_interleave(torch.arange(rows.numel()), last - first)
    before = (last - first).cumsum(0) - (last - first)
    return which, first[which] + torch.arange(which.numel()) - before[which]


def unlinked_neighbours(grid: BlockGrid) -> Tensor:
    """int64 [n] Positions t such that t and t - 1 never see each other, in either direction.

    Documents, chunks and branches begin at such positions.

    >>> import flexcp
    >>> unlinked_neighbours(flexcp.build_block_grid(flexcp.masks.document(lengths=[3, 2]), 5))
    tensor([3])
    """
    graph = trace_mask(grid.mask.mask_mod)
    later = torch.arange(1, min(grid.q_len, grid.kv_len))
    linked = torch.zeros(later.numel(), dtype=torch.bool)
    for b, h in zip(grid.planes.b, grid.planes.h, strict=True):
        for at in in_parts(torch.arange(later.numel()), _MOST_PAIRS):
            q, kv = later[at] + grid.q_start, later[at] + grid.kv_start
            linked[at] |= graph.evaluate(b, h, q, kv - 1) | graph.evaluate(b, h, q - 1, kv)
    return later[~linked]


def _columns(runs: Runs, run: Tensor) -> tuple[Tensor, Tensor]:
    """For some runs: place in `run`, and column, of each of their tiles."""
    sizes = runs.stop[run] - runs.start[run]
    which = torch.repeat_interleave(torch.arange(run.numel()), sizes)
    before = sizes.cumsum(0) - sizes
    return which, runs.start[run][which] + torch.arange(which.numel()) - before[which]


def _bits(grid: BlockGrid, graph: MaskGraph, plane: int, row: Tensor, col: Tensor) -> Tensor:
    q = grid.q_axis.first[row][:, None, None] + torch.arange(grid.block_size[0])[:, None]
    kv = grid.kv_axis.first[col][:, None, None] + torch.arange(grid.block_size[1])
    q_end, kv_end = grid.q_start + grid.q_len, grid.kv_start + grid.kv_len
    # Indices beyond the end are out of bounds for captured tensors: repeat the last one.
    allowed = graph.evaluate(
        grid.planes.b[plane], grid.planes.h[plane], q.clamp(max=q_end - 1), kv.clamp(max=kv_end - 1)
    )
    return allowed & (q < q_end) & (kv < kv_end)
