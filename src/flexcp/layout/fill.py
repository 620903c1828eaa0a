"""Filling ranks from two ends: each takes heavy rows and light rows, so that work and counts agree.

Heavy rows have more work than the mean row, light ones less. A rank that takes only light rows has
too little work, one that takes only heavy rows too much: somewhere between is the mix with exactly
its share of both tokens and work. The rest then has the same mean, so the next rank finds its mix
too, whatever the order. That leaves the order free for locality:

- Ranks work through one group of rows (a document) after the other, the largest first, its heavy
  rows from the end and its light rows from the start. For a causal mask that is the exact zigzag.
- Its light rows are shared evenly by the ranks that work on it, since they have to be sent to all
  of them. Rows of small documents fill up the rest: they need little from elsewhere.
- When a group ends within a rank, a group of small reach follows, so that no rank needs the rows of
  two large ones.
"""

from __future__ import annotations

from collections import Counter

import torch

from flexcp.layout.layout import Layout
from flexcp.layout.policies import joined
from flexcp.layout.units import Group, Unit, make_groups
from flexcp.layout.work import Work

_UNDER = 100
"""A rank at the border of two large groups may stay below its share, as long as that makes the
others' larger by no more than this fraction."""
_FEWER, _CLOSE = 8, 200
"""Token counts may be lower by most of a block, and by the first fraction of the mean, where work
would otherwise be off by more than the second. Few ranks have rows that heavy, so that the others'
counts need to be only a little higher."""
_TOLERANCE = 4096
"""Cuts fall on rounder numbers as long as that costs less than this fraction of the mean work."""


