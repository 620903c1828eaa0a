"""What the balancer deals out: pieces of rows with their work, in groups that belong together."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise

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

_JOINED = 16
"""Blocks of much the same work are dealt out together, up to this fraction of a rank's tokens."""
_SINGLE, _TOGETHER = 1024, 16
"""Rows of more than this fraction of a rank's work are dealt out one by one, others in pieces."""


@dataclass(eq=False, slots=True)
class Unit:
    """Consecutive rows, taken to be of equal work each."""

    start: int
    stop: int
    area: int
    needed_rows: int
    """Rows that a rank with these needs, its own included."""

    def take(self, tokens: int, *, from_end: bool) -> Unit:
        """Cuts some rows off."""
        size = self.stop - self.start
        area = self.area * tokens // size
        if from_end:
            part = Unit(self.stop - tokens, self.stop, area, self.needed_rows)
            self.stop -= tokens
        else:
            part = Unit(self.start, self.start + tokens, area, self.needed_rows)
            self.start += tokens
        self.area -= area
        return part

    def copy(self) -> Unit:
        """A copy, to be cut another time."""
        return Unit(self.start, self.stop, self.area, self.needed_rows)

    @property
    def tokens(self) -> int:
        """How many rows."""
        return self.stop - self.start


@dataclass(eq=False)
class RowGroup:
    """Rows that have to do with each other, and with no rows of other groups."""

    number: int
    """Groups are numbered by position."""
    largest_document: int
    """Tokens of the largest document in it: what one rank has to fetch at most."""
    small: bool
    """Whether it consists of small documents, and may be cut anywhere."""
    heavy: deque[Unit] = field(default_factory=deque)
    """Units with more work than the mean row, last row first."""
    light: deque[Unit] = field(default_factory=deque)
    """The others, first row first."""
    tokens: int = 0
    """Rows, before any are dealt out."""
    area: int = 0
    """Their work."""
    light_needed_rows: int = 0
    """The most rows that one of the light units needs."""
    begun: bool = False
    """Whether some of the rows are dealt out."""
    level: int = 0
    """Ranks take light rows of the group in whose heavy rows they work until they need no more rows
    of others than this."""
    most: int = 0
    """How many of them a rank takes at most: it has to send them to all who share the group."""
    equal: int = 0
    """How many each rank would have if all that work on the group had the same."""

    @property
    def density(self) -> float:
        """Work per row."""
        return self.area / max(1, self.tokens)

    def copy(self) -> RowGroup:
        """A copy, to be dealt out another time."""
        found = replace(self, heavy=deque(), light=deque())
        found.heavy.extend(unit.copy() for unit in self.heavy)
        found.light.extend(unit.copy() for unit in self.light)
        return found


