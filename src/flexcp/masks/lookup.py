"""Ranges of `table[index]` when the index itself is only known as a range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexcp.masks.graph import Node
from flexcp.masks.ranges import Range

_FINEST = 1 << 16
"""Entries of the finest level: longer tables are summarised in pieces, to bound memory."""


@dataclass(frozen=True, eq=False)
class _Extremes:
    """Least and greatest entries of every stretch of 2**k pieces of a table."""

    piece: int
    lows: tuple[Tensor, ...]
    highs: tuple[Tensor, ...]

    @classmethod
    def of(cls, values: Tensor) -> _Extremes:
        piece = -(-values.numel() // _FINEST)
        missing = -values.numel() % piece
        padded = torch.cat([values, values[-1:].expand(missing)]).view(-1, piece)
        lows, highs = [padded.amin(1)], [padded.amax(1)]
        stride = 1
        while 2 * stride <= lows[0].numel():
            lows.append(torch.minimum(lows[-1][:-stride], lows[-1][stride:]))
            highs.append(torch.maximum(highs[-1][:-stride], highs[-1][stride:]))
            stride *= 2
        return cls(piece, tuple(lows), tuple(highs))

    def between(self, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Extremes over entries first..last, or over slightly more."""
        first, last = first // self.piece, last // self.piece
        level = torch.log2((last - first + 1).double()).floor().long()
        lo = torch.empty(first.shape, dtype=self.lows[0].dtype)
        hi = torch.empty_like(lo)
        for k in level.unique().tolist():
            at = level == k
            left, right = first[at], last[at] - (1 << k) + 1
            lo[at] = torch.minimum(self.lows[k][left], self.lows[k][right])
            hi[at] = torch.maximum(self.highs[k][left], self.highs[k][right])
        return lo, hi


def range_of_lookup(table: Node, key: int, indices: list[Range], memory: dict[int, Any]) -> Range:
    """The range of `table[i, j, ...]`; the last index may vary, the others must be known.

    An index that may lie outside the table says nothing here: should it really do so, evaluating
    the mask there raises.
    """
    assert table.value is not None
    truth = table.dtype == torch.bool
    if not table.value.numel():
        return Range.anything(truth=truth)
    if key not in memory:
        memory[key] = _prepare(table.value)
    flat, extremes = memory[key]
    if flat is None:
        return Range.anything(truth=truth)
    indices = [index.numbers() for index in indices]
    inside = torch.ones((), dtype=torch.bool)
    first = torch.zeros((), dtype=torch.int64)
    last = first
    for index, size in zip(indices, table.shape, strict=True):
        known = index.is_one_value if index is not indices[-1] else torch.ones_like(inside)
        lo, hi = index.lo.clamp(-size, size), index.hi.clamp(-size, size)
        wraps = hi < 0
        lo, hi = torch.where(wraps, lo + size, lo).long(), torch.where(wraps, hi + size, hi).long()
        inside = inside & known & (lo >= 0) & (hi < size) & (index.lo >= -size)
        first, last = first * size + lo, last * size + hi
    first, last, inside = torch.broadcast_tensors(first, last, inside)
    first, last = torch.where(inside, first, 0), torch.where(inside, last, flat.numel() - 1)
    lo_value, hi_value = extremes.between(first.reshape(-1), last.reshape(-1))
    lo_value, hi_value = lo_value.reshape(first.shape), hi_value.reshape(first.shape)
    single = first == last
    return Range.bounds(
        torch.where(single, flat[first], lo_value), torch.where(single, flat[first], hi_value)
    )


def _prepare(values: Tensor) -> tuple[Tensor | None, _Extremes | None]:
    if values.dtype == torch.bool:
        flat = values.reshape(-1)
        return flat, _Extremes.of(flat)
    flat = values.reshape(-1).double()
    if values.is_complex() or not bool((flat.abs() < 2.0**52).all()):
        return None, None
    return flat, _Extremes.of(flat)
