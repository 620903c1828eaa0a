"""Ranges of `table[i, j]` when the indices themselves are only known as ranges."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.grid.analysis.ranges import EXACT, Range


class LookupTable:
    """A captured tensor that is indexed by ranges; the last two indices may vary.

    Its extremes are kept for squares of 1, 2, 4, ... entries along both of its last dimensions, so
    that any range of indices is covered by four squares of a fitting size.
    """

    def __init__(self, value: Tensor) -> None:
        self._shape = tuple(value.shape)
        self._dtype = value.dtype
        rows = value.shape[-2] if value.dim() > 1 else 1
        entries = value.reshape(-1, rows, value.shape[-1])
        if value.dtype in (torch.uint16, torch.uint32):
            entries = entries.long()
        self._squares = [(entries, entries)]
        lo, hi = value_extremes(value.reshape(1, -1))
        self._everything = Range.bounds(as_bound(lo[0]), as_bound(hi[0]))
        self._is_known = value.dtype == torch.bool or bool((lo > -EXACT) & (hi < EXACT))

    def at(self, indices: list[Range]) -> Range:
        """The range of `table[i, j, ...]`.

        An index that may lie outside the table says nothing here: should it really do so,
        evaluating the mask there raises.
        """
        if not self._is_known:
            return Range.anything(self._dtype)
        inside = torch.ones((), dtype=torch.bool)
        spans: list[tuple[Tensor, Tensor]] = []
        for index, size in zip(indices, self._shape, strict=True):
            index = index.numbers()
            if len(spans) < len(indices) - 2:
                inside = inside & index.is_one_value
            lo, hi = index.lo.clamp(-size, size), index.hi.clamp(-size, size)
            wraps = hi < 0
            lo, hi = (torch.where(wraps, x + size, x).long() for x in (lo, hi))
            inside = inside & (lo >= 0) & (hi < size) & (index.lo >= -size)
            spans.append((lo, hi))
        if not bool(inside.any()):
            return self._everything
        page = torch.zeros((), dtype=torch.int64)
        for (lo, _), size in zip(spans[:-2], self._shape[:-2], strict=True):
            page = page * size + lo
        row = spans[-2] if len(spans) > 1 else (page * 0, page * 0)
        bounds = self._covered(inside, page, *row, *spans[-1])
        return Range.bounds(
            torch.where(inside, bounds[0], self._everything.lo),
            torch.where(inside, bounds[1], self._everything.hi),
        )

    def _covered(self, inside: Tensor, *at: Tensor) -> tuple[Tensor, Tensor]:
        """Extremes over page, rows and columns, or over slightly more."""
        given = torch.broadcast_tensors(inside, *at)
        page, top, bottom, left, right = (
            torch.where(given[0], x, 0).reshape(-1) for x in given[1:]
        )
        widest = torch.maximum(bottom - top, right - left)
        # Two neighbouring squares of 2**k cover any span whose ends are at most 2**k apart.
        level = torch.log2(widest.clamp(min=1).double()).ceil().long()
        lo, hi = (x.expand(page.shape).clone() for x in (self._everything.lo, self._everything.hi))
        for k in torch.unique(level).tolist():
            some = torch.nonzero(level == k).squeeze(1)
            lows, highs = self._level(k)
            corners = [
                ((page[some] * lows.shape[1] + (y[some] >> k)) * lows.shape[2]) + (x[some] >> k)
                for y in (top, bottom)
                for x in (left, right)
            ]
            low = torch.stack([lows.reshape(-1).index_select(0, c) for c in corners]).amin(0)
            high = torch.stack([highs.reshape(-1).index_select(0, c) for c in corners]).amax(0)
            lo.index_copy_(0, some, as_bound(low))
            hi.index_copy_(0, some, as_bound(high))
        return lo.view(given[0].shape), hi.view(given[0].shape)

    def _level(self, k: int) -> tuple[Tensor, Tensor]:
        while len(self._squares) <= k:
            lows, highs = self._squares[-1]
            self._squares.append((_halved(lows, torch.amin), _halved(highs, torch.amax)))
        return self._squares[k]


def _halved(x: Tensor, extreme: object) -> Tensor:
    """Extremes of squares of 2 x 2 entries; edges are repeated."""
    for dim in (1, 2):
        if x.shape[dim] % 2:
            x = torch.cat([x, x.narrow(dim, x.shape[dim] - 1, 1)], dim)
    pages, rows, cols = x.shape
    squares = x.reshape(pages, rows // 2, 2, cols // 2, 2)
    return extreme(squares, dim=(2, 4))  # type: ignore[operator, no-any-return]


def value_extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest along the last dimension, of any type that has an order."""
    if values.dtype in (torch.uint16, torch.uint32):
        values = values.long()
    elif values.dtype == torch.uint64 or values.is_complex():
        unknown = torch.full(values.shape[:-1], torch.inf, dtype=torch.float64)
        return -unknown, unknown
    elif values.is_floating_point() and values.element_size() == 1:
        values = values.float()
    return values.amin(-1), values.amax(-1)


def as_bound(values: Tensor) -> Tensor:
    """As a Range keeps it: truth values as they are, numbers in float64."""
    return values if values.dtype == torch.bool else values.double()
