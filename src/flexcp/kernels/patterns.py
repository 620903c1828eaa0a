"""Bit patterns of partial tiles: a 32-bit word of each row per 32 columns, and none kept twice."""

from __future__ import annotations

import torch
from torch import Tensor

_TILES_AT_ONCE = 4096
"""Partial tiles whose words are made at a time: 16 MB at 128 x 128."""


def distinct_patterns(tiles: int, stretches: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """The number of each partial tile's pattern, and the patterns, int32 [n, rows, words].

    Args:
        tiles: how many partial tiles there are.
        stretches: int64 [7, m], sorted by tile: which tile; first row, rows, start and stop of the
            keys in the first row, and by how much they move from row to row.
        rows: of a tile.
        cols: of a tile.
    """
    like, kept = _looking_alike(tiles, stretches, cols)
    tile, *rest = stretches
    chosen = torch.zeros(tiles, dtype=torch.bool).index_fill_(0, kept, True)
    renumbered = (chosen.cumsum(0) - 1)[tile]
    stretches = torch.stack([renumbered, *rest])[:, chosen[tile]]
    like = (chosen.cumsum(0) - 1)[kept][like]
    tiles, words = kept.numel(), -(-cols // 32)
    ends = torch.arange(0, tiles + _TILES_AT_ONCE, _TILES_AT_ONCE).clamp(max=tiles)
    cuts = torch.searchsorted(stretches[0].contiguous(), ends)
    found, numbers, known = [], [], 0
    for i in range(ends.numel() - 1):
        begin, end = int(ends[i]), int(ends[i + 1])
        packed = _packed(stretches[:, cuts[i] : cuts[i + 1]], begin, end - begin, rows, cols)
        first, number = _distinct_rows(packed.flatten(1))
        found.append(packed[first])
        numbers.append(number + known)
        known += first.numel()
    if not found:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, rows, words, dtype=torch.int32)
    patterns = torch.cat(found)
    first, number = _distinct_rows(patterns.flatten(1))
    return number[torch.cat(numbers)][like], patterns[first]


_FEW = 4
"""Tiles of at most so many stretches are compared before their bits are made."""


def _looking_alike(tiles: int, stretches: Tensor, cols: int) -> tuple[Tensor, Tensor]:
    """Which kind each tile is, by its stretches alone; and the first tile of each kind."""
    tile, first, rows, start, stop, start_step, stop_step = stretches
    start = torch.where(start_step == 0, start.clamp(min=0), start)
    stop = torch.where(stop_step == 0, stop.clamp(max=cols), stop)
    _, number = _distinct_rows(torch.stack([first, rows, start, stop, start_step, stop_step], 1))
    counts = torch.bincount(tile, minlength=tiles)
    place = torch.arange(tile.numel()) - (counts.cumsum(0) - counts)[tile]
    kinds = torch.full((tiles, _FEW), -1)
    few = place < _FEW
    kinds[tile[few], place[few]] = number[few]
    many = (counts > _FEW).nonzero()[:, 0]
    kinds[many, 0] = -2 - many
    kept, like = _distinct_rows(kinds)
    return like, kept


def _distinct_rows(table: Tensor) -> tuple[Tensor, Tensor]:
    """Where each distinct row of a table is first, and which of them each row is.

    Rows are told apart by a hash, which is then checked; comparing them all takes a hundred times
    as long.
    """
    factors = torch.randint(
        -(2**62), 2**62, (table.shape[1],), generator=torch.Generator().manual_seed(0)
    )
    _, number = (table.to(torch.int64) * factors).sum(1).unique(return_inverse=True)
    first = _first_of_each(number)
    if not torch.equal(table[first][number], table):  # two rows with one hash
        _, number = table.unique(dim=0, return_inverse=True)
        first = _first_of_each(number)
    return first, number


def _first_of_each(number: Tensor) -> Tensor:
    found = torch.full((int(number.max()) + 1 if number.numel() else 0,), number.numel())
    return found.scatter_reduce(0, number, torch.arange(number.numel()), "amin")


def _packed(stretches: Tensor, first_tile: int, tiles: int, rows: int, cols: int) -> Tensor:
    """int32 [tiles, rows, words] The bits of some tiles."""
    words = -(-cols // 32)
    tile, first, count, start, stop, start_step, stop_step = stretches
    of = torch.repeat_interleave(torch.arange(tile.numel()), count)
    i = torch.arange(of.numel()) - (count.cumsum(0) - count)[of]
    left = 32 * torch.arange(words)
    right = (left + 32).clamp(max=cols)
    low = torch.maximum((start[of] + i * start_step[of])[:, None], left) - left
    high = torch.minimum((stop[of] + i * stop_step[of])[:, None], right) - left
    one = torch.ones((), dtype=torch.int64)
    bits = torch.where(high > low, (one << high.clamp(0, 32)) - (one << low.clamp(0, 32)), 0)
    total = torch.zeros(tiles * rows, words, dtype=torch.int64)
    # No pair is covered twice, so that a sum is a union.
    total.index_add_(0, (tile[of] - first_tile) * rows + first[of] + i, bits)
    return _as_int32(total).view(tiles, rows, words)


def transposed(patterns: Tensor, rows: int, cols: int) -> Tensor:
    """int32 [n, cols, words] The patterns of transposed tiles: a word of a column per 32 rows."""
    words = -(-rows // 32)
    found = torch.empty(patterns.shape[0], cols, words, dtype=torch.int32)
    bit = torch.arange(32)
    for begin in range(0, patterns.shape[0], 512):
        part = patterns[begin : begin + 512]
        bits = ((part[..., None] >> bit) & 1).flatten(2)[..., :cols].transpose(1, 2)
        bits = torch.nn.functional.pad(bits, (0, 32 * words - rows)).unflatten(2, (words, 32))
        found[begin : begin + 512] = _as_int32((bits.to(torch.int64) << bit).sum(-1))
    return found


def _as_int32(words: Tensor) -> Tensor:
    """Numbers below 2**32 as the 32-bit integers with the same bits."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
