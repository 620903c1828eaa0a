"""What the balancer deals out: pieces of rows with their work, in groups that belong together."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexcp.layout.work import Work

_SMALL = 8
"""A group (a document, say) is small if it has less than this fraction of a rank's tokens."""
_WINDOW = 16
"""Among small groups, work is averaged over this fraction of a rank's tokens before rows are
called heavy or light: they would be torn apart otherwise."""
_LARGE, _ROUGH = 8, 64
"""Blocks are looked at row by row from these fractions of a rank's work on: all of them, and those
that differ much from their neighbours."""

_SINGLE, _TOGETHER = 1024, 16
"""Rows of more than this fraction of a rank's work are dealt out one by one, others in pieces."""


@dataclass(eq=False)
class Unit:
    """Consecutive rows, taken to be of equal work each."""

    start: int
    stop: int
    area: int

    def take(self, tokens: int, *, from_end: bool) -> Unit:
        """Cuts some rows off."""
        size = self.stop - self.start
        area = self.area * tokens // size
        if from_end:
            part = Unit(self.stop - tokens, self.stop, area)
            self.stop -= tokens
        else:
            part = Unit(self.start, self.start + tokens, area)
            self.start += tokens
        self.area -= area
        return part

    @property
    def tokens(self) -> int:
        """How many rows."""
        return self.stop - self.start


@dataclass(eq=False)
class Group:
    """Rows that have to do with each other, and with no rows of other groups."""

    reach: int
    """Tokens of the largest document in it: what one rank has to fetch at most."""
    heavy: deque[Unit] = field(default_factory=deque)
    """Units with more work than the mean row, last row first."""
    light: deque[Unit] = field(default_factory=deque)
    """The others, first row first."""
    begun: bool = False
    """Whether some of the light rows are dealt out."""
    quota: int = 0
    """Light rows for each of the ranks that share the group: what one rank has, it has to send to
    all the others, so none should have most of them."""


def make_groups(work: Work, ranks: int) -> list[Group]:
    """All rows, cut into units and sorted into groups, in order of position."""
    share = max(1, work.seq_len // ranks)
    seams = work.seams
    bounds, reach = _bounds(seams, work.seq_len, share // _SMALL)
    start, stop, area = _units(work, bounds, max(1, int(work.before[-1]) // ranks))
    group = torch.searchsorted(bounds, start, right=True) - 1
    small = reach[group] <= share // _SMALL
    density = _density(start, stop, area, group, small, max(1, share // _WINDOW))
    heavy = density * work.seq_len > float(work.before[-1]) * (1 + 1e-12)
    groups = [Group(r) for r in reach.tolist()]
    for g, a, b, w, is_heavy in zip(
        group.tolist(), start.tolist(), stop.tolist(), area.tolist(), heavy.tolist(), strict=True
    ):
        if is_heavy:
            groups[g].heavy.appendleft(Unit(a, b, w))
        else:
            groups[g].light.append(Unit(a, b, w))
    for one in groups:
        pairs = sum(unit.area for units in (one.heavy, one.light) for unit in units)
        rows = sum(unit.tokens for unit in one.light)
        sharers = max(1, pairs * ranks // max(1, int(work.before[-1])))
        one.quota = -(-rows // sharers)
    return groups


def _bounds(seams: Tensor, seq_len: int, small: int) -> tuple[Tensor, Tensor]:
    """int64 [G + 1], [G] Borders of groups, and the largest document in each.

    Small documents side by side are one group.
    """
    zero, end = torch.zeros(1, dtype=torch.int64), torch.full((1,), seq_len)
    edges = torch.cat([zero, seams[(seams > 0) & (seams < seq_len)], end])
    large = edges.diff() > small
    keep = torch.ones_like(edges, dtype=torch.bool)
    keep[1:-1] = large[1:] | large[:-1]
    bounds = edges[keep]
    group = torch.searchsorted(bounds, edges[:-1], right=True) - 1
    reach = torch.full((bounds.numel() - 1,), small)  # all small groups are equally good
    return bounds, reach.scatter_reduce_(0, group, edges.diff(), "amax")


def _units(work: Work, bounds: Tensor, share: int) -> tuple[Tensor, Tensor, Tensor]:
    """int64 [U] Starts, stops and areas: blocks, and finer pieces where a block is too coarse."""
    size = work.block
    coarse = _coarse_blocks(work.blocks, share)
    cut_at = bounds[(bounds % size != 0) & (bounds < work.seq_len)]
    fine = torch.unique(torch.cat([coarse, torch.div(cut_at, size, rounding_mode="floor")]))
    whole = torch.ones(work.blocks.numel(), dtype=torch.bool)
    whole[fine] = False
    start = torch.arange(work.blocks.numel()) * size
    stop = (start + size).clamp(max=work.seq_len)
    rows = (fine[:, None] * size + torch.arange(size)).reshape(-1)
    areas = work.tokens(fine).reshape(-1)
    inside = rows < work.seq_len
    rows, areas = rows[inside], areas[inside]
    differs, before = areas.diff(), areas[:-1]
    opens = torch.ones_like(rows, dtype=torch.bool)
    # Rows of much the same work stay together, which makes them cheap to deal out.
    opens[1:] = (
        (rows % size == 0)[1:]
        | torch.isin(rows[1:], cut_at)
        | (differs.abs() > before // 8)
        | ((differs != 0) & ((before > share // _SINGLE) | (rows[1:] % _TOGETHER == 0)))
    )
    closes = torch.ones_like(opens)
    closes[:-1] = opens[1:]
    total = torch.zeros(int(opens.sum()), dtype=torch.int64)
    total.index_add_(0, opens.long().cumsum(0) - 1, areas)
    starts = torch.cat([start[whole], rows[opens]])
    starts, order = torch.sort(starts)
    stops = torch.cat([stop[whole], rows[closes] + 1])[order]
    return starts, stops, torch.cat([work.blocks[whole], total])[order]


def _coarse_blocks(areas: Tensor, share: int) -> Tensor:
    """int64 [n] Blocks that are too much, or too uneven, to be dealt out as they are."""
    near = torch.stack([areas.roll(1), areas.roll(-1)])
    differs = (near - areas).abs().amax(0) > areas // 4
    return torch.nonzero((areas > share // _LARGE) | ((areas > share // _ROUGH) & differs)).squeeze(
        1
    )


def _density(
    start: Tensor, stop: Tensor, area: Tensor, group: Tensor, small: Tensor, window: int
) -> Tensor:
    """float64 [U] Work per row; averaged over a window in groups of small documents."""
    window_of = torch.where(small, torch.div(start, window, rounding_mode="floor"), -1)
    key = torch.where(small, window_of, int(stop.max()) + torch.arange(start.numel()))
    key = key + group * (int(stop.max()) + start.numel() + 1)
    _, place = torch.unique(key, return_inverse=True)
    rows = torch.zeros(int(place.max()) + 1, dtype=torch.int64)
    pairs = torch.zeros_like(rows)
    rows.index_add_(0, place, stop - start)
    pairs.index_add_(0, place, area)
    return (pairs.double() / rows.double())[place]
