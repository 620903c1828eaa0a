"""Shapes of a mask: key ranges chained into the largest slabs, in the rows of a kernel's tensors.

A causal mask becomes one trapezoid, packed documents one triangle per document, a sliding window
a triangle and a band: none of them has a partial tile left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.grid import BlockGrid
from flexcp.kernels.interface import BitTile, Plane, Shapes, Slab
from flexcp.kernels.key_ranges import KeyRanges, joined, key_ranges_of


def shapes_of(
    grid: BlockGrid, *, q_positions: Tensor | None = None, kv_positions: Tensor | None = None
) -> Shapes:
    """What a kernel has to compute for the pairs of `grid`.

    Args:
        grid: the mask's tiles.
        q_positions: int64 [Lq] global position of each query row that the kernel gets, in any
            order; by default all rows of the grid.
        kv_positions: int64 [Lkv] global position of each key that the kernel gets, ascending; by
            default all columns of the grid.

    >>> import flexcp
    >>> grid = flexcp.build_block_grid(flexcp.masks.causal(), 1000)
    >>> shapes_of(grid).planes[0].slabs
    (Slab(q0=0, q1=1000, k0=0, k1=1, k0_step=0, k1_step=1),)
    """
    return shapes_from_ranges(
        key_ranges_of(grid), grid, q_positions=q_positions, kv_positions=kv_positions
    )


def shapes_from_ranges(
    ranges: KeyRanges,
    grid: BlockGrid,
    *,
    q_positions: Tensor | None = None,
    kv_positions: Tensor | None = None,
) -> Shapes:
    """Like `shapes_of`, for ranges that are known already."""
    q_rows = _rows_in_grid(q_positions, grid.q_start, grid.q_len, "q_positions")
    kv_rows = _rows_in_grid(kv_positions, grid.kv_start, grid.kv_len, "kv_positions")
    if kv_rows is not None and bool((kv_rows.diff() <= 0).any()):
        raise FlexCPError(
            "kv_positions that ascend",
            "positions that fall or repeat",
            "sort the keys by position: their order does not matter to attention",
        )
    q_len = grid.q_len if q_rows is None else q_rows.numel()
    kv_len = grid.kv_len if kv_rows is None else kv_rows.numel()
    row, start, stop = _localised(ranges, q_rows, kv_rows)
    planes = []
    for plane in range(ranges.planes):
        first, last = torch.searchsorted(
            row, torch.tensor([plane * q_len, (plane + 1) * q_len])
        ).tolist()
        part = slice(first, last)
        slabs = chained(row[part] - plane * q_len, start[part], stop[part], q_len)
        planes.append(Plane(tuple(slabs), tuple(_tiles(ranges, plane, q_rows, kv_rows))))
    plane_of, planes = _distinct(grid.planes.of.tolist(), planes)
    return Shapes(
        q_len,
        kv_len,
        plane_of,
        tuple(planes),
        _positions(q_positions, grid.q_start, grid.q_len),
        _positions(kv_positions, grid.kv_start, grid.kv_len),
    )


def placed_together(
    parts: Sequence[tuple[int, int, Shapes]], q_positions: Tensor, kv_positions: Tensor
) -> Shapes:
    """Shapes that share no pair, as those of tensors that hold the rows of all.

    Args:
        parts: the first row and the first key of each, and its shapes.
        q_positions: int64 [Lq] position of each row of all.
        kv_positions: int64 [Lkv] position of each key of all.

    >>> from flexcp.kernels.interface import causal_shapes
    >>> two = [(0, 0, causal_shapes(3)), (3, 3, causal_shapes(3))]
    >>> [slab.q0 for slab in placed_together(two, torch.arange(6), torch.arange(6)).planes[0].slabs]
    [0, 3]
    """
    batch, heads = (max(n) for n in zip(*((x.batch, x.heads) for *_, x in parts), strict=True))
    numbers: dict[tuple[int, ...], int] = {}
    plane_of = [[0] * heads for _ in range(batch)]
    for b, h in product(range(batch), range(heads)):
        of_parts = tuple(
            x.plane_of[b if x.batch > 1 else 0][h if x.heads > 1 else 0] for *_, x in parts
        )
        plane_of[b][h] = numbers.setdefault(of_parts, len(numbers))
    planes = []
    for of_parts in numbers:
        moved = [
            _moved(shapes.planes[n], q, k)
            for n, (q, k, shapes) in zip(of_parts, parts, strict=True)
        ]
        slabs = tuple(slab for plane in moved for slab in plane.slabs)
        tiles = tuple(tile for plane in moved for tile in plane.tiles)
        planes.append(Plane(slabs, tiles))
    return Shapes(
        q_positions.numel(), kv_positions.numel(), tuple(map(tuple, plane_of)), tuple(planes),
        q_positions, kv_positions,
    )  # fmt: skip


def _moved(plane: Plane, q: int, k: int) -> Plane:
    slabs = (replace(s, q0=s.q0 + q, q1=s.q1 + q, k0=s.k0 + k, k1=s.k1 + k) for s in plane.slabs)
    tiles = (replace(t, q0=t.q0 + q, q1=t.q1 + q, k0=t.k0 + k, k1=t.k1 + k) for t in plane.tiles)
    return Plane(tuple(slabs), tuple(tiles))


def chained(row: Tensor, start: Tensor, stop: Tensor, q_len: int) -> list[Slab]:
    """The ranges of one plane, sorted by row and start, as slabs.

    The i-th range of a row continues the i-th range of the row before, if both rows have as many
    ranges. A stretch of equal steps from row to row is a slab; a row between two stretches
    belongs to the longer one.
    """
    n = row.numel()
    if n == 0:
        return []
    per_row = torch.bincount(row, minlength=q_len)
    rank = torch.arange(n) - (per_row.cumsum(0) - per_row)[row]
    order = torch.argsort(rank, stable=True)  # now each chain is consecutive
    row, start, stop, rank = row[order], start[order], stop[order], rank[order]
    linked = (
        (row[1:] == row[:-1] + 1)
        & (rank[1:] == rank[:-1])
        & (per_row[row[1:]] == per_row[row[:-1]])
    )
    steps = torch.stack([start.diff(), stop.diff()], dim=1)
    owner = _stretch_of_each(linked, steps)
    first = torch.ones(n, dtype=torch.bool)
    # A range belongs with the one before it if both are in the same stretch.
    first[1:] = ~(linked & (owner[1:] == owner[:-1]))
    heads = first.nonzero()[:, 0]
    lengths = torch.cat([heads[1:], torch.tensor([n])]) - heads
    step = torch.cat([steps, steps.new_zeros(1, 2)])[heads]
    step[lengths == 1] = 0
    columns = (row[heads], row[heads] + lengths, start[heads], stop[heads], step[:, 0], step[:, 1])
    slabs = [Slab(*numbers) for numbers in torch.stack(columns, dim=1).tolist()]
    return _stacked(slabs)


def _stretch_of_each(linked: Tensor, steps: Tensor) -> Tensor:
    """For each of n ranges, the stretch of equal steps that it belongs to; its own if none."""
    n = linked.numel() + 1
    alone = -1 - torch.arange(n)
    if n == 1:
        return alone
    changes = torch.ones(n - 1, dtype=torch.bool)
    changes[1:] = (steps[1:] != steps[:-1]).any(1) | ~linked[1:] | ~linked[:-1]
    stretch = changes.cumsum(0) - 1  # of each link
    length = torch.bincount(stretch)[stretch].masked_fill(~linked, 0)
    before = torch.cat([length.new_zeros(1), length])
    after = torch.cat([length, length.new_zeros(1)])
    stretch_before = torch.cat([stretch.new_zeros(1), stretch])
    stretch_after = torch.cat([stretch, stretch.new_zeros(1)])
    found = torch.where(before >= after, stretch_before, stretch_after)
    return torch.where((before == 0) & (after == 0), alone, found)


def _stacked(slabs: list[Slab]) -> list[Slab]:
    """Rectangles on top of each other, over the same keys, made one; sorted by row."""
    result: list[Slab] = []
    open_at: dict[tuple[int, int, int], int] = {}
    for slab in sorted(slabs, key=lambda s: (s.q0, s.k0)):
        at = open_at.pop((slab.q0, slab.k0, slab.k1), None) if slab.is_rectangle else None
        if at is not None:
            above = result[at]
            result[at] = Slab(above.q0, slab.q1, slab.k0, slab.k1)
        else:
            at = len(result)
            result.append(slab)
        if slab.is_rectangle:
            open_at[(slab.q1, slab.k0, slab.k1)] = at
    return result


def _distinct(
    plane_of: list[list[int]], planes: list[Plane]
) -> tuple[tuple[tuple[int, ...], ...], list[Plane]]:
    """Planes with the same slabs made one, and dimensions that make no difference dropped."""
    first: dict[object, int] = {}
    kept: list[Plane] = []
    new: list[int] = []
    for plane in planes:
        key: object = (plane.slabs, tuple(id(tile) for tile in plane.tiles))
        if key not in first:
            first[key] = len(kept)
            kept.append(plane)
        new.append(first[key])
    lines = [tuple(new[plane] for plane in line) for line in plane_of]
    if len(set(lines)) == 1:
        lines = lines[:1]
    if all(len(set(line)) == 1 for line in lines):
        lines = [line[:1] for line in lines]
    return tuple(lines), kept


def _localised(
    ranges: KeyRanges, q_rows: Tensor | None, kv_rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The ranges of some rows over some keys, counted in those rows and keys."""
    row, start, stop = ranges.row, ranges.start, ranges.stop
    if q_rows is not None:
        every = (torch.arange(ranges.planes)[:, None] * ranges.q_len + q_rows).reshape(-1)
        first = torch.searchsorted(row, every)
        count = torch.searchsorted(row, every, right=True) - first
        new_row = torch.repeat_interleave(torch.arange(every.numel()), count)
        taken = first[new_row] + torch.arange(new_row.numel()) - (count.cumsum(0) - count)[new_row]
        row, start, stop = new_row, start[taken], stop[taken]
    if kv_rows is not None:
        start, stop = torch.searchsorted(kv_rows, start), torch.searchsorted(kv_rows, stop)
        some = stop > start
        row, start, stop = joined(row[some], start[some], stop[some])
    return row, start, stop