def make_row_groups(work: Work, ranks: int) -> list[RowGroup]:
    """All rows, cut into units and sorted into groups, in order of position."""
    tokens, pairs = max(1, work.seq_len // ranks), max(1, int(work.before[-1]) // ranks)
    bounds, largest = _bounds(work.seams, work.seq_len, tokens // _SMALL)
    start, stop, area = _units(work, bounds, pairs, tokens)
    group = torch.searchsorted(bounds, start, right=True) - 1
    small = largest <= tokens // _SMALL
    density = _density(start, stop, area, group, small[group], max(1, tokens // _WINDOW))
    heavy = density * work.seq_len > float(work.before[-1]) * (1 + 1e-12)
    needs = torch.where(small[group], largest[group], _spans(work, bounds, group, start))
    groups = [
        RowGroup(i, r, s)
        for i, (r, s) in enumerate(zip(largest.tolist(), small.tolist(), strict=True))
    ]
    columns = (x.tolist() for x in (group, heavy, start, stop, area, needs))
    for g, is_heavy, *unit in zip(*columns, strict=True):
        if is_heavy:
            groups[g].heavy.appendleft(Unit(*unit))
        else:
            groups[g].light.append(Unit(*unit))
    for one in groups:
        _sum_up(one, tokens, pairs)
    return groups


def _sum_up(group: RowGroup, tokens: int, pairs: int) -> None:
    """Fills in what follows from the units; `tokens` and `pairs` are a rank's shares."""
    units = (*group.heavy, *group.light)
    group.tokens = sum(unit.tokens for unit in units)
    group.area = sum(unit.area for unit in units)
    group.light_needed_rows = max((unit.needed_rows for unit in group.light), default=0)
    light = sum(unit.tokens for unit in group.light)
    sharers = max(1, group.area // pairs)
    group.equal = -(-light // sharers)
    group.most = max(group.equal, group.largest_document // (2 * sharers))
    # The ranks with the last rows need most, so light rows go to them until all need the same.
    wishes: list[int] = []
    needed = group.heavy[0].needed_rows if group.heavy else 0
    while needed > 0 and len(wishes) < sharers:
        own = min(tokens, max(1, pairs // max(1, needed)))
        wishes.append(needed - own)
        needed -= own
    given, level = 0, wishes[0] if wishes else 0
    for count, (here, below) in enumerate(pairwise([*wishes, 0]), start=1):
        step = min(here - below, (light - given) // count)
        given, level = given + step * count, here - step
        if step < here - below:
            break
    group.level = level


def _spans(work: Work, bounds: Tensor, group: Tensor, start: Tensor) -> Tensor:
    """int64 [U] How far it is from the first to the last key of units, within their group."""
    size, blocks = work.block, work.blocks.numel()
    first = torch.full((blocks,), blocks)
    last = torch.zeros(blocks, dtype=torch.int64)
    for grid, planes in work.planes:
        for runs in (grid.runs[plane] for plane in planes):
            first.scatter_reduce_(0, runs.row, runs.start, "amin")
            last.scatter_reduce_(0, runs.row, runs.stop, "amax")
    block = torch.div(start, size, rounding_mode="floor")
    begin = torch.maximum(first[block] * size, bounds[group])
    return (torch.minimum(last[block] * size, bounds[group + 1]) - begin).clamp(min=0)


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
    largest = torch.full((bounds.numel() - 1,), small)  # all small groups are equally good
    return bounds, largest.scatter_reduce_(0, group, edges.diff(), "amax")


def _units(work: Work, bounds: Tensor, share: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """int64 [U] Starts, stops and areas: blocks, and finer pieces where a block is too coarse."""
    size = work.block
    coarse = _coarse_blocks(work.blocks, share)
    cut_at = bounds[(bounds % size != 0) & (bounds < work.seq_len)]
    fine = torch.unique(torch.cat([coarse, torch.div(cut_at, size, rounding_mode="floor")]))
    whole = torch.ones(work.blocks.numel(), dtype=torch.bool)
    whole[fine] = False
    start = torch.arange(work.blocks.numel()) * size
    stop = (start + size).clamp(max=work.seq_len)
    opens_whole = whole & ~_follows(work.blocks, whole, bounds, size, tokens)
    closes_whole = whole.clone()
    closes_whole[:-1] &= ~whole[1:] | opens_whole[1:]
    joined = torch.zeros(int(opens_whole.sum()), dtype=torch.int64)
    joined.index_add_(0, opens_whole.long().cumsum(0)[whole] - 1, work.blocks[whole])
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
    starts = torch.cat([start[opens_whole], rows[opens]])
    starts, order = torch.sort(starts)
    stops = torch.cat([stop[closes_whole], rows[closes] + 1])[order]
    return starts, stops, torch.cat([joined, total])[order]


def _follows(areas: Tensor, whole: Tensor, bounds: Tensor, size: int, tokens: int) -> Tensor:
    """Bool [n] Blocks that continue the unit before them: much the same work, the same group."""
    most = max(1, tokens // _JOINED // size)
    found = torch.zeros_like(whole)
    found[1:] = whole[1:] & whole[:-1] & (areas.diff().abs() * 16 <= areas[:-1])
    found[torch.arange(0, areas.numel(), most)] = False
    first = torch.div(bounds, size, rounding_mode="floor")
    found[first[first < areas.numel()]] = False
    return found


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
