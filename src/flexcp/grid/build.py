"""Building a BlockGrid from a mask: trace once, measure its one-axis values, descend."""

from __future__ import annotations

from flexcp.eager import run_eagerly_on_cpu
from flexcp.errors import FlexCPError, quote, whole_number
from flexcp.grid.analysis.axis import Axis
from flexcp.grid.analysis.descent import Descent, Effort
from flexcp.grid.analysis.measured import measure_mask
from flexcp.grid.grid import BlockGrid
from flexcp.grid.planes import Planes
from flexcp.grid.range_tiles import tiles_of_ranges
from flexcp.grid.row_ranges import RowRanges, read_row_ranges
from flexcp.masks import Mask, MaskMod, as_mask, trace_mask


@run_eagerly_on_cpu
def build_block_grid(
    mask: Mask | MaskMod,
    q_len: int,
    kv_len: int | None = None,
    *,
    block_size: int | tuple[int, int] = 128,
    batch: int = 1,
    heads: int = 1,
    by_rows: bool = False,
) -> BlockGrid:
    """Which tiles of the attention matrix are empty, partial or full.

    Args:
        mask: A Mask, or any FlexAttention mask_mod.
        q_len: Number of queries.
        kv_len: Number of keys; as many as queries if not given.
        block_size: Tokens of a tile along both sides, or a pair (queries, keys). Lengths need not
            be multiples of it.
        batch: Batch elements, for masks that depend on b.
        heads: Heads, for masks that depend on h.
        by_rows: Look at every query first, as planning does anyway: where each sees one range of
            keys, the tiles follow from those. The grid is the same.

    >>> from flexcp import masks
    >>> grid = build_block_grid(masks.causal() & masks.sliding_window(4096), 1 << 20)
    >>> grid.counts()
    {'empty': 66839056, 'partial': 16352, 'full': 253456}
    >>> grid.area()
    4287625216
    """
    mask = as_mask(mask)
    q_len = _require_length("q_len", q_len)
    kv_len = q_len if kv_len is None else _require_length("kv_len", kv_len)
    size = _require_block_size(block_size)
    _require_blocks(q_len, size[0])
    _require_blocks(kv_len, size[1])
    batch, heads = _require_count("batch", batch), _require_count("heads", heads)
    graph = trace_mask(mask.mask_mod)
    planes = Planes.of_mask(graph, batch, heads)
    if by_rows:
        ranges = read_row_ranges(graph, planes, range(q_len), range(kv_len))
        tiles = tiles_of_ranges(ranges, q_len, kv_len, size)
        if tiles is not None:
            grid = BlockGrid(q_len, kv_len, size, planes, tiles, mask, effort=Effort())
            grid.derived.once(RowRanges, lambda: ranges)
            return grid
    q = Axis.of_blocks(q_len, size[0])
    kv = q if (q_len, size[0]) == (kv_len, size[1]) else Axis.of_blocks(kv_len, size[1])
    descent = Descent(measure_mask(graph, planes, q, kv))
    runs = descent.run().unstacked(len(planes))
    return BlockGrid(q_len, kv_len, size, planes, runs, mask, effort=descent.effort)


def _require_length(name: str, value: object) -> int:
    fix = "leave out empty sequences"
    return whole_number(name, value, at_least=1, at_most=_MOST_TOKENS, fix=fix)


def _require_count(name: str, value: object) -> int:
    fix = f"pass {name}=1 or more"
    return whole_number(name, value, at_least=1, at_most=_MOST_PLANES, fix=fix)


def _require_block_size(block_size: object) -> tuple[int, int]:
    pair = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    fix = "pass block_size=128 or block_size=(128, 64)"
    if len(pair) != 2:
        raise FlexCPError(
            "block_size as an integer or a pair of integers (queries, keys)", quote(block_size), fix
        )
    q, kv = (whole_number("block_size", x, at_least=1, at_most=_MOST_TOKENS, fix=fix) for x in pair)
    return q, kv


def _require_blocks(length: int, size: int) -> None:
    if -(-length // size) > _MOST_BLOCKS:
        raise FlexCPError(
            f"at most {_MOST_BLOCKS:,} blocks along a side",
            f"{length:,} tokens in blocks of {size}",
            "pass a larger block_size, or fewer tokens",
        )


_MOST_TOKENS = 2**40
_MOST_BLOCKS = 2**24
"""Along one side of the matrix: two thousand million tokens in blocks of 128."""
_MOST_PLANES = 2**20
"""Batch elements, and heads."""
