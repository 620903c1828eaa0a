"""An axis cut into cells, and what a mask's one-axis values are on cells and on groups of cells."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flexcp.grid.analysis.indexing import take
from flexcp.grid.analysis.lookup import as_bound, value_extremes
from flexcp.grid.analysis.ranges import EXACT, Range

_CHUNK = 30_000
"""Positions evaluated at a time: so few that torch stays on one thread, within its cache."""


@dataclass(frozen=True, eq=False)
class Axis:
    """The queries or the keys, cut into cells of consecutive positions."""

    first: Tensor
    """int64 [n] Global position of each cell's first token."""
    last: Tensor
    """int64 [n] Global position of each cell's last token."""
    sizes: Tensor
    """int64 [n] Tokens of each cell; one without tokens has its neighbour's first and last."""

    @classmethod
    def of_blocks(cls, length: int, size: int, start: int = 0) -> Axis:
        """Blocks of `size` tokens; the last may be shorter."""
        first = torch.arange(0, length, size)
        last = (first + (size - 1)).clamp(max=length - 1)
        return cls(first + start, last + start, last - first + 1)

    def subdivided(self, size: int) -> Axis:
        """Each cell cut into pieces of at most `size` tokens, as many pieces for each cell."""
        largest = int(self.sizes.max())
        offsets = torch.arange(0, largest, size)
        first = torch.minimum(self.first[:, None] + offsets, self.last[:, None])
        last = torch.minimum(self.first[:, None] + offsets + (size - 1), self.last[:, None])
        sizes = (self.sizes[:, None] - offsets).clamp(0, size)
        return Axis(first.reshape(-1), last.reshape(-1), sizes.reshape(-1))

    def __len__(self) -> int:
        return self.first.numel()

    @cached_property
    def levels(self) -> int:
        """How often the axis can be halved until one group is left, plus one."""
        return (len(self) - 1).bit_length() + 1 if len(self) else 1

    def positions(self, cells: slice) -> Tensor:
        """int64 [cells, size] The positions of cells; short ones repeat their last position."""
        first, last = self.first[cells], self.last[cells]
        width = int((last - first).max()) + 1
        found = first[:, None] + torch.arange(width)
        short = last - first + 1 < width
        if bool(short.any()):
            found[short] = torch.minimum(found[short], last[short][:, None])
        return found

    def every_position(self) -> Tensor:
        """int64 [S] All positions of the axis in order."""
        return torch.arange(int(self.first[0]), int(self.last.max()) + 1)

    def pyramid_of(self, values: Tensor) -> Pyramid:
        """The pyramid of values [groups, S] that are given for every position."""
        width = self._even_width
        if width is None:
            at = self.first[0]
            return measure(
                [value_extremes(values[:, self.positions(c) - at]) for c in self.chunks()]
            )
        even = values.shape[1] // width * width
        cells = values[:, :even].reshape(values.shape[0], -1, width)
        step = max(1, _CHUNK // (width * values.shape[0]))
        parts = list(cells.split(step, dim=1)) if even else []
        if even < values.shape[1]:
            parts.append(values[:, None, even:])
        return measure([value_extremes(part) for part in parts])

    @cached_property
    def _even_width(self) -> int | None:
        """Tokens of each cell, if they follow each other and only the last may be shorter."""
        width = int(self.sizes[0])
        even = bool((self.sizes[:-1] == width).all()) and 0 < int(self.sizes[-1]) <= width
        follows = bool((self.first[1:] == self.last[:-1] + 1).all())
        return width if even and follows else None

    def chunks(self) -> list[slice]:
        """The cells in pieces whose positions may be evaluated at once."""
        width = max(int((self.last - self.first).max()) + 1, 1)
        step = max(1, _CHUNK // width)
        return [slice(i, min(i + step, len(self))) for i in range(0, len(self), step)]


class Pyramid:
    """The range of a value on every cell, every pair of cells, every four, and so on.

    Level 0 are the cells themselves. Each level is a Range of tensors [groups, nodes], where
    groups are what the value depends on besides the axis (batch elements, heads).
    """

    def __init__(self, cells: Range) -> None:
        self._levels = [cells]

    def at(self, level: int) -> Range:
        """The ranges of groups of 2**level cells."""
        while len(self._levels) <= level:
            below = self._levels[-1]
            if below.lo.shape[1] <= 1:
                return below
            self._levels.append(
                Range(
                    _pairs(below.lo, torch.minimum),
                    _pairs(below.hi, torch.maximum),
                    _pairs(below.some_lo, torch.maximum),
                    _pairs(below.some_hi, torch.minimum),
                    below.may_be_nan,
                )
            )
        return self._levels[level]

    def rises(self) -> bool:
        """Whether no cell has a value above one of a later cell."""
        cells = self._levels[0]
        return bool((cells.hi[:, :-1] <= cells.lo[:, 1:]).all())

    def take(self, level: int, group: Tensor, node: Tensor, *, attained: bool = True) -> Range:
        """The ranges of some nodes of a level, as [T]; without what is attained if not asked."""
        found = self.at(level)
        flat = node if found.lo.shape[0] == 1 else group * found.lo.shape[1] + node
        lo, hi = take(found.lo.view(-1), flat), take(found.hi.view(-1), flat)
        if not attained:
            return Range(lo, hi, hi, lo, found.may_be_nan)
        if found.some_lo is found.lo:  # single cells attain their extremes
            return Range(lo, hi, lo, hi, found.may_be_nan)
        some_lo, some_hi = (take(x.view(-1), flat) for x in (found.some_lo, found.some_hi))
        return Range(lo, hi, some_lo, some_hi, found.may_be_nan)


def measure(values: list[tuple[Tensor, Tensor]]) -> Pyramid:
    """A pyramid from the least and greatest values of consecutive cells, [groups, cells] each."""
    lo, hi = (torch.cat([pair[n] for pair in values], dim=1) for n in (0, 1))
    is_integer = not (lo.is_floating_point() or lo.dtype == torch.bool)
    lo, hi = as_bound(lo), as_bound(hi)
    unknown = (lo < -EXACT) | (hi > EXACT) if is_integer else lo.isnan()
    if lo.dtype == torch.bool or not bool(unknown.any()):
        return Pyramid(Range(lo, hi, lo, hi))
    lo, hi = torch.where(unknown, -torch.inf, lo), torch.where(unknown, torch.inf, hi)
    some_lo, some_hi = torch.where(unknown, hi, lo), torch.where(unknown, lo, hi)
    return Pyramid(Range(lo, hi, some_lo, some_hi, may_be_nan=not is_integer))


def _pairs(x: Tensor, op: object) -> Tensor:
    if x.shape[1] % 2:
        x = torch.cat([x, x[:, -1:]], dim=1)
    return op(x[:, ::2], x[:, 1::2])  # type: ignore[operator, no-any-return]
