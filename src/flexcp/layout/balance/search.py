"""The balanced layout: equal token counts, equal work, and as little to move as that allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexcp.grid import BlockGrid
from flexcp.layout.balance.fold import fold
from flexcp.layout.layout import Layout
from flexcp.layout.needed_rows import rows_needed
from flexcp.layout.rules import contiguous, even_edges, require_ranks
from flexcp.layout.work import Work

_EVEN = 1.0175
"""Work that is less even than this is never left as it is."""
_WORTH_IT = 0.995
"""Tokens leave their plain order only for a time below this fraction."""


def balanced(grids: Sequence[BlockGrid], ranks: int, *, pairs_per_row: float = 512.0) -> Layout:
    """The layout for one or several masks on which the slowest rank is fastest.

    Ranks get token counts that differ by at most one; or, where single rows are so heavy that this
    would leave the work uneven, by at most a block. The work is the sum over all masks. If the
    sequence in plain order is as good as even, it stays (a window remains a halo exchange);
    otherwise the layout is a `fold`. Where masks differ between batch
    elements, each element gets a layout of its own.

    Args:
        grids: Block grids of the masks, over the same tokens and with the same block size.
        ranks: How many ranks share the sequence.
        pairs_per_row: How many pairs a rank computes, over all heads, in the time in which it
            receives one row of K and V.

    >>> import flexcp
    >>> window = flexcp.build_block_grid(flexcp.masks.sliding_window(100), 8192)
    >>> balanced([window], 4)
    Layout(balanced: 8192 tokens on 4 ranks, 2048 each, 4 runs)
    >>> causal = flexcp.build_block_grid(flexcp.masks.causal(), 8192)
    >>> balanced([causal], 4)
    Layout(balanced: 8192 tokens on 4 ranks, 2048 each, 7 runs)
    """
    ranks = require_ranks(ranks)
    elements = elements_that_differ(grids)
    if elements > 1:
        layouts = [_of_element(grids, ranks, b, pairs_per_row) for b in range(elements)]
        return Layout.stacked(layouts, name="balanced")
    return _of_element(grids, ranks, None, pairs_per_row)


def elements_that_differ(grids: Sequence[BlockGrid]) -> int:
    """How many batch elements there are, or 1 if all are the same under each of the masks."""
    same = [bool((grid.planes.of == grid.planes.of[:1]).all()) for grid in grids]
    return max((1 if s else grid.batch for s, grid in zip(same, grids, strict=True)), default=1)


def _of_element(
    grids: Sequence[BlockGrid], ranks: int, element: int | None, pairs_per_row: float
) -> Layout:
    work = Work.of(grids, element)
    plain = contiguous(work.seq_len, ranks)
    if _imbalance(work, plain) > _EVEN:
        return fold(work, ranks, exact_counts=element is not None)
    if _local(work, ranks):
        return _named(plain)
    folded = fold(work, ranks, exact_counts=element is not None)
    slowest = _slowest(grids, work, plain, pairs_per_row)
    if _slowest(grids, work, folded, pairs_per_row) < _WORTH_IT * slowest:
        return folded
    return _named(plain)


def _local(work: Work, ranks: int) -> bool:
    """Whether every row sees only what is near, as under a window."""
    share = work.seq_len / ranks
    for grid, planes in work.planes:
        for runs in (grid.runs[plane] for plane in planes):
            left = (runs.row - runs.start).clamp(min=0)
            right = (runs.stop - 1 - runs.row).clamp(min=0)
            if len(runs) and float(torch.maximum(left, right).max()) * work.block > 2 * share:
                return False
    return True


def _imbalance(work: Work, layout: Layout) -> float:
    """max/mean over ranks; blocks that are cut count in proportion, which is near enough here."""
    edges = even_edges(work.seq_len, layout.ranks)
    whole = torch.div(edges, work.block, rounding_mode="floor").clamp(max=work.blocks.numel() - 1)
    rows = edges - whole * work.block
    size = torch.minimum(torch.tensor(work.block), work.seq_len - whole * work.block)
    ahead = work.before[whole] + torch.div(work.blocks[whole] * rows, size, rounding_mode="floor")
    areas = ahead.diff().double()
    return float(areas.max() / areas.mean().clamp(min=1))


def _slowest(grids: Sequence[BlockGrid], work: Work, layout: Layout, pairs_per_row: float) -> float:
    areas = torch.zeros(layout.ranks, dtype=torch.int64)
    areas.index_add_(0, layout.rank, work.of_stretches(layout.start, layout.stop))
    rows = rows_needed(grids, layout).counts(layout.ranks)
    # Transfers hide behind compute; a tenth of them is taken not to.
    moved = rows.double() * pairs_per_row
    return float((torch.maximum(areas.double(), moved) + 0.1 * moved).max())


def _named(layout: Layout) -> Layout:
    return Layout(
        "balanced",
        layout.seq_len,
        layout.ranks,
        layout.batch_elements,
        layout.rank,
        layout.start,
        layout.stop,
    )
