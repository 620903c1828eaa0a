"""The local search: the slowest rank moves pieces to others, or trades them for other pieces.

A trade gives a piece, or an end of one, and takes another, or none. Where token counts would leave
their bounds, the rank that has too many adds the lightest end of a piece that it has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from flexcp.layout.balance.documents import Documents, Piece, Run
from flexcp.layout.balance.objective import Objective


@dataclass(eq=False)
class Share:
    """What one rank has."""

    runs: dict[int, list[Run]] = field(default_factory=dict)
    """Stretches of rows by document."""
    needed: dict[int, int] = field(default_factory=dict)
    """Rows of others that each document makes it receive."""
    tokens: int = 0
    area: int = 0
    needs: int = 0
    """Rows that it receives."""
    sends: float = 0.0
    """Rows that it sends, about: of what others need of a document, as much as it has of it."""
    count: int = 0
    """Stretches."""
    cost: float = 0.0
    by_area: list[tuple[int, Piece]] = field(default_factory=list)
    """Its pieces with their pairs, ascending."""


@dataclass(frozen=True)
class Trade:
    """What one rank gives to another, and takes back."""

    gain: float
    """By how much the slower of both gets faster, less what moving rows costs."""
    giver: int
    taker: int
    given: tuple[Piece, ...]
    back: tuple[Piece, ...]


Offer = tuple[tuple[Piece, ...], tuple[Piece, ...]]
"""Pieces to give, and pieces to take back."""


class Deal:
    """All rows, dealt out to ranks; knows what every rank has, needs and costs."""

    def __init__(
        self,
        documents: Documents,
        parts: Sequence[Sequence[Piece]],
        bounds: Sequence[tuple[int, int]],
        objective: Objective,
    ) -> None:
        self.documents, self.bounds, self.objective = documents, bounds, objective
        self.mean = max(documents.total / len(parts), 1e-9)
        # Where documents can stay whole, nothing is cut for work that is even enough.
        self._level = self.mean * (objective.even if len(documents) > 1 else 1.0)
        self.shares = [Share() for _ in parts]
        self._moved: dict[int, int] = {}
        self._sharers: dict[int, list[Share]] = {}
        for share, pieces in zip(self.shares, parts, strict=True):
            self._change(share, (), tuple(pieces))
        self._settle()
        for share in self.shares:
            self._recount(share)

    def _settle(self) -> None:
        """Gives ranks with too few tokens light ends of those with most."""
        for low in range(len(self.shares)):
            share = self.shares[low]
            while share.tokens < self.bounds[low][0]:
                high = max(range(len(self.shares)), key=lambda r: (self.shares[r].tokens, -r))
                giver = self.shares[high]
                rows = min(self.bounds[low][0] - share.tokens, giver.tokens - self.bounds[high][0])
                longest = max(b - a for _, (_, a, b) in giver.by_area)
                end = self._light_end(giver, min(rows, longest - 1), (), ())
                end = end or min((piece for _, piece in giver.by_area), key=lambda p: p[2] - p[1])
                self._change(giver, (end,), ())
                self._change(share, (), (end,))

    def parts(self) -> list[list[Piece]]:
        """The pieces of every rank."""
        return [[piece for _, piece in share.by_area] for share in self.shares]

    def price(self) -> float:
        """The price of the whole."""
        moved = sum(s.needs for s in self.shares) / len(self.shares)
        objective = self.objective
        return max(s.cost for s in self.shares) + objective.moved * objective.pairs_per_row * moved

    def imbalance(self) -> float:
        """Largest over mean work."""
        return max(s.area for s in self.shares) / self.mean

    def improve(self) -> None:
        """Trades of the slowest rank, as long as any of them is worth it."""
        for _ in range(self.objective.tries * len(self.shares)):
            trade = self._next()
            if trade is None:
                return
            self._change(self.shares[trade.giver], trade.given, trade.back)
            self._change(self.shares[trade.taker], trade.back, trade.given)
            for document in {piece[0] for piece in (*trade.given, *trade.back)}:
                for share in self._sharers.get(document, ()):
                    self._recount(share)

    def _recount(self, share: Share) -> None:
        """What a rank sends and costs, after a document that it has part of was dealt out anew."""
        share.sends = sum(self._sent(d, runs) for d, runs in share.runs.items() if d in self._moved)
        share.cost = self.objective.of_rank(share.area, max(share.needs, share.sends), share.count)

    def _sent(self, document: int, runs: Sequence[Run]) -> float:
        rows = sum(b - a for a, b in runs)
        return self._moved[document] * rows / self.documents.sizes[document]

    def _next(self) -> Trade | None:
        """The best trade of the rank with most work, if that is uneven, or else of the slowest."""
        uneven = max(s.area for s in self.shares) > self.objective.even * self.mean
        by = [s.area if uneven else s.cost for s in self.shares]
        high = max(range(len(by)), key=lambda r: (by[r], -r))
        if by[high] <= self.objective.good * self.mean:
            return None
        order = sorted((r for r in range(len(by)) if r != high), key=lambda r: (by[r], r))
        own = self.shares[high].runs.keys()
        tries = self.objective.tries
        near, far = order[:tries], order[tries:]
        near += [r for r in far if not own.isdisjoint(self.shares[r].runs)][: tries // 2]
        return self._best(high, near, uneven=uneven) or self._best(high, far, uneven=uneven)

    def _best(self, high: int, partners: Sequence[int], *, uneven: bool) -> Trade | None:
        best: Trade | None = None
        giver, objective = self.shares[high], self.objective
        free = (giver.area - objective.even * self.mean) / ((objective.enough - 1) * self.mean)
        for low in partners:
            for given, back in self._offers(high, low):
                least = best.gain if best else float("-inf")
                best = self._judged(high, low, given, back, least, uneven=uneven) or best
                if uneven and best and best.gain >= free:
                    return best  # is even, and nothing more moves
        return best

    def _offers(self, high: int, low: int) -> Iterator[Offer]:
        """Pieces for pieces, or for none; and ends of pieces."""
        giver, taker = self.shares[high], self.shares[low]
        wish = max(
            min(giver.area - self.mean, (giver.area - taker.area) / 2),
            (giver.area - taker.area) / 4,
        )
        theirs = taker.by_area
        found: list[tuple[float, Piece, Piece | None]] = []
        for own, piece in giver.by_area:
            goal = own - wish
            at = bisect_left(theirs, (goal,))
            found += [
                (abs(theirs[i][0] - goal), piece, theirs[i][1])
                for i in (at - 1, at)
                if 0 <= i < len(theirs)
            ]
            found.append((abs(goal), piece, None))
        found.sort(key=lambda one: one[0])
        for _, piece, other in found[: self.objective.tries]:
            yield (piece,), (other,) if other else ()
        yield from self._handed_over(giver, taker, wish)
        if wish > 0 and theirs:
            room = min(giver.tokens - self.bounds[high][0], self.bounds[low][1] - taker.tokens)
            yield from self._ends(giver, taker, wish, room)

    def _handed_over(self, giver: Share, taker: Share, wish: float) -> Iterator[Offer]:
        """All rows of a document that makes the giver receive many, for a piece of as much work."""
        needy = sorted((-rows, d) for d, rows in giver.needed.items() if rows)
        for _, document in needy[: self.objective.tries]:
            given = tuple((document, *run) for run in giver.runs[document])
            at = bisect_left(taker.by_area, (self._area(given) - wish,))
            for i in (at - 1, at):
                if 0 <= i < len(taker.by_area) and taker.by_area[i][1][0] != document:
                    yield given, (taker.by_area[i][1],)

    def _ends(self, giver: Share, taker: Share, wish: float, room: int) -> Iterator[Offer]:
        """Dense ends of pieces: as many rows as counts have room for, or for as many light ones."""
        before = self.documents.before
        light = min(
            (piece for _, piece in taker.by_area),
            key=lambda p: (before[p[1] + 1] - before[p[1]], p),
        )
        lightest = before[light[1] + 1] - before[light[1]]
        ends = [(before[p[2]] - before[p[2] - 1], p) for _, p in giver.by_area]
        dense = max((end for end in ends if end[0] <= lightest + wish), default=ends[0])[1]
        both = [d for d in giver.runs if d in taker.runs]
        shared = [(d, *run) for d in both[:2] for run in giver.runs[d]]
        for document, start, stop in dict.fromkeys([dense, *shared]):
            rows = min(stop - start, room)
            if rows > 0 and before[stop] - before[stop - rows] > wish:
                rows = stop - bisect_left(before, before[stop] - wish, stop - rows, stop)
            if rows > 0:
                yield ((document, stop - rows, stop),), ()
            least, most = 0, min(stop - start, light[2] - light[1])
            while least < most:
                k = (least + most + 1) // 2
                gain = before[stop] - before[stop - k] - before[light[1] + k] + before[light[1]]
                if gain <= wish:
                    least = k
                else:
                    most = k - 1
            if least:
                yield ((document, stop - least, stop),), ((light[0], light[1], light[1] + least),)

    def _judged(
        self,
        high: int,
        low: int,
        given: tuple[Piece, ...],
        back: tuple[Piece, ...],
        least_gain: float,
        *,
        uneven: bool,
    ) -> Trade | None:
        """The trade with what keeps token counts within bounds, if it gains more than `least_gain`.

        What moves costs something, so that work alone tells that most of them don't.
        """
        giver, taker = self.shares[high], self.shares[low]
        if uneven and self._gain_of_work(giver, taker, given, back) <= max(0.0, least_gain):
            return None
        objective = self.objective
        moved = sum(b - a for _, a, b in given) - sum(b - a for _, a, b in back)
        (least, most), (least_low, most_low) = self.bounds[high], self.bounds[low]
        few = max(least - giver.tokens + moved, taker.tokens + moved - most_low)
        many = max(giver.tokens - moved - most, least_low - taker.tokens - moved)
        if few > 0:
            end = self._light_end(taker, few, back, given) if many <= 0 else None
            if end is None:
                return None
            given, back = _kept(given, back, end)
        elif many > 0:
            end = self._light_end(giver, many, given, back)
            if end is None:
                return None
            back, given = _kept(back, given, end)
        area = self._area(given) - self._area(back)
        highest = max(giver.area - area, taker.area + area)
        if uneven:
            most_gain = self._gain_of_work(giver, taker, given, back)
        else:
            most_gain = (
                giver.cost
                - highest
                + objective.moved * objective.pairs_per_row * (giver.needs + taker.needs)
            )
        if most_gain <= max(0.0, least_gain):
            return None
        needs, sends, count = self._after(giver, given, back)
        needs_low, sends_low, count_low = self._after(taker, back, given)
        cost = max(
            objective.of_rank(giver.area - area, max(needs, sends), count),
            objective.of_rank(taker.area + area, max(needs_low, sends_low), count_low),
        )
        rows = needs + needs_low - giver.needs - taker.needs
        gain = giver.cost - cost - objective.moved * objective.pairs_per_row * rows
        if uneven:  # is made even whatever that takes, by what takes least
            less = giver.area - max(highest, self._level)
            waits = max(0.0, cost - highest - giver.cost + giver.area)
            price = waits + objective.moved * objective.pairs_per_row * max(rows, 0)
            gain = less / ((objective.enough - 1) * self.mean + price)
        elif gain <= objective.worth * self.mean or highest > objective.even * self.mean:
            return None
        if gain <= least_gain:
            return None
        return Trade(gain, high, low, given, back)

    def _gain_of_work(
        self, giver: Share, taker: Share, given: Sequence[Piece], back: Sequence[Piece]
    ) -> float:
        """What a trade of uneven work gains if nothing has to move for it."""
        area = self._area(given) - self._area(back)
        highest = max(giver.area - area, taker.area + area)
        return (giver.area - max(highest, self._level)) / (self.mean * (self.objective.enough - 1))

    def _area(self, pieces: Sequence[Piece]) -> int:
        before = self.documents.before
        return sum(before[b] - before[a] for _, a, b in pieces)

    def _light_end(
        self, share: Share, rows: int, gone: Sequence[Piece], come: Sequence[Piece]
    ) -> Piece | None:
        """The first rows of a piece that a rank has after a trade, where parting costs least."""
        before, (first, last) = self.documents.before, self.documents.hull
        price, left = self.objective.pairs_per_row, {document for document, _, _ in gone}
        best, least = None, float("inf")
        for document, start, stop in (*(piece for _, piece in share.by_area), *come):
            cut = start + rows
            if cut >= stop or document in left:
                continue
            # Each part needs what it sees beyond itself; the whole piece needs some of it anyway.
            needs = last[cut - 1] - first[cut]
            cost = before[cut] - before[start] + price * needs
            if cost < least:
                best, least = (document, start, cut), cost
        return best

    def _after(
        self, share: Share, gone: Sequence[Piece], come: Sequence[Piece]
    ) -> tuple[int, float, int]:
        """Rows that a rank would receive and send, and stretches that it would have."""
        needs, sends, count = share.needs, share.sends, share.count
        for document in {p[0] for p in (*gone, *come)}:
            old = share.runs.get(document, [])
            new = _changed(old, document, gone, come)
            more = self.documents.needs(document, new) - share.needed.get(document, 0)
            needs += more
            count += len(new) - len(old)
            moved = self._moved.get(document, 0)
            if moved + more:
                rows = sum(b - a for a, b in new)
                sends += (moved + more) * rows / self.documents.sizes[document]
            if moved and old:
                sends -= self._sent(document, old)
        return needs, sends, count

    def _change(self, share: Share, gone: Sequence[Piece], come: Sequence[Piece]) -> None:
        for document in {p[0] for p in (*gone, *come)}:
            new = _changed(share.runs.pop(document, []), document, gone, come)
            moved = self._moved.pop(document, 0) - share.needed.pop(document, 0)
            sharers = self._sharers.setdefault(document, [])
            if share in sharers:
                sharers.remove(share)
            if new:
                share.runs[document] = new
                share.needed[document] = self.documents.needs(document, new)
                moved += share.needed[document]
                sharers.append(share)
            if moved:
                self._moved[document] = moved
        before = self.documents.before
        share.by_area = sorted(
            (before[b] - before[a], (document, a, b))
            for document, runs in share.runs.items()
            for a, b in runs
        )
        share.tokens += sum(b - a for _, a, b in come) - sum(b - a for _, a, b in gone)
        share.area += self._area(come) - self._area(gone)
        share.needs = sum(share.needed.values())
        share.count = len(share.by_area)
        self._recount(share)


def _kept(given: tuple[Piece, ...], back: tuple[Piece, ...], end: Piece) -> Offer:
    """What is given and taken back if an end comes back too; an end of what is given just stays."""
    for i, (document, start, stop) in enumerate(given):
        if document == end[0] and start == end[1] and end[2] < stop:
            return (*given[:i], (document, end[2], stop), *given[i + 1 :]), back
    return given, (*back, end)


def _changed(
    runs: list[Run], document: int, gone: Sequence[Piece], come: Sequence[Piece]
) -> list[Run]:
    """A rank's rows of one document after some went and others came; neighbours are joined."""
    for d, a, b in gone:
        if d == document:
            runs = [
                part
                for start, stop in runs
                for part in (((start, min(stop, a)), (max(start, b), stop)))
                if part[0] < part[1]
            ]
    found: list[Run] = []
    for a, b in sorted([*runs, *((a, b) for d, a, b in come if d == document)]):
        if found and found[-1][1] == a:
            found[-1] = (found[-1][0], b)
        else:
            found.append((a, b))
    return found