def fold(work: Work, ranks: int, *, exact_counts: bool = False) -> Layout:
    """The layout with equal token counts and equal work, and little traffic.

    Args:
        work: What each row costs.
        ranks: How many ranks share the rows.
        exact_counts: Token counts depend on nothing but length and ranks, as several lanes of one
            layout need it; otherwise they may differ by up to a block where rows are very heavy.

    >>> import flexcp
    >>> grid = flexcp.build_block_grid(flexcp.masks.causal(), 64, block_size=4)
    >>> layout = fold(Work.of([grid]), 4)
    >>> layout.positions(1)
    tensor([ 8,  9, 10, 11, 12, 13, 14, 15, 48, 49, 50, 51, 52, 53, 54, 55])
    """
    filling = _Filling(make_groups(work, ranks))
    left = int(work.before[-1])
    most = left * (_UNDER + 1) // _UNDER // ranks
    pieces: list[tuple[int, int, int]] = []
    even, ceiling = work.seq_len // ranks, -(-work.seq_len // ranks)
    fewer = 0 if exact_counts else min((work.block - 1) * 7 // 8, even // _FEWER)
    more = min(work.block - 1 - fewer, fewer)
    rows = work.seq_len
    for rank in range(ranks):
        rest = ranks - rank - 1
        own = filling.fill(rows // (rest + 1), left // (rest + 1), left - most * rest)
        limits = (
            max(even - fewer, rows - rest * (ceiling + more)),
            min(ceiling + more, rows - rest * (even - fewer)),
        )
        if fewer:
            own = filling.adjust(own, left // (rest + 1), limits)
        left -= sum(unit.area for unit in own)
        rows -= sum(unit.tokens for unit in own)
        pieces.extend(sorted((rank, unit.start, unit.stop) for unit in own))
    table = torch.tensor(pieces, dtype=torch.int64).reshape(-1, 3)
    return joined("balanced", work.seq_len, ranks, *table.unbind(1))


class _Filling:
    """What is left to deal out, and the rank that is being filled."""

    def __init__(self, groups: list[Group]) -> None:
        by_reach = sorted(groups, key=lambda g: g.reach)
        self._most = by_reach[-1].reach
        self._heavy = [g for g in by_reach if g.heavy]
        self._light = [g for g in by_reach if g.light]
        self._current: Group | None = None
        """The group whose heavy rows are dealt out."""
        self._source: Group | None = None
        """The group whose light rows are dealt out."""
        self._units: Counter[int] = Counter()
        """How many units this rank has of each group."""
        self._room = 0
        """How much more reach this rank may have until it has as much as the largest group."""
        self._last_light: tuple[Group, Unit] | None = None
        """What this rank took last."""
        self._quota = 0
        """How many light rows of the current group this rank may still have."""

    def fill(self, tokens: int, area: int, least: int) -> list[Unit]:
        """Takes rows for one rank: work of `area`, or `least` if more would reach too far."""
        self._units, self._room, self._source = Counter(), self._most, None
        self._touch(self._open())  # light rows are chosen to go with its heavy ones
        self._quota = self._open().quota
        light: list[tuple[Group, Unit]] = []
        have = work = 0
        while have < tokens and (group := self._light_group()) is not None:
            unit = self._take_light(group, tokens - have)
            light.append((group, unit))
            have, work = have + unit.tokens, work + unit.area
        heavy: list[Unit] = []
        while have < tokens:
            unit = self._take_heavy(tokens - have)
            heavy.append(unit)
            have, work = have + unit.tokens, work + unit.area
        while work < area and light:
            if self._must_change():
                self._heavy = [g for g in self._heavy if g.heavy]
                reaches_too_far = bool(self._heavy) and self._heavy[0].reach > self._room
                if not self._heavy or (work >= least and reaches_too_far):
                    break
            change = self._swap(light, heavy, area - work, area)
            if change is None:
                break
            work += change
        self._last_light = light[-1] if light else None
        return heavy + [unit for _, unit in light]

    def adjust(self, own: list[Unit], area: int, limits: tuple[int, int]) -> list[Unit]:
        """Takes or gives back a few light rows where rows are too heavy to get closer.

        Only the last rows that were taken can be given back, and only if their group is known.
        """
        have, work = sum(u.tokens for u in own), sum(u.area for u in own)
        if abs(area - work) * _CLOSE <= area or not self._last_light:
            return own
        group, last = self._last_light
        wish = round((area - work) * last.tokens / last.area) if last.area else 0
        tokens = max(limits[0], min(limits[1], have + wish)) - have
        if tokens < 0:
            back = last.take(min(-tokens, last.tokens - 1), from_end=True)
            if back.tokens:
                self._give_back(group, back)
        while tokens > 0 and (source := self._light_group()) is not None:
            unit = self._take_light(source, tokens)
            own.append(unit)
            tokens -= unit.tokens
        return own

    def _give_back(self, group: Group, unit: Unit) -> None:
        if not group.light:
            self._light = sorted([*self._light, group], key=lambda g: g.reach)
        group.light.appendleft(unit)

    def _swap(
        self, light: list[tuple[Group, Unit]], heavy: list[Unit], missing: int, share: int
    ) -> int | None:
        """Gives light rows back for heavy ones; returns by how much the work grows."""
        group = self._open()
        source, given = light[-1]
        dear = group.heavy[0]
        tokens = min(given.tokens, dear.tokens)
        gain = dear.area / dear.tokens - given.area / given.tokens
        if gain > 0 and missing / gain < tokens:
            tokens = _rounded(missing / gain, share / _TOLERANCE / gain, tokens)
            if tokens == 0:
                return None
        back = given.take(tokens, from_end=True)
        self._give_back(source, back)
        if given.tokens == 0:
            light.pop()
            self._drop(source)
        unit = self._take_heavy(tokens)
        heavy.append(unit)
        return unit.area - back.area

    def _must_change(self) -> bool:
        """Whether the group that was worked on has no heavy rows left."""
        return self._current is None or not self._current.heavy

    def _open(self) -> Group:
        """The group whose heavy rows are next; one without any if there are none."""
        if self._current is None or not self._current.heavy:
            self._heavy = [g for g in self._heavy if g.heavy]
            self._current = self._fitting(self._heavy) or Group(0)
        return self._current

    def _touch(self, group: Group) -> None:
        if self._units[id(group)] == 0:
            self._room -= group.reach
        self._units[id(group)] += 1

    def _drop(self, group: Group) -> None:
        self._units[id(group)] -= 1
        if self._units[id(group)] == 0:
            self._room += group.reach

    def _fitting(self, by_reach: list[Group]) -> Group | None:
        """The group of largest reach that leaves this rank's reach within that of the largest."""
        fits = [g for g in by_reach if g.reach <= self._room]
        return fits[-1] if fits else by_reach[0] if by_reach else None

    def _take_heavy(self, tokens: int) -> Unit:
        group = self._open()
        assert group.heavy, "there are fewer rows than the ranks were promised"
        self._touch(group)
        unit = group.heavy[0].take(min(tokens, group.heavy[0].tokens), from_end=True)
        if group.heavy[0].tokens == 0:
            group.heavy.popleft()
        return unit

    def _light_group(self) -> Group | None:
        """The group whose light rows are next."""
        current = self._current
        if current is not None and current.light and self._quota > 0:
            return current
        if self._source is None or not self._source.light:
            self._light = [g for g in self._light if g.light]
            free = [g for g in self._light if not g.heavy]
            begun = [g for g in free if g.begun and g.reach <= self._room]
            own = current if current is not None and current.light else None
            self._source = (
                begun[-1] if begun else self._fitting(free) or own or self._fitting(self._light)
            )
        return self._source

    def _take_light(self, group: Group, tokens: int) -> Unit:
        self._touch(group)
        group.begun = True
        if group is self._current and self._quota > 0:
            tokens = min(tokens, self._quota)
            self._quota -= min(tokens, group.light[0].tokens)
        unit = group.light[0].take(min(tokens, group.light[0].tokens), from_end=False)
        if group.light[0].tokens == 0:
            group.light.popleft()
        return unit


def _rounded(tokens: float, slack: float, most: int) -> int:
    """The roundest number of tokens within `slack` of the wish."""
    step = 128
    while step > 1:
        near = round(tokens / step) * step
        if near <= most and abs(near - tokens) <= slack:
            return near
        step //= 2
    return min(most, round(tokens))