def _tiles(
    ranges: KeyRanges, plane: int, q_rows: Tensor | None, kv_rows: Tensor | None
) -> list[BitTile]:
    found = []
    _, bq, bk = ranges.tile_bits.shape
    for at in (ranges.tile_plane == plane).nonzero()[:, 0].tolist():
        first_row, first_col = int(ranges.tile_row[at]), int(ranges.tile_col[at])
        height = min(bq, ranges.q_len - first_row)
        width = min(bk, ranges.kv_len - first_col)
        bits = ranges.tile_bits[at, :height, :width]
        if kv_rows is None:
            k0, k1 = first_col, first_col + width
        else:
            ends = torch.tensor([first_col, first_col + width])
            k0, k1 = torch.searchsorted(kv_rows, ends).tolist()
            bits = bits[:, kv_rows[k0:k1] - first_col]
        if k1 == k0:
            continue
        if q_rows is None:
            found.append(BitTile(first_row, first_row + height, k0, k1, bits))
            continue
        inside = ((q_rows >= first_row) & (q_rows < first_row + height)).nonzero()[:, 0]
        for run in _consecutive(inside):
            q0, q1 = int(run[0]), int(run[-1]) + 1
            found.append(BitTile(q0, q1, k0, k1, bits[q_rows[run] - first_row]))
    return [tile for tile in found if bool(tile.bits.any())]


def _consecutive(indices: Tensor) -> list[Tensor]:
    if indices.numel() == 0:
        return []
    breaks = (indices.diff() != 1).nonzero()[:, 0] + 1
    return list(torch.tensor_split(indices, breaks))


def _rows_in_grid(positions: Tensor | None, start: int, length: int, name: str) -> Tensor | None:
    if positions is None:
        return None
    rows = positions.to(device="cpu", dtype=torch.int64) - start
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= length):
        raise FlexCPError(
            f"{name} in [{start}, {start + length}), which the grid covers",
            f"positions from {int(positions.min())} to {int(positions.max())}",
            "build the grid for the whole sequence",
        )
    return rows


def _positions(positions: Tensor | None, start: int, length: int) -> Tensor | None:
    if positions is not None:
        return positions.to(torch.int64)
    return torch.arange(start, start + length) if start else None
