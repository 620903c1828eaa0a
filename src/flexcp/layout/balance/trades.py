"""The local search: the slowest rank moves pieces to others, or trades them for other pieces.

A trade gives a piece, or an end of one, and takes another, or none. Where token counts would leave
their bounds, the rank that has too many adds the lightest end of a piece that it has.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from flexcp.layout.balance.deal import Deal, Pieces, Share
from flexcp.layout.balance.documents import Piece

Offer = tuple[float, Share, Pieces, Pieces]
"""What it gains at most, about; to whom to give, which pieces, and which to take back."""


class Trade(NamedTuple):
    """What a rank gives to another, and takes back."""

    gain: float
    """By how much the slower gets faster, less the price of rows; of uneven work, over that."""
    taker: Share
    given: Pieces
    back: Pieces


def improve(deal: Deal, most: float = math.inf) -> None:
    """Trades of the slowest rank, as long as any is worth it and the price is not too high."""
    stuck: set[tuple[int, bool]] = set()  # asked again once changed, or all others are stuck
    made: set[tuple[int, int, Pieces, Pieces]] = set()
    changed, tries = False, deal.objective.tries
    fine = tries**3  # trades once work is even enough for documents that stay whole
    for _ in range(tries * len(deal.shares)):
        whole = len(deal.documents) > 1 and not deal.objective.beside
        fine -= whole and deal.imbalance() <= deal.objective.enough
        if deal.least_price() > most or len(deal.shares) == 1 or fine < 0:
            return
        for turn in _turns(deal, stuck):
            trade = turn.best()
            # One that was made before has been taken back since: even work and the price disagree.
            known = trade and (turn.giver.rank, trade.taker.rank, trade.given, trade.back)
            if trade and known and known not in made:
                made.add(known)
                price = math.inf if turn.uneven else deal.price()
                deal.swap(turn.giver, trade.taker, trade.given, trade.back)
                if turn.uneven or deal.price() < price:
                    both = (turn.giver.rank, trade.taker.rank)
                    stuck, changed = {key for key in stuck if key[0] not in both}, True
                    break
                # Others send more than the two save.
                deal.swap(turn.giver, trade.taker, trade.back, trade.given)
            stuck.add((turn.giver.rank, turn.uneven))
        else:
            if not changed:
                return
            stuck, changed = set(), False


def _turns(deal: Deal, stuck: set[tuple[int, bool]]) -> Iterator[_Turn]:
    """Ranks with most work, as far as that is uneven, and the slowest rank."""
    objective, even = deal.objective, deal.mean * deal.objective.even
    shares = sorted(deal.shares, key=lambda s: (-s.area, s.rank))
    for share in shares[: objective.tries]:
        if share.area <= even:
            break
        if (share.rank, True) in stuck:
            continue
        turn = _Turn(deal, share, shares[0].area, uneven=True)
        yield turn
        if share.area <= turn.enough:
            break
    slowest = max(deal.shares, key=lambda s: (s.cost, -s.rank))
    if (slowest.rank, False) not in stuck:
        yield _Turn(deal, slowest, max(even, shares[0].area), uneven=False)


class _Turn:
    """The trades of one rank, which has too much work if that is uneven, or else is the slowest."""

    def __init__(self, deal: Deal, giver: Share, most: float, *, uneven: bool) -> None:
        self.deal, self.objective, self.mean = deal, deal.objective, deal.mean
        self.giver, self.uneven, self.most = giver, uneven, most
        others = (s for s in deal.shares if s is not giver)
        self.others = sorted(others, key=lambda s: (s.area if uneven else s.cost, s.rank))
        self.is_good = not uneven and giver.cost <= self.objective.good * self.mean
        even, enough = self.objective.level, self.objective.enough
        # Where documents can stay whole, nothing is cut for work that is even enough.
        limits = (even, enough) if len(deal.documents) > 1 else (1.0, 1.0)
        self.level, self.enough = (self.mean * limit for limit in limits)
        # Of what is uneven, a trade takes a quarter, or counts little.
        self.quarter = self.giver.area - (self.giver.area - even * self.mean) / 4
        self.held = deal.most_needed()
        free = self._gain(self.level, self.level, 0) if uneven else math.inf
        self.fair = 2 * self.objective.small * free

    def best(self) -> Trade | None:
        """The best trade that is worth it; what makes work even for little is taken as found."""
        if self.is_good:
            return None
        giver, others, tries = self.giver, self.others, self.objective.tries
        sharers = {s.rank for document in giver.runs for s in self.deal.sharers[document]}
        sharing = [s for s in others[tries:] if s.rank in sharers]
        few = {s.rank: s for s in (*others[: 2 * tries], *sharing[: 2 * tries])}
        found = self._best(self._promising([*few.values()] if self.uneven else others), None)
        found = self._best(self._ends(others[:tries] + sharing[:tries]), found)
        found = found or self._best(self._ends(sharing[tries:]), None)
        return found or (self._best(self._promising(others), None) if self.uneven else None)

    def _best(self, offers: Iterable[Offer], best: Trade | None) -> Trade | None:
        for gain, taker, given, back in offers:
            if best and best.gain >= min(self.fair, gain):
                break
            best = self._judged(taker, given, back, best.gain if best else 0.0) or best
        return best

    def _promising(self, others: Sequence[Share]) -> Iterator[Offer]:
        """The best pieces for pieces, or for none, of all ranks, as far as sums tell."""
        deal, giver, objective = self.deal, self.giver, self.objective
        own, units = deal.units(giver), [deal.units(share) for share in others]
        place_of = {share.rank: place for place, share in enumerate(others)}
        sizes = [len(u.pieces) for u in units]
        first = [0, *accumulate(sizes)]
        at = np.repeat(np.arange(len(others)), sizes)
        area, tokens, leaving, coming = np.concatenate([u.table for u in units], axis=1)
        coming_there = own.table[3][:, None] + np.zeros(len(others))
        # Where a rank has rows of the document already, it needs less besides.
        for document, (low, high, _) in giver.spans.items():
            for share in deal.sharers[document]:
                if share.rank in place_of:
                    place = place_of[share.rank]
                    begin, end, _ = share.spans[document]
                    for k in own.of[document]:
                        a, b, rows = own.spans[k]
                        coming_there[k, place] = max(b - end, 0) + max(begin - a, 0) - rows
                    for k in units[place].of[document]:
                        a, b, rows = units[place].spans[k]
                        coming[first[place] + k] = max(b - high, 0) + max(low - a, 0) - rows
        state = ((s.area, s.tokens, s.needs, s.count, *deal.bounds[s.rank]) for s in others)
        of = np.array([(*x, unit.cut) for x, unit in zip(state, units, strict=True)]).T
        # Most pairs are out by their work alone.
        work = own.table[0][:, None] - area
        highest = np.maximum(giver.area - work, of[0, at] + work)
        hopeful = highest <= (self.quarter if self.uneven else self.most)
        if not self.uneven:  # the rank itself has to become faster
            hopeful &= (work > objective.worth * self.mean) | (own.table[2][:, None] + coming < 0)
        pairs = np.flatnonzero(hopeful)
        if self.uneven and not pairs.size:
            pairs = np.flatnonzero(highest < giver.area)
        i, j = np.divmod(pairs, area.size)
        work, highest, who = work.ravel()[pairs], highest.ravel()[pairs], at[j]
        area_of, tokens_of, needs_of, count_of, least_of, most_of, cut_of = of[:, who]
        least, most = deal.bounds[giver.rank]
        moved = own.table[1, i] - tokens[j]
        few = np.maximum(least - giver.tokens + moved, tokens_of + moved - most_of)
        many = np.maximum(giver.tokens - moved - most, least_of - tokens_of - moved)
        needs = own.table[2, i] + coming[j] + np.where(few > 0, few + cut_of, 0)
        needs_of_both = leaving[j] + coming_there[i, who] + np.where(many > 0, many + own.cut, 0)
        cost = np.maximum(
            objective.of_rank(giver.area - work, giver.needs + needs, giver.count, np.maximum),
            objective.of_rank(area_of + work, needs_of + needs_of_both, count_of, np.maximum),
        )
        rows = np.maximum(giver.needs + needs, needs_of + needs_of_both)
        gain = self._gain(highest, cost, needs + needs_of_both, np.maximum, rows)
        count = 2 * objective.tries
        if gain.size > count:
            top = np.flatnonzero(gain >= np.partition(gain, -count)[-count])
            gain, i, j, who = gain[top], i[top], j[top], who[top]
        for k in np.argsort(-gain, kind="stable")[:count].tolist():
            r = int(who[k])
            if gain[k] > 0:
                pair = own.pieces[int(i[k])], units[r].pieces[int(j[k] - first[r])]
                yield float(gain[k]), others[r], *pair

    def _gain(self, highest: Any, cost: Any, rows: Any, larger: Any = max, most: Any = 0) -> Any:
        """What trades gain that leave the two ranks with at most so much work, cost and rows.

        Uneven work is made even by what takes least; whatever it takes, where it is over `enough`.
        Rows beyond the most that any rank receives count in full, since they take memory.
        """
        giver, objective = self.giver, self.objective
        price = objective.moved * objective.pairs_per_row * rows
        if not self.uneven:
            gain = giver.cost - cost - price
            return gain * ((gain > objective.worth * self.mean) & (highest <= self.most))
        less = giver.area - larger(highest, self.level)
        waits = larger(cost - highest - giver.cost + giver.area, 0.0)
        price = waits + larger(price, 0.0) + objective.pairs_per_row * larger(most - self.held, 0)
        gain = less / ((objective.enough - 1) * self.mean + price)
        much, fair = highest <= self.quarter, less >= objective.small * price
        return gain * (much + (1 - much) * objective.small) * (fair | (giver.area > self.enough))

    def _ends(self, others: Sequence[Share]) -> Iterator[Offer]:
        """Ends of documents that both have, or dense ones for work that is uneven.

        As many rows as counts have room for, or for as many light ones.
        """
        before, giver, bounds = self.deal.documents.before, self.giver, self.deal.bounds
        ends = sorted((before[p[2]] - before[p[2] - 1], p) for _, p in giver.by_area)
        for taker in others:
            apart = giver.area - taker.area
            wish = max(min(giver.area - self.mean, apart / 2), apart / 4)
            if not self.uneven:
                wish = max(wish, self.most - taker.area)
            if wish <= 0 or not taker.by_area:
                continue
            room = min(bounds[taker.rank][1] - taker.tokens, giver.tokens - bounds[giver.rank][0])
            lightest, light = self.deal.units(taker).light
            dense = ends[max(0, bisect_left(ends, (lightest + wish + 1,)) - 1)][1]
            both = [d for d in giver.runs if d in taker.runs]
            shared = [(d, *run) for d in both[:2] for run in giver.runs[d]]
            for document, start, stop in dict.fromkeys([dense, *shared] if self.uneven else shared):
                rows = min(stop - start, room) if document in taker.runs else 0
                if rows > 0 and before[stop] - before[stop - rows] > wish:
                    rows = stop - bisect_left(before, before[stop] - wish, stop - rows, stop)
                if rows > 0:
                    yield math.inf, taker, ((document, stop - rows, stop),), ()
                least, most = 0, min(stop - start, light[2] - light[1])
                while least < most:
                    k = (least + most + 1) // 2
                    gain = before[stop] - before[stop - k] - before[light[1] + k] + before[light[1]]
                    least, most = (k, most) if gain <= wish else (least, k - 1)
                if least:
                    end = (light[0], light[1], light[1] + least)
                    yield math.inf, taker, ((document, stop - least, stop),), (end,)

    def _judged(self, taker: Share, given: Pieces, back: Pieces, least_gain: float) -> Trade | None:
        """The trade, with what keeps token counts within bounds, if it gains over `least_gain`."""
        deal, giver, price = self.deal, self.giver, self.objective.of_rank
        area = deal.pairs(given) - deal.pairs(back)
        moved = sum([b - a for _, a, b in given]) - sum([b - a for _, a, b in back])
        (least, most), (least_low, most_low) = deal.bounds[giver.rank], deal.bounds[taker.rank]
        few = max(least - giver.tokens + moved, taker.tokens + moved - most_low)
        many = max(giver.tokens - moved - most, least_low - taker.tokens - moved)
        had = giver.needs + taker.needs
        if few > 0 or many > 0:
            highest = taker.area + area if many > 0 else giver.area - area  # who gives more yet?
            if (few > 0 and many > 0) or self._gain(highest, highest, -had) <= least_gain:
                return None
            sides = (taker, few, back, given) if few > 0 else (giver, many, given, back)
            end = deal.light_end(*sides)
            if end is None:
                return None
            come, gone = _kept(sides[3], sides[2], end)
            given, back = (come, gone) if few > 0 else (gone, come)
            area = deal.pairs(given) - deal.pairs(back)
        highest = max(own_area := giver.area - area, low_area := taker.area + area)
        if self._gain(highest, highest, -had) <= least_gain:
            return None
        new, its = deal.after(giver, taker, given, back)
        cost = max(price(own_area, max(new[:2]), new[2]), price(low_area, max(its[:2]), its[2]))
        gain = self._gain(highest, cost, new[0] + its[0] - had, most=max(new[0], its[0]))
        return Trade(gain, taker, given, back) if gain > least_gain else None


def _kept(given: Pieces, back: Pieces, end: Piece) -> tuple[Pieces, Pieces]:
    """What is given and taken back if an end comes back too; an end of what is given just stays."""
    for i, (document, start, stop) in enumerate(given):
        if document == end[0] and start == end[1] and end[2] < stop:
            return (*given[:i], (document, end[2], stop), *given[i + 1 :]), back
    return given, (*back, end)
