"""Tiles of masks whose queries see one range of keys each: read off the ranges, exactly."""

from __future__ import annotations

import numpy as np
import torch

from flexcp.grid.row_ranges import KeyColumn, RowRanges
from flexcp.grid.runs import BlockKind, Runs, joined


def tiles_of_ranges(
    ranges: RowRanges, q_len: int, kv_len: int, block_size: tuple[int, int]
) -> tuple[Runs, ...] | None:
    """The tiles of every plane; None if ranges are unknown, or some rows have several.

    >>> import flexcp
    >>> from flexcp.grid.row_ranges import row_ranges
    >>> grid = flexcp.build_block_grid(flexcp.masks.causal(), 12, block_size=4)
    >>> tiles = tiles_of_ranges(row_ranges(grid), 12, 12, (4, 4))
    >>> tiles[0].equals(grid.runs[0])
    True
    """
    if ranges.planes is None or any(len(columns) > 1 for columns in ranges.planes):
        return None
    sizes = (-(-q_len // block_size[0]), -(-kv_len // block_size[1]))
    return tuple(_tiles(columns, q_len, kv_len, block_size, *sizes) for columns in ranges.planes)


def _tiles(
    columns: tuple[KeyColumn, ...],
    q_len: int,
    kv_len: int,
    block_size: tuple[int, int],
    rows: int,
    cols: int,
) -> Runs:
    if not columns:
        none = torch.zeros(0, dtype=torch.int64)
        return Runs(rows, cols, none, none, none, none.to(torch.int8))
    high, wide = block_size
    starts, stops = columns[0].start.numpy(), columns[0].stop.numpy()
    blocks = np.arange(rows) * high
    first = np.union1d(blocks, columns[0].breaks.numpy())  # pieces of rows whose ranges go on
    last = np.append(first[1:], q_len) - 1
    filled, row = starts[first] < stops[first], first // high
    # All of a block's rows see what lies between the last first key and the first last one.
    opens = np.searchsorted(first, blocks)
    inner = np.maximum.reduceat(np.where(filled, starts[last], kv_len), opens)
    outer = np.minimum.reduceat(np.where(filled, stops[first], 0), opens)
    full_start = -(-inner // wide)
    full_stop = np.maximum(np.where(outer == kv_len, cols, outer // wide), full_start)
    # The rows of a piece together see all keys from its first to its last.
    row, begin = row[filled], starts[first[filled]] // wide
    end = -(-stops[last[filled]] // wide)
    order = np.argsort(row * (cols + 1) + begin, kind="stable")
    row, begin, end = row[order], begin[order], end[order]
    covered = np.maximum.accumulate(row * (cols + 1) + end)
    new = np.append(True, (row * (cols + 1) + begin)[1:] > covered[:-1])
    row, begin = row[new], begin[new]
    end = covered[np.append(np.flatnonzero(new)[1:], new.size) - 1] - row * (cols + 1)
    middle = np.clip(full_start[row], begin, end)
    after = np.clip(full_stop[row], middle, end)
    parts = ((begin, middle, BlockKind.PARTIAL), (middle, after, BlockKind.FULL))
    return joined(
        [
            Runs(
                rows,
                cols,
                torch.from_numpy(row),
                torch.from_numpy(a),
                torch.from_numpy(b),
                torch.full((row.size,), int(kind), dtype=torch.int8),
            )
            for a, b, kind in (*parts, (after, end, BlockKind.PARTIAL))
        ]
    )
