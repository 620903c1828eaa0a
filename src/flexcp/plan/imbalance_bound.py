"""How even work can be at best, whatever the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.layout.work import Work

_ROWS = 1 << 13
"""Rows, of the heaviest blocks, that are looked at one by one."""
_TOGETHER = 8
"""How many of the heaviest rows one rank is asked to have at once."""


def imbalance_bound(works: Sequence[Work], ranks: int) -> float:
    """The least max/mean work of any layout whose token counts differ by at most a block.

    The heaviest rows are somewhere, and ranks that have them have light rows besides, since they
    may have only a block of rows fewer than others. Rows of long sequences count as the mean of
    their block, but for those of the heaviest blocks.

    Args:
        works: The work of all batch elements together, if one layout is for all of them; of each by
            itself, if each has its own. Ranks may then have a row of one without that of another.
        ranks: How many ranks share the rows.
    """
    work = works[0]
    whole = _Whole(sum(w.seq_len for w in works), work.block * len(works), ranks)
    total = sum(int(w.before[-1]) for w in works)
    if total == 0 or ranks == 1:
        return 1.0
    heaviest = max(_heaviest(w) for w in works)
    if heaviest * _TOGETHER * whole.rows <= total * work.block:
        return 1.0  # a block of rows less makes up for several of these
    rows = _RowsByWork.of(works)
    least = max(_shared(rows, whole), _on_one(rows, whole))
    return max(1.0, least * ranks / total)


@dataclass(frozen=True)
class _Whole:
    """What is shared."""

    rows: int
    """Of all batch elements that have a layout of their own."""
    slack: int
    """How many rows ranks may differ by, over all batch elements."""
    ranks: int


def _heaviest(work: Work) -> int:
    """The work of the heaviest row, as far as a few blocks tell."""
    few = torch.topk(work.blocks, min(4, work.blocks.numel())).indices.sort().values
    return int(work.tokens(few).max())


@dataclass(frozen=True, eq=False)
class _RowsByWork:
    """Rows by their work."""

    top: Tensor
    """float64 [n] Work of some of the heaviest rows, the heaviest first."""
    counts: Tensor
    """float64 [m + 1] How many of the lightest rows there are, step by step."""
    areas: Tensor
    """float64 [m + 1] Their work."""

    @classmethod
    def of(cls, works: Sequence[Work]) -> _RowsByWork:
        """All rows: those of the heaviest blocks one by one, others as parts of their block."""
        singles, areas, sizes = [], [], []
        for work in works:
            count = work.blocks.numel()
            looked_at = min(count, -(-_ROWS // work.block))
            blocks = torch.topk(work.blocks, looked_at).indices.sort().values
            size = torch.full((count,), work.block)
            size[-1] = work.seq_len - work.block * (count - 1)
            inside = torch.arange(work.block) < size[blocks][:, None]
            single = work.tokens(blocks)[inside].double()
            rest = torch.ones(count, dtype=torch.bool)
            rest[blocks] = False
            singles.append(single)
            areas += [single, work.blocks[rest].double()]
            sizes += [torch.ones_like(single), size[rest].double()]
        area, size_of = torch.cat(areas), torch.cat(sizes)
        order = torch.argsort(area / size_of, stable=True)
        zero = torch.zeros(1, dtype=torch.float64)
        return cls(
            torch.cat(singles).sort(descending=True).values,
            torch.cat([zero, size_of[order].cumsum(0)]),
            torch.cat([zero, area[order].cumsum(0)]),
        )

    def lightest(self, count: Tensor) -> Tensor:
        """float64 Work of so many of the lightest rows."""
        count = count.clamp(min=0, max=float(self.counts[-1]))
        at = torch.searchsorted(self.counts, count, right=True).clamp(max=self.counts.numel() - 1)
        size, area = self.counts[at] - self.counts[at - 1], self.areas[at] - self.areas[at - 1]
        return self.areas[at - 1] + (count - self.counts[at - 1]) * area / size


def _shared(rows: _RowsByWork, whole: _Whole) -> float:
    """Some of the heaviest rows are on as many ranks or fewer, which have lightest ones besides."""
    ranks = whole.ranks
    most = min(ranks - 1, rows.top.numel())
    heavy = torch.arange(1, most + 1, dtype=torch.float64)[:, None]
    sharers = heavy.T
    tokens = sharers * ((whole.rows - (ranks - sharers) * whole.slack) / ranks)
    areas = (rows.top[:most].cumsum(0)[:, None] + rows.lightest(tokens - heavy)) / sharers
    return float(areas.masked_fill(sharers > heavy, float("inf")).amin(1).max())


def _on_one(rows: _RowsByWork, whole: _Whole) -> float:
    """With more heavy rows than ranks, one of them has several; besides lightest ones."""
    tokens = (whole.rows - (whole.ranks - 1) * whole.slack) / whole.ranks
    least = 0.0
    for several in range(1, _TOGETHER + 1):
        last = (several - 1) * whole.ranks + 1
        if last > rows.top.numel():
            break
        besides = rows.lightest(torch.tensor(tokens - several, dtype=torch.float64))
        least = max(least, float(rows.top[last - several : last].sum() + besides))
    return least
