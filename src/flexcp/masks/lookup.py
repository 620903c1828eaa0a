"""Ranges of `table[index]` when the index itself is only known as a range."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.masks.ranges import Range

_EXACT = 2.0**52
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


class LookupTable:
    """A captured tensor that is indexed by ranges."""

    def __init__(self, value: Tensor) -> None:
        self.shape = tuple(value.shape)
        self.is_truth = value.dtype == torch.bool
        self._flat = value.reshape(-1)
        self._extremes: _Extremes | None = None
        lo, hi = torch.aminmax(self._flat)
        self.everything = Range.bounds(*self._exact(lo, hi))
        self.is_known = self.is_truth or bool((lo > -_EXACT) & (hi < _EXACT))

    def at(self, indices: list[Range]) -> Range:
        """The range of `table[i, j, ...]`; the last index may vary, the others must be known.

        An index that may lie outside the table says nothing here: should it really do so,
        evaluating the mask there raises.
        """
        if not self.is_known:
            return Range.anything(truth=self.is_truth)
        first = last = torch.zeros((), dtype=torch.int64)
        inside = torch.ones((), dtype=torch.bool)
        for position, (index, size) in enumerate(zip(indices, self.shape, strict=True)):
            index = index.numbers()
            if position < len(indices) - 1:
                inside = inside & index.is_one_value
            lo, hi = index.lo.clamp(-size, size), index.hi.clamp(-size, size)
            wraps = hi < 0
            lo, hi = (torch.where(wraps, x + size, x).long() for x in (lo, hi))
            inside = inside & (lo >= 0) & (hi < size) & (index.lo >= -size)
            first, last = first * size + lo, last * size + hi
        first, last, inside = torch.broadcast_tensors(first, last, inside)
        if not bool(inside.any()):
            return self.everything
        lo, hi = self._between(torch.where(inside, first, 0), torch.where(inside, last, 0))
        return Range.bounds(
            torch.where(inside, lo, self.everything.lo), torch.where(inside, hi, self.everything.hi)
        )

    def _between(self, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        single = first == last
        value = self._exact(self._flat[first])[0]
        if bool(single.all()):
            return value, value
        if self._extremes is None:
            self._extremes = _Extremes.of(self._flat)
        lo, hi = (
            x.reshape(first.shape)
            for x in self._exact(*self._extremes.between(first.reshape(-1), last.reshape(-1)))
        )
        return torch.where(single, value, lo), torch.where(single, value, hi)

    def _exact(self, *values: Tensor) -> tuple[Tensor, ...]:
        return values if self.is_truth else tuple(x.double() for x in values)
