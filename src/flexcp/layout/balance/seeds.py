"""Seeds: a few ways to deal out documents, from which the local search goes on."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from flexcp.layout.balance.documents import Documents, Piece, Run, mixed, needs
from flexcp.layout.balance.objective import Objective

Parts = list[list[Piece]]
"""The pieces of every rank."""


@dataclass(frozen=True, eq=False)
class Seed:
    """All rows, dealt out to ranks, with what that costs."""

    parts: Parts
    price: float
    """As it is; see `Deal.price`."""
    if_even: float
    """With what ranks have too much: to even that out takes many times as much."""

    @classmethod
    def of(cls, documents: Documents, objective: Objective, parts: Parts) -> Seed:
        """Prices parts, all ranks and documents at once."""
        pieces = np.array([len(own) for own in parts])
        flat = chain.from_iterable(chain.from_iterable(parts))
        table = np.fromiter(flat, np.int64, 3 * int(pieces.sum())).reshape(-1, 3)
        rank, (document, start, stop) = np.repeat(np.arange(len(parts)), pieces), table.T
        before, (first, last) = documents.rows, (x.numpy() for x in documents.work.hull)
        area = np.bincount(rank, before[stop] - before[start], len(parts))
        # What a rank needs of a document goes from the first key that it sees to the last.
        key = rank * len(documents) + document
        order = np.argsort(key, kind="stable")
        opens = np.flatnonzero(np.diff(key[order], prepend=-1))
        own = np.add.reduceat((stop - start)[order], opens)
        low, high = first[start[order]], last[stop[order] - 1]
        needs = np.maximum.reduceat(high, opens) - np.minimum.reduceat(low, opens) - own
        rank, document = rank[order[opens]], document[order[opens]]
        moved = np.bincount(document, needs, len(documents))
        sends = (moved / documents.sizes)[document] * own
        received, sent = (np.bincount(rank, rows, len(parts)) for rows in (needs, sends))
        cost = objective.of_rank(area, np.maximum(received, sent), pieces, np.maximum)
        price = cost.max() + objective.moved * objective.pairs_per_row * received.mean()
        over = np.maximum(area - objective.level * objective.mean, 0.0).mean() / objective.small
        return cls(parts, float(price), float(price + over))


def in_order(documents: Documents, counts: Sequence[int], dense: Sequence[int] = ()) -> Parts:
    """Rank r gets the r-th stretch; rows that see far more than most are dealt out to all ranks."""
    each, holder = -(-len(dense) // len(counts)), documents.holder
    own = [dense[rank * each :][:each] for rank in range(len(counts))]
    parts: Parts = [[(holder(row), row, row + 1) for row in rows] for rows in own]
    edges, taken = sorted({*documents.edges, *dense, *(r + 1 for r in dense)}), set(dense)
    rest = [(holder(a), a, b) for a, b in pairwise(edges) if a not in taken][::-1]
    for part, count in zip(parts, counts, strict=True):
        left = count - len(part)
        while left > 0:
            document, start, stop = rest.pop()
            cut = min(stop, start + left)
            part.append((document, start, cut))
            left -= cut - start
            if cut < stop:
                rest.append((document, cut, stop))
    return parts


def whole_documents(
    documents: Documents, counts: Sequence[int], objective: Objective, filler: float, *, even: bool
) -> Parts:
    """Whole documents, those with most work first, to the rank with least work that has room.

    One with more work than a rank should have is shared by as few ranks as have room for it,
    two-ended, so that their work is level; if it is to be `even`, also one with more than any rank
    has left. One that fits nowhere is shared likewise; or with a `filler`, its last rows go to the
    rank with least work, and the others are dealt out later. Work is then what rows have beyond a
    filler each: light rows fill what room is left at last, the more the more room a rank has.
    """
    return _Packing(documents, counts, objective, filler).packed(tails=filler > 0, even=even)


def packings(documents: Documents, objective: Objective) -> tuple[tuple[float, bool], ...]:
    """Fillers: none, the lightest rows, or between those and light ones; and if it is to be even.

    Ranks with heavy rows are filled with all that is lighter than the mean; the last with least. Or
    with documents that are no more than the mean work of a rank, as they are on average.
    """
    rows = documents.work.seq_len
    lightest = documents.lightest(objective.small * rows)
    light = documents.lightest(rows, below=documents.total / max(1, rows))
    small = [d for d, area in enumerate(documents.areas) if area <= objective.mean]
    whole = sum(documents.areas[d] for d in small) / max(1, sum(documents.sizes[d] for d in small))
    between = (((lightest + light) / 2, even) for even in (True, False))
    return (0.0, True), (lightest, True), *between, (whole, True)


def two_ended(documents: Documents, counts: Sequence[int], objective: Objective) -> Parts:
    """Every rank gets heavy rows, from the ends of documents, and light ones, from their starts.

    Documents follow each other, those with most work first, so that few are on many ranks. Under
    a causal mask this is the exact zigzag.
    """
    coarse = objective.judged_together(min(counts))
    mean = documents.total / documents.work.seq_len
    heavy, light = [], []
    for d in sorted(range(len(documents)), key=lambda d: (-documents.areas[d], d)):
        dear, cheap = documents.heavy_and_light(d, coarse, mean)
        heavy += dear
        light += cheap
    return mixed(documents, heavy, light, counts)


def levelled(documents: Documents, parts: Parts, coarse: int) -> Parts:
    """The same, but for documents that ranks share: cut anew, to make up for what else ranks have.

    So small documents may stay whole however much their work differs. Who receives least of other
    documents gets the first cut, which ends last and so sees most.
    """
    shared: dict[int, dict[int, list[Run]]] = {}
    for rank, part in enumerate(parts):
        for d, a, b in sorted(part):
            shared.setdefault(d, {}).setdefault(rank, []).append((a, b))
    shared = {d: of for d, of in shared.items() if len(of) > 1}
    found = [[piece for piece in part if piece[0] not in shared] for part in parts]
    area = [sum(documents.area(a, b) for _, a, b in part) for part in parts]
    received = [0] * len(parts)
    for rank, d in ((rank, d) for d, of in shared.items() for rank in of):
        received[rank] += needs(documents.span(d, shared[d][rank]))
    for d in sorted(shared, key=lambda d: documents.areas[d]):
        tokens = {rank: sum(b - a for a, b in runs) for rank, runs in shared[d].items()}
        for rank, runs in shared[d].items():
            area[rank] -= sum(documents.area(a, b) for a, b in runs)
            received[rank] -= needs(documents.span(d, runs))
        level = (documents.areas[d] + sum(area[rank] for rank in tokens)) / len(tokens)
        mean = documents.areas[d] / documents.sizes[d]  # which the last ones get
        unlike = {rank: abs((level - area[rank]) / n - mean) for rank, n in tokens.items()}
        order = sorted(tokens, key=lambda rank: (received[rank], -unlike[rank], rank))
        goals = [round(level - area[rank]) for rank in order]
        pieces = mixed(documents, *documents.halves(d, coarse), [tokens[r] for r in order], goals)
        for rank, own in zip(order, pieces, strict=True):
            found[rank] += own
            area[rank] += sum(documents.area(a, b) for _, a, b in own)
            received[rank] += needs(documents.span(d, [piece[1:] for piece in own]))
    return found


class _Packing:
    """Ranks that are being filled."""

    def __init__(
        self, documents: Documents, counts: Sequence[int], objective: Objective, filler: float
    ) -> None:
        self._documents, self._small = documents, objective.small
        self._parts: Parts = [[] for _ in counts]
        self._most = max(1, *counts)
        self._coarse = objective.judged_together(min(counts))
        self._filler, filled = filler, filler * documents.work.seq_len / len(counts)
        self._mean = max(documents.total / len(counts) - filled, 1e-9)
        self._limit = objective.enough * (self._mean + filled) - filled
        # Work, beyond that of as many of the lightest rows; room, negative; rank.
        self._state = [(0.0, -count, rank) for rank, count in enumerate(counts)]
        self._order = sorted(self._state)

    def packed(self, *, tails: bool, even: bool) -> Parts:
        """Everything that is left, then the parts."""
        documents, edges, order = self._documents, self._documents.edges, self._order
        items = [(-area, d, edges[d], edges[d + 1]) for d, area in enumerate(documents.areas)]
        heapq.heapify(items)
        while items:
            negative, d, start, stop = heapq.heappop(items)
            size = stop - start
            work = -negative - self._filler * size
            least, _, chosen = next((x for x in order if -x[1] >= size), (0.0, 0, -1))
            fits = chosen >= 0
            if size == documents.sizes[d] and not (fits and least + work <= self._limit):
                must = work > self._mean or not (fits or tails)
                fewest = max(2, -int(-max(work / self._mean, size / self._most) // 1))
                few = self._few(d, len(order) if must else fewest) if must or even else []
                if len(few) > 1 or (few and must):
                    self._level(d, few)
                    continue
            if not fits:  # its last rows go where there is most work to do, its first wait
                wide = min(self._small * size, -min(room for _, room, _ in order))
                chosen = next(rank for _, room, rank in order if -room >= wide)
                rows = self._tail(start, stop, chosen)
                heapq.heappush(items, (-documents.area(start, stop - rows), d, start, stop - rows))
                start = stop - rows
            self._give(chosen, [(d, start, stop)])
        return self._parts

    def _tail(self, start: int, stop: int, rank: int) -> int:
        """How many of the last rows of a stretch a rank has room for, in tokens and work."""
        before, filler, (work, taken, _) = self._documents.before, self._filler, self._state[rank]
        room, free = min(-taken, stop - start - 1), max(0.0, self._limit - work)
        least, most = 0, room
        while least < most:
            rows = (least + most + 1) // 2
            if before[stop] - before[stop - rows] - filler * rows <= free:
                least = rows
            else:
                most = rows - 1
        return least if least >= self._small * room else room

    def _few(self, d: int, most: int) -> list[int]:
        """As few ranks as have room for a document without more work than the mean.

        None if they are more than `most`; all ranks if those are not enough.
        """
        limit, order, density = self._limit, self._order, self._density(d)
        rows = self._documents.sizes[d]
        goal = density * rows * (1 - 1e-9)
        if most < len(order) and most * (limit - order[0][0]) < goal:
            return []
        free, have, found = 0.0, 0, list[int]()
        for work, taken, rank in order:
            if taken and len(found) == most:
                return []
            if taken:
                found.append(rank)
                free += min(max(limit - work, 0.0), -taken * density)
                have -= taken
                if free >= goal and have >= rows:
                    return found
        return found

    def _density(self, d: int) -> float:
        """Work of a document per row, beyond that of the lightest rows."""
        return max(self._documents.areas[d] / self._documents.sizes[d] - self._filler, 1e-12)

    def _level(self, d: int, chosen: Sequence[int]) -> None:
        """Shares a document between ranks so that their work is level."""
        size, density = self._documents.sizes[d], self._density(d)
        state = [self._state[rank] for rank in chosen]
        # Ranks in the order in which a rising level reaches them, and fills their room.
        edges = [(w, 1.0) for w, _, _ in state]
        edges += [(w - density * r, -1.0) for w, r, _ in state]
        edges.sort()
        given, level, width = 0.0, edges[0][0], 0.0
        for edge, more in edges:
            if width and given + width * (edge - level) >= density * size:
                break
            given, level, width = given + width * (edge - level), edge, width + more
        if width > 0.5:
            level += max(0.0, density * size - given) / width
        self._share(d, chosen, [min(float(-r), max(0.0, level - w) / density) for w, r, _ in state])

    def _share(self, d: int, chosen: Sequence[int], rows: Sequence[float]) -> None:
        """Gives ranks so many rows of a document each, about; who has room gets what is left."""
        left, state = self._documents.sizes[d], self._state
        scale, given = left / max(sum(rows), 1e-12), 0.0
        tokens = dict.fromkeys(chosen, 0)
        for rank, part in zip(chosen, rows, strict=True):
            given += part * scale
            due = round(given) - (self._documents.sizes[d] - left)
            tokens[rank] = min(-state[rank][1], max(0, due), left)
            left -= tokens[rank]
        if left:
            for rank in (*chosen, *sorted(range(len(state)), key=lambda rank: state[rank][1])):
                more = min(left, -state[rank][1] - tokens.get(rank, 0))
                tokens[rank] = tokens.get(rank, 0) + more
                left -= more
        counts = {rank: count for rank, count in tokens.items() if count}
        halves = self._documents.halves(d, self._coarse)
        pieces = mixed(self._documents, *halves, [*counts.values()])
        for rank, own in zip(counts, pieces, strict=True):
            self._give(rank, own)

    def _give(self, rank: int, pieces: Sequence[Piece]) -> None:
        self._parts[rank] += pieces
        work, room, _ = old = self._state[rank]
        for _, a, b in pieces:
            room += b - a
            work += self._documents.area(a, b) - self._filler * (b - a)
        del self._order[bisect_left(self._order, old)]
        self._state[rank] = (work, room, rank)
        insort(self._order, self._state[rank])
