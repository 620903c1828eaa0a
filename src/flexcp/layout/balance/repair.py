"""Taking from the rank that would receive most what it has of one group, for others that have more.

A rank that has rows of two large groups needs the rows of both. Its rows of one of them go to the
ranks that work on that group anyway, in exchange for rows of small documents. Those ranks then have
a little more work, and the rank itself less, which makes nobody slower as long as the others stay
within a limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flexcp.layout.balance.seeds import Taken

_TURNS = 2
"""Ranks that are looked at, in multiples of the ranks there are."""


@dataclass(eq=False)
class _RankByGroup:
    """What one rank has."""

    small: list[Taken] = field(default_factory=list)
    """Rows of small documents: to have them costs nothing."""
    large: dict[int, list[Taken]] = field(default_factory=dict)
    """Rows of other groups, by number."""
    area: int = 0
    """Allowed pairs of queries and keys, over all its rows."""

    def needed_rows(self, group: int) -> int:
        """Rows of a group that this rank needs, its own included."""
        return max((unit.needed_rows for _, unit in self.large.get(group, ())), default=0)

    def tokens(self, group: int) -> int:
        """Rows of a group that this rank has."""
        return sum(unit.tokens for _, unit in self.large.get(group, ()))

    def area_of(self, group: int) -> int:
        """Work of the rows of a group."""
        return sum(unit.area for _, unit in self.large.get(group, ()))

    @property
    def received(self) -> int:
        """Rows of all groups but small ones that it has to receive."""
        return sum(max(0, self.needed_rows(g) - self.tokens(g)) for g in self.large)

    def add(self, group_and_unit: Taken) -> None:
        """Gets rows."""
        group, unit = group_and_unit
        rows = self.small if group.small else self.large.setdefault(group.number, [])
        rows.append(group_and_unit)
        self.area += unit.area


def repaired(parts: list[list[Taken]], most: int, slack: int) -> list[list[Taken]]:
    """All rows, dealt out so that the ranks that receive most receive less.

    Args:
        parts: What each rank has.
        most: Work that no rank should exceed.
        slack: How much more it may be before small documents are exchanged to make it even.
    """
    ranks = [_RankByGroup() for _ in parts]
    for rank, own in zip(ranks, parts, strict=True):
        for group, unit in own:
            rank.add((group, unit.copy()))
    received = [rank.received for rank in ranks]
    for _ in range(_TURNS * len(ranks)):
        worst = max(range(len(ranks)), key=received.__getitem__)
        changed = _relieve(worst, ranks, received, most + slack)
        if not changed:
            break
        for i in changed:
            received[i] = ranks[i].received
    _even_out(ranks, most)
    return [[*r.small, *(taken for rows in r.large.values() for taken in rows)] for r in ranks]


def _even_out(ranks: list[_RankByGroup], most: int) -> None:
    """Exchanges rows of small documents between the ranks with most and with least work."""
    for _ in range(_TURNS * len(ranks)):
        high = max(range(len(ranks)), key=lambda i: (ranks[i].area, -i))
        low = min(range(len(ranks)), key=lambda i: (ranks[i].area, i))
        if ranks[high].area <= most or not _lighten(ranks[high], ranks[low], most):
            return


def _lighten(high: _RankByGroup, low: _RankByGroup, most: int) -> bool:
    """Gives the densest small rows of one rank for the least dense ones of another."""
    if not high.small or not low.small:
        return False
    high.small.sort(key=lambda taken: (_density(taken), taken[1].start))
    low.small.sort(key=lambda taken: (-_density(taken), taken[1].start))
    dense, sparse = _density(high.small[-1]), _density(low.small[-1])
    wish = min(high.area - most, most - low.area)
    if dense <= sparse or wish <= 0:
        return False
    tokens = min(
        high.small[-1][1].tokens,
        low.small[-1][1].tokens,
        max(1, -int(-wish // (dense - sparse))),
    )
    given = low.small.pop()
    _move(high, low, high.small, tokens)
    low.small.append(given)
    _move(low, high, low.small, tokens)
    return True


def _density(taken: Taken) -> float:
    return taken[1].area / taken[1].tokens


def _relieve(worst: int, ranks: list[_RankByGroup], received: list[int], most: int) -> list[int]:
    """Takes one group away from a rank; returns the ranks that changed."""
    rank = ranks[worst]
    saves = {g: rank.needed_rows(g) - rank.tokens(g) for g in rank.large}
    if len(rank.large) < 2:
        return []
    # Few rows that need many are the first to go.
    for group in sorted(saves, key=lambda g: rank.area_of(g) / max(1, saves[g])):
        if saves[group] > 0 and (changed := _hand_over(group, worst, ranks, received, most)):
            return changed
    return []


def _hand_over(
    group: int, giver: int, ranks: list[_RankByGroup], received: list[int], most: int
) -> list[int]:
    """Gives all rows of a group to ranks that have more of it, if they have room for them."""
    left = ranks[giver].tokens(group)
    area = sum(unit.area for _, unit in ranks[giver].large[group])
    needed = ranks[giver].needed_rows(group)
    dense = area / left
    offers: list[tuple[int, int]] = []
    others = [i for i, r in enumerate(ranks) if i != giver and group in r.large]
    for i in sorted(others, key=lambda i: (ranks[i].area, i)):
        offer = _room(ranks[i], group, dense, needed, received[giver], most)
        if offer > 0:
            offers.append((i, min(left, offer)))
            left -= min(left, offer)
        if left == 0:
            break
    if left:
        return []
    for i, tokens in offers:
        _exchange(ranks[giver], ranks[i], group, tokens)
    return [giver, *(i for i, _ in offers)]


def _room(rank: _RankByGroup, group: int, dense: float, needed: int, limit: int, most: int) -> int:
    """How many rows of a group a rank can take for rows of small documents."""
    tokens = sum(unit.tokens for _, unit in rank.small)
    if tokens == 0:
        return 0
    cheap = sum(unit.area for _, unit in rank.small) / tokens
    if rank.received - rank.needed_rows(group) + max(rank.needed_rows(group), needed) >= limit:
        return 0
    if dense > cheap:
        tokens = min(tokens, int((most - rank.area) / (dense - cheap)))
    return tokens


def _exchange(giver: _RankByGroup, taker: _RankByGroup, group: int, tokens: int) -> None:
    """Some rows of a group for as many of small documents."""
    _move(giver, taker, giver.large[group], tokens)
    _move(taker, giver, taker.small, tokens)
    if not giver.large[group]:
        del giver.large[group]


def _move(source: _RankByGroup, target: _RankByGroup, rows: list[Taken], tokens: int) -> None:
    """Moves the last of some rows to another rank."""
    while tokens:
        group, unit = rows[-1]
        part = unit.take(min(tokens, unit.tokens), from_end=True)
        if unit.tokens == 0:
            rows.pop()
        source.area -= part.area
        target.add((group, part))
        tokens -= part.tokens
