"""Making work even, row by row, where few rows are so heavy that ranks were not filled evenly.

A rank with a very heavy row (one that sees everything, say) needs fewer rows than others, and
lighter ones. Filling one rank after the other gives most of the light rows to the first of them.
Here the rank with most work moves rows to others, or exchanges dense rows for sparse ones, until
no rank has much more than the mean or nothing helps any more.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from flexcp.layout.balance.row_groups import RowGroup, Unit
from flexcp.layout.balance.seeds import Taken

_GOAL = 256
"""Work that exceeds the mean by less than this fraction is left alone."""
_STEP = 1 << 16
"""Changes that lower the most work by less than this fraction of the mean are not made."""
_TURNS = 8
"""Changes that are made at most, in multiples of the ranks there are."""
_TAKERS = 16
"""Ranks that are asked to take rows where that is only one of several ways to deal them out."""
_DENSE = 16
"""Rows with this many times the work of the mean row make a rank want fewer rows."""
_FEWER = 8
"""A rank never has fewer rows than the mean by more than this fraction of it."""

_Sorted = tuple[float, int, RowGroup, Unit]
"""Work per row, first row, and what they are: in this order."""


@dataclass(eq=False)
class _SortedRank:
    """What one rank has, the sparsest rows first."""

    rows: list[_Sorted] = field(default_factory=list)
    needed_rows: dict[int, int] = field(default_factory=dict)
    """Rows of each group that it needs, unless they are small."""
    needs: int = 0
    """Their sum."""
    area: int = 0
    tokens: int = 0

    def add(self, group: RowGroup, unit: Unit) -> None:
        """Gets rows."""
        insort(self.rows, (unit.area / unit.tokens, unit.start, group, unit), key=lambda x: x[:2])
        more = self.more(group, unit)
        if more:
            self.needed_rows[group.number] = unit.needed_rows
            self.needs += more
        self.area += unit.area
        self.tokens += unit.tokens

    def give(self, place: int, tokens: int, to: _SortedRank) -> None:
        """Gives some rows of a piece to another rank."""
        _, _, group, unit = self.rows[place]
        part = unit.take(tokens, from_end=True)
        if unit.tokens == 0:
            del self.rows[place]
        self.area -= part.area
        self.tokens -= part.tokens
        to.add(group, part)

    def denser_than(self, density: float) -> int:
        """How many rows have more work."""
        return sum(unit.tokens for dense, _, _, unit in self.rows if dense > density)

    @property
    def taken(self) -> list[Taken]:
        """Its rows, and where they are from."""
        return [(group, unit) for _, _, group, unit in self.rows]

    def more(self, group: RowGroup, unit: Unit) -> int:
        """How many rows more it would need to have some rows."""
        return (
            0 if group.small else max(0, unit.needed_rows - self.needed_rows.get(group.number, 0))
        )

    def first_of(self, rows: Iterable[tuple[int, _Sorted]], needs: float) -> int | None:
        """The place of the first rows with which it needs no more than before, or than `needs`."""
        needed, room = self.needed_rows, max(0, needs - self.needs)
        for place, (_, _, group, unit) in rows:
            if group.small or unit.needed_rows - needed.get(group.number, 0) <= room:
                return place
        return None


@dataclass(frozen=True)
class _Rules:
    """What may change."""

    mean: float
    """Work that all should have."""
    fewest: int
    """Rows of a rank."""
    most: int
    densest: float
    """Rows with more work each stay where they are."""
    needs: float = 0
    """Ranks get only rows with which they need no more than before, or at most this."""
    takers: int | None = None
    """Only so many ranks with least work are asked to take rows; or all."""


@dataclass(frozen=True)
class _Change:
    """Rows of the rank with most work that another takes, for as many or for none."""

    most: float
    """Work of the one of both that then has more."""
    to: int
    place: int
    tokens: int
    back: int | None
    """What comes back for them."""


def with_even_work(
    parts: list[list[Taken]], block: int, *, exact_counts: bool
) -> list[list[Taken]]:
    """All rows, dealt out so that the rank with most work has less.

    Args:
        parts: What each rank has.
        block: By how much token counts may differ.
        exact_counts: They stay as they are.
    """
    first = _evened(parts, block, exact_counts, spread=False)
    if _most(first) * _GOAL <= sum(rank.area for rank in first) / len(first) * (_GOAL + 1):
        return [rank.taken for rank in first]
    second = _evened(parts, block, exact_counts, spread=True)
    return [rank.taken for rank in min(first, second, key=_most)]


def exchanged(parts: list[list[Taken]], enough: float) -> list[list[Taken]]:
    """Rows exchanged one for one until work is even, without more rows to receive at most.

    Args:
        parts: What each rank has.
        enough: Work that no rank should exceed.
    """
    ranks = _ranks(parts)
    for needs in (0, max(rank.needs for rank in ranks)):
        _relieve(ranks, _Rules(enough, 0, 0, float("inf"), needs, _TAKERS), enough)
    return [rank.taken for rank in ranks]


def _most(ranks: list[_SortedRank]) -> int:
    return max(rank.area for rank in ranks)


def _evened(
    parts: list[list[Taken]], block: int, exact_counts: bool, *, spread: bool
) -> list[_SortedRank]:
    """Starts from the ranks as they are, or with very dense rows spread over all of them."""
    ranks = _ranks(parts)
    rows, area = sum(r.tokens for r in ranks), sum(r.area for r in ranks)
    dense, mean = _DENSE * area / max(1, rows), area / len(ranks)
    if spread:
        _spread(ranks, dense)
    fewest, most = (0, 0) if exact_counts else _limits(ranks, dense, block)
    if not exact_counts:
        _keep_to(ranks, fewest, most)
    rules = _Rules(mean, fewest, most, dense if spread else float("inf"))
    for needs in (0, max(rank.needs for rank in ranks), float("inf")):
        _relieve(ranks, replace(rules, needs=needs), mean * (_GOAL + 1) / _GOAL)
    return ranks


def _ranks(parts: list[list[Taken]]) -> list[_SortedRank]:
    ranks = [_SortedRank() for _ in parts]
    for rank, own in zip(ranks, parts, strict=True):
        for group, unit in own:
            rank.add(group, unit.copy())
    return ranks


def _spread(ranks: list[_SortedRank], dense: float) -> None:
    """Ranks with two very dense rows more than others exchange one for a row like most."""
    counts = [rank.denser_than(dense) for rank in ranks]
    for _ in range(sum(counts)):
        most = max(range(len(ranks)), key=lambda i: (counts[i], -i))
        fewest = min(range(len(ranks)), key=lambda i: (counts[i], ranks[i].area, i))
        place = bisect_right(ranks[fewest].rows, dense, key=lambda x: x[0]) - 1
        if counts[most] - counts[fewest] < 2 or place < 0:
            return
        _make(ranks[most], ranks[fewest], _Change(0, fewest, len(ranks[most].rows) - 1, 1, place))
        counts[most] -= 1
        counts[fewest] += 1


def _relieve(ranks: list[_SortedRank], rules: _Rules, enough: float) -> None:
    """Lowers the work of every rank that has too much, as far as it goes.

    What one rank could not get rid of may go once others have been relieved.
    """
    turns = made = _TURNS * len(ranks)
    while made and turns > 0:
        made = 0
        for high in sorted(range(len(ranks)), key=lambda i: (-ranks[i].area, i)):
            while ranks[high].area > enough and made < len(ranks):
                change = _best_change(ranks, high, rules)
                if change is None:
                    break
                _make(ranks[high], ranks[change.to], change)
                made += 1
        turns -= made


def _limits(ranks: list[_SortedRank], dense: float, block: int) -> tuple[int, int]:
    """The fewest and the most rows, as suits the number of ranks that want fewer than others."""
    rows = sum(rank.tokens for rank in ranks)
    wanting = sum(rank.denser_than(dense) for rank in ranks)
    if not 0 < wanting < len(ranks):
        wanting = -(-len(ranks) // 2)
    fewest = -(-(rows - (len(ranks) - wanting) * block) // len(ranks))
    even = rows // len(ranks)
    fewest = min(max(fewest, even - even // _FEWER, 0), even)  # there may be fewer rows than ranks
    return fewest, max(fewest + block, -(-rows // len(ranks)))


def _keep_to(ranks: list[_SortedRank], fewest: int, most: int) -> None:
    """Rows in excess go to the ranks with least work, missing ones come from those with most."""
    for rank in ranks:
        while rank.tokens > most:
            taker = min((r for r in ranks if r.tokens < most), key=lambda r: r.area)
            tokens = min(rank.tokens - most, most - taker.tokens, rank.rows[0][3].tokens)
            rank.give(0, tokens, taker)
    for rank in ranks:
        while rank.tokens < fewest:
            giver = max((r for r in ranks if r.tokens > fewest), key=lambda r: r.area)
            tokens = min(fewest - rank.tokens, giver.tokens - fewest, giver.rows[0][3].tokens)
            giver.give(0, tokens, rank)


def _best_change(ranks: list[_SortedRank], high: int, rules: _Rules) -> _Change | None:
    """What lowers the work of a rank most, without giving another as much."""
    best: _Change | None = None
    giver = ranks[high]
    least = giver.area - rules.mean / _STEP
    by_area = sorted(range(len(ranks)), key=lambda i: (ranks[i].area, i))
    for to in by_area[: rules.takers]:
        taker = ranks[to]
        if taker.area >= least:
            break
        for change in (_moved(giver, taker, to, rules), _exchanged(giver, taker, to, rules)):
            if change and change.most < (best.most if best else least):
                best = change
    return best


def _moved(giver: _SortedRank, taker: _SortedRank, to: int, rules: _Rules) -> _Change | None:
    """Gives rows for nothing, as counts allow."""
    room = min(giver.tokens - rules.fewest, rules.most - taker.tokens)
    if room <= 0:
        return None
    wish = _wish(giver, taker, rules.mean)
    place = _dense_rows(giver, taker, 2 * wish, rules)
    if place is None or giver.rows[place][0] <= 0:
        return None
    density, _, _, unit = giver.rows[place]
    tokens = min(room, unit.tokens, max(1, int(wish / density)))
    most = max(giver.area - tokens * density, taker.area + tokens * density)
    return _Change(most, to, place, tokens, None)


def _exchanged(giver: _SortedRank, taker: _SortedRank, to: int, rules: _Rules) -> _Change | None:
    """Gives dense rows for the sparsest."""
    wish = _wish(giver, taker, rules.mean)
    back = giver.first_of(enumerate(taker.rows), rules.needs)
    if back is None:
        return None
    sparse, _, _, unit = taker.rows[back]
    place = _dense_rows(giver, taker, sparse + 2 * wish, rules)
    if place is None or giver.rows[place][0] <= sparse:
        return None
    density, _, _, given = giver.rows[place]
    gain = density - sparse
    tokens = min(unit.tokens, given.tokens, max(1, int(wish / gain)))
    most = max(giver.area - tokens * gain, taker.area + tokens * gain)
    return _Change(most, to, place, tokens, back)


def _dense_rows(giver: _SortedRank, taker: _SortedRank, limit: float, rules: _Rules) -> int | None:
    """The densest rows up to a limit that another may take."""
    top = bisect_right(giver.rows, min(limit, rules.densest), key=lambda x: x[0])
    places = range(top - 1, -1, -1)
    return taker.first_of(((i, giver.rows[i]) for i in places), rules.needs)


def _wish(giver: _SortedRank, taker: _SortedRank, mean: float) -> float:
    """Work that should change hands: until one has the mean, or both have the same."""
    return min(giver.area - mean, (giver.area - taker.area) / 2)


def _make(giver: _SortedRank, taker: _SortedRank, change: _Change) -> None:
    if change.back is None:
        giver.give(change.place, change.tokens, taker)
        return
    back = taker.rows[change.back]
    giver.give(change.place, change.tokens, taker)
    taker.give(taker.rows.index(back), change.tokens, giver)
