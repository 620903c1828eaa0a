"""Deal: rows that are dealt out to ranks, and what every rank has, needs and costs thereby."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flexcp.layout.balance.documents import Documents, Piece, Run, Span, needs
from flexcp.layout.balance.objective import Objective

Pieces = tuple[Piece, ...]
"""Some pieces."""
_NONE: list[Run] = []


@dataclass(frozen=True, eq=False)
class Units:
    """What a rank may part with as a whole."""

    pieces: list[Pieces]
    """Nothing, a piece, or all pieces of a document."""
    table: Any
    """float64 [4, units] Pairs; rows; rows to receive besides once it is gone; and elsewhere."""
    spans: list[Span]
    """What each of them has and sees of its document."""
    of: dict[int, list[int]]
    """Which of them are of a document."""
    cut: int
    """Rows to receive besides if the first row of some piece is cut off, at least."""
    light: tuple[int, Piece]
    """The piece whose first row has fewest pairs, and how many those are."""


@dataclass(eq=False)
class Share:
    """What one rank has."""

    rank: int
    runs: dict[int, list[Run]] = field(default_factory=dict)
    """Stretches of rows by document."""
    spans: dict[int, Span] = field(default_factory=dict)
    """What it has and sees of each document."""
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
    units: Units | None = None
    """What it may part with, once that was asked for."""


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
        self.shares = [Share(rank) for rank in range(len(parts))]
        self.moved: dict[int, int] = {}  # rows of each document that ranks need of others
        self.needs = 0  # rows that all ranks receive
        self.sharers: dict[int, list[Share]] = {}
        for share, pieces in zip(self.shares, parts, strict=True):
            self._change(share, (), tuple(pieces))
        self._settle()
        for share in self.shares:
            self._recount(share)

    def _settle(self) -> None:
        """Gives ranks with too few tokens light ends of those with most to spare."""
        for share in self.shares:
            while (few := self.bounds[share.rank][0] - share.tokens) > 0:
                spare = [s.tokens - self.bounds[s.rank][0] for s in self.shares]
                giver = self.shares[spare.index(max(spare))]
                rows = min(few, max(spare), max(b - a for _, (_, a, b) in giver.by_area) - 1)
                end = self.light_end(giver, rows, (), ()) if rows > 0 else None
                end = end or min((piece for _, piece in giver.by_area), key=lambda p: p[2] - p[1])
                self._change(giver, (end,), ())
                self._change(share, (), (end,))

    def parts(self) -> list[list[Piece]]:
        """The pieces of every rank."""
        return [[piece for _, piece in share.by_area] for share in self.shares]

    def price(self) -> float:
        """The price of the whole."""
        return max([s.cost for s in self.shares]) + self._of_rows()

    def least_price(self) -> float:
        """The price, if what ranks have too much were gone and nothing moved for it."""
        even = self.objective.level * self.mean
        level = [s.cost - s.area + even if s.area > even else s.cost for s in self.shares]
        return max(level) + self._of_rows()

    def _of_rows(self) -> float:
        return self.objective.moved * self.objective.pairs_per_row * self.needs / len(self.shares)

    def most_needed(self) -> int:
        """Rows that the rank receives that receives most."""
        return max([s.needs for s in self.shares])

    def imbalance(self) -> float:
        """Largest over mean work."""
        return max([s.area for s in self.shares]) / self.mean

    def swap(self, giver: Share, taker: Share, given: Pieces, back: Pieces) -> None:
        """One rank gives some pieces to another, and takes others back."""
        documents = {piece[0] for piece in (*given, *back)}
        moved = {document: self.moved.get(document, 0) for document in documents}
        self._change(giver, given, back)
        self._change(taker, back, given)
        for document in documents:
            more = (self.moved.get(document, 0) - moved[document]) / self.documents.sizes[document]
            for share in self.sharers[document] if more else ():
                share.sends += more * share.spans[document][2]
                self._reprice(share)
        for share in (giver, taker):
            self._recount(share)

    def _recount(self, share: Share) -> None:
        """What a rank sends and costs, after a document that it has part of was dealt out anew."""
        sizes, moved = self.documents.sizes, self.moved
        share.sends = sum(moved[d] * s[2] / sizes[d] for d, s in share.spans.items() if d in moved)
        self._reprice(share)

    def _reprice(self, share: Share) -> None:
        rows = max(share.needs, share.sends)
        share.cost = self.objective.of_rank(share.area, rows, share.count)

    def units(self, share: Share) -> Units:
        """What a rank may part with as a whole: nothing, a piece, or all of a document.

        Of many documents that it has all of, some will do: others are much like them.
        """
        if share.units is None:
            pieces: list[Pieces] = [()]
            spans, lines = [(0, 0, 0)], [(0, 0, 0, 0)]
            of: dict[int, list[int]] = {}
            step = -(-len(share.by_area) // self.objective.tries**3)
            for k, (area, piece) in enumerate(share.by_area):
                if k % step and piece[2] - piece[1] == self.documents.sizes[piece[0]]:
                    continue
                document, runs = piece[0], share.runs[piece[0]]
                span, left = share.spans[document], 0
                if len(runs) > 1:
                    span = self.documents.span(document, [piece[1:]])
                    left = needs(self.documents.span(document, [r for r in runs if r != piece[1:]]))
                of.setdefault(document, []).append(len(pieces))
                pieces.append((piece,))
                spans.append(span)
                lines.append((area, span[2], left - share.needed[document], needs(span)))
            for document, runs in share.runs.items():
                if len(runs) > 1:
                    whole, span = tuple((document, *run) for run in runs), share.spans[document]
                    of[document].append(len(pieces))
                    pieces.append(whole)
                    spans.append(span)
                    lines.append((self.pairs(whole), span[2], -needs(span), needs(span)))
            before, (first, last) = self.documents.before, self.documents.hull
            cuts = [last[a] - first[a + 1] for _, (_, a, b) in share.by_area if b > a + 1]
            light = [(before[p[1] + 1] - before[p[1]], p[1], p) for _, p in share.by_area]
            cut = min(cuts, default=self.documents.work.seq_len) - 1
            pairs, _, piece = min(light, default=(0, 0, (0, 0, 0)))
            table = np.array(lines, dtype=np.float64).T
            share.units = Units(pieces, table, spans, of, cut, (pairs, piece))
        return share.units

    def pairs(self, pieces: Sequence[Piece]) -> int:
        """Work of some pieces."""
        before = self.documents.before
        return sum([before[b] - before[a] for _, a, b in pieces])

    def light_end(
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

    def after(
        self, giver: Share, taker: Share, given: Sequence[Piece], back: Sequence[Piece]
    ) -> tuple[tuple[int, float, int], tuple[int, float, int]]:
        """Rows that each of two ranks would receive and send after a trade, and its stretches."""
        span, sizes = self.documents.span, self.documents.sizes
        needs, needs_low = giver.needs, taker.needs
        sends, sends_low = giver.sends, taker.sends
        count, count_low = giver.count, taker.count
        for document, (gone, come) in _by_document(given, back).items():
            moved, size = self.moved.get(document, 0), sizes[document]
            old, old_low = giver.runs.get(document, _NONE), taker.runs.get(document, _NONE)
            new, new_low = _changed(old, gone, come), _changed(old_low, come, gone)
            low, high, own = span(document, new)
            more = high - low - own - giver.needed.get(document, 0)
            low, high, own_low = span(document, new_low)
            more_low = high - low - own_low - taker.needed.get(document, 0)
            needs += more
            needs_low += more_low
            count += len(new) - len(old)
            count_low += len(new_low) - len(old_low)
            if moved and old:
                sends -= moved * giver.spans[document][2] / size
            if moved and old_low:
                sends_low -= moved * taker.spans[document][2] / size
            if total := moved + more + more_low:
                sends += total * own / size
                sends_low += total * own_low / size
        return (needs, sends, count), (needs_low, sends_low, count_low)

    def _change(self, share: Share, gone: Sequence[Piece], come: Sequence[Piece]) -> None:
        changed, before, span = _by_document(gone, come), self.documents.before, self.documents.span
        by_area = [entry for entry in share.by_area if entry[1][0] not in changed]
        for document, (less, more) in changed.items():
            new, sharers = _changed(share.runs.pop(document, _NONE), less, more), self.sharers
            rows = -share.needed.pop(document, 0)
            if share.spans.pop(document, None):
                sharers[document].remove(share)
            if new:
                share.runs[document] = new
                share.spans[document] = low, high, own = span(document, new)
                share.needed[document] = high - low - own
                rows += high - low - own
                sharers.setdefault(document, []).append(share)
                by_area += [(before[b] - before[a], (document, a, b)) for a, b in new]
            if rows:
                share.needs += rows
                self.needs += rows
                self.moved[document] = self.moved.get(document, 0) + rows
        by_area.sort()
        share.units, share.by_area, share.count = None, by_area, len(by_area)
        share.tokens += sum([b - a for _, a, b in come]) - sum([b - a for _, a, b in gone])
        share.area += self.pairs(come) - self.pairs(gone)


def _by_document(
    gone: Sequence[Piece], come: Sequence[Piece]
) -> dict[int, tuple[list[Run], list[Run]]]:
    """Rows that go and rows that come, of each document that has any."""
    found: dict[int, tuple[list[Run], list[Run]]] = {}
    for side, pieces in enumerate((gone, come)):
        for document, start, stop in pieces:
            if document not in found:
                found[document] = ([], [])
            found[document][side].append((start, stop))
    return found


def _changed(runs: list[Run], gone: list[Run], come: list[Run]) -> list[Run]:
    """A rank's rows of one document after some went and others came; neighbours are joined."""
    if runs == gone:
        runs = []
    for a, b in gone if runs else ():
        left: list[Run] = []
        for start, stop in runs:
            if start < a:
                left.append((start, min(stop, a)))
            if b < stop:
                left.append((max(start, b), stop))
        runs = left
    if not come or (not runs and len(come) == 1):
        return come or runs
    found: list[Run] = []
    for a, b in sorted([*runs, *come]):
        if found and found[-1][1] == a:
            found[-1] = (found[-1][0], b)
        else:
            found.append((a, b))
    return found
