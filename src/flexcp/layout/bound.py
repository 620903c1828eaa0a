"""How even work can be at best, whatever the layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.layout.work import Work

_ROW_BY_ROW = 1 << 16
"""Longest sequence whose every row is looked at."""
_BLOCKS = 64
"""Blocks of longer ones that are, the heaviest."""
_HEAVIEST = 256
"""How many of the heaviest rows are looked at."""
_TOGETHER = 8
"""How many of the heaviest rows one rank is asked to have at once."""


def imbalance_bound(work: Work, ranks: int) -> float:
    """The least max/mean work of any layout whose token counts differ by at most a block.

    The heaviest rows are somewhere, and ranks that have them have light rows besides, since they
    may have only a block of rows fewer than others. Rows of long sequences count as the mean of
    their block, but for those of the heaviest blocks.
    """
    total = int(work.before[-1])
    if total == 0 or ranks == 1:
        return 1.0
    count = work.blocks.numel()
    few = torch.topk(work.blocks, min(4, count)).indices.sort().values
    if int(work.tokens(few).max()) * _TOGETHER * work.seq_len <= total * work.block:
        return 1.0  # a block of rows less makes up for several of these
    looked_at = min(count, _BLOCKS if work.seq_len > _ROW_BY_ROW else count)
    rows = _Rows.of(work, torch.topk(work.blocks, looked_at).indices.sort().values)
    least = max(_shared(rows, work, ranks), _on_one(rows, work, ranks))
    return max(1.0, least * ranks / total)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows by their work."""

    top: Tensor
    """float64 [n] Work of some of the heaviest rows, the heaviest first."""
    counts: Tensor
    """float64 [m + 1] How many of the lightest rows there are, step by step."""
    areas: Tensor
    """float64 [m + 1] Their work."""

    @classmethod
    def of(cls, work: Work, blocks: Tensor) -> _Rows:
        """All rows: those of some blocks one by one, others as equal parts of their block."""
        sizes = torch.full((work.blocks.numel(),), work.block)
        sizes[-1] = work.seq_len - work.block * (work.blocks.numel() - 1)
        inside = torch.arange(work.block) < sizes[blocks][:, None]
        single = work.tokens(blocks)[inside].double()
        rest = torch.ones(sizes.numel(), dtype=torch.bool)
        rest[blocks] = False
        area = torch.cat([single, work.blocks[rest].double()])
        size = torch.cat([torch.ones_like(single), sizes[rest].double()])
        order = torch.argsort(area / size, stable=True)
        zero = torch.zeros(1, dtype=torch.float64)
        return cls(
            single.sort(descending=True).values,
            torch.cat([zero, size[order].cumsum(0)]),
            torch.cat([zero, area[order].cumsum(0)]),
        )

    def lightest(self, count: Tensor) -> Tensor:
        """float64 Work of so many of the lightest rows."""
        count = count.clamp(min=0, max=float(self.counts[-1]))
        at = torch.searchsorted(self.counts, count, right=True).clamp(max=self.counts.numel() - 1)
        size, area = self.counts[at] - self.counts[at - 1], self.areas[at] - self.areas[at - 1]
        return self.areas[at - 1] + (count - self.counts[at - 1]) * area / size


def _shared(rows: _Rows, work: Work, ranks: int) -> float:
    """Some of the heaviest rows are on as many ranks or fewer, which have lightest ones besides."""
    most = min(ranks - 1, rows.top.numel(), _HEAVIEST)
    heavy = torch.arange(1, most + 1, dtype=torch.float64)[:, None]
    sharers = heavy.T
    tokens = sharers * ((work.seq_len - (ranks - sharers) * work.block) / ranks)
    areas = (rows.top[:most].cumsum(0)[:, None] + rows.lightest(tokens - heavy)) / sharers
    return float(areas.masked_fill(sharers > heavy, float("inf")).amin(1).max())


def _on_one(rows: _Rows, work: Work, ranks: int) -> float:
    """With more heavy rows than ranks, one of them has several; besides lightest ones."""
    tokens = (work.seq_len - (ranks - 1) * work.block) / ranks
    least = 0.0
    for several in range(1, _TOGETHER + 1):
        last = (several - 1) * ranks + 1
        if last > rows.top.numel():
            break
        besides = rows.lightest(torch.tensor(tokens - several, dtype=torch.float64))
        least = max(least, float(rows.top[last - several : last].sum() + besides))
    return least
