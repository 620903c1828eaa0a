"""Seeds: a few ways to deal out documents, from which the local search goes on."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np

from flexcp.layout.balance.documents import Documents, Piece, RowQueue, Run, mixed, needs
from flexcp.layout.balance.objective import Objective
from flexcp.layout.rules import even_edges

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

    One with more work than a rank should have, or that fits nowhere, is shared by as few ranks as
    have room for it, two-ended, so that their work is level; if it is to be `even`, also one with
    more than any rank has left. With a `filler`, work is what rows have beyond that each, or what
    they lack if it is denser than the mean: rows like it fill what room is left at last.
    """
    return _Packing(documents, counts, objective, filler).packed(even=even)


def packings(documents: Documents, objective: Objective) -> Iterator[tuple[float, bool]]:
    """Fillers: none, the lightest rows, or between those and light ones; and if it is to be even.

    Ranks with heavy rows are filled with all that is lighter than the mean; the last with least. If
    the densest document has much of all work, it is a filler too: ranks get others that lack as
    much of the work that as many of its rows are, and it fills their room.
    """
    light, densest = documents.light, documents.by_density[-1]
    few = min(light.size, round(objective.small * documents.work.seq_len))
    lightest, whole = (light.area(rows) / max(1, rows) for rows in (few, light.size))
    between = (lightest + whole) / 2
    yield from dict.fromkeys(((0.0, True), (lightest, True), (between, True), (between, False)))
    most = documents.area(*densest)
    if most > objective.dense * documents.total and not objective.beside:
        yield most / (densest[1] - densest[0]), True


def two_ended(documents: Documents, counts: Sequence[int], objective: Objective) -> Parts:
    """Every rank gets heavy rows, from the ends of documents, and light ones, from their starts.

    Documents follow each other, those with most work first, so that few are on many ranks. A long
    one has ranks of its own, if lighter documents can make work level on these: of those with least
    work per row the most ranks, so that the longest, whose ranks receive most, have few. Ranks have
    both ends of it, as others need most of its start. Under a causal mask this is the exact zigzag.
    """
    coarse, area = objective.judged_together(min(counts)), documents.area
    mean = documents.total / documents.work.seq_len
    parts: Parts = []

    def share(ranks: int, runs: list[Run]) -> None:
        heavy, light, total = list[Run](), list[Run](), sum(area(*run) for run in runs)
        for run in sorted(runs, key=lambda run: (-area(*run), run)):
            if area(*run) > objective.mean and area(*run) >= mean * (run[1] - run[0]):
                slots = even_edges(run[1] - run[0], max(1, round(ranks * area(*run) / total)))
                halves = documents.halves(run, coarse)
                for slot in mixed(documents, *halves, slots.diff().tolist()):
                    heavy += [piece[1:] for piece in slot]
            else:
                dear, cheap = documents.heavy_and_light(run, coarse, mean)
                heavy += dear
                light += cheap
        parts.extend(mixed(documents, heavy, light, counts[len(parts) :][:ranks]))

    others, together = documents.light, list[Run]()
    for run in documents.by_density[len(others.runs) : -1]:
        together.append(run)
        if area(*run) > objective.mean:
            ranks, least, most = _level_with(documents, together, others, counts[len(parts) :])
            if ranks:
                end = others.size - most
                share(
                    ranks,
                    [*together, *others.stretches(0, least), *others.stretches(end, others.size)],
                )
                others, together = (
                    RowQueue(documents, others.stretches(least, end), from_end=False),
                    [],
                )
    share(len(counts) - len(parts), [*together, documents.by_density[-1], *others.runs])
    return parts


def _level_with(
    documents: Documents, runs: list[Run], others: RowQueue, counts: Sequence[int]
) -> tuple[int, int, int]:
    """On how many ranks some rows have the mean work, with how many of the first and last others.

    On as many as can be, but not on all, or on none.
    """
    rows, own = sum(b - a for a, b in runs), sum(documents.area(a, b) for a, b in runs)
    room = [n - rows for n in accumulate(counts, initial=0)]

    def lacks(ranks: int, last: int) -> float:
        goal = documents.total * (rows + room[ranks]) / documents.work.seq_len
        between = others.area(others.size - last) - others.area(room[ranks] - last)
        return goal - own - others.area(others.size) + between

    fit = range(1, bisect_right(room, others.size, 0, len(counts)))
    ranks = bisect_left(fit, True, key=lambda n: room[n] >= 0 and lacks(n, room[n]) > 0)
    if room[ranks] < 0 or lacks(ranks, 0) < 0:
        return 0, 0, 0
    last = bisect_left(range(room[ranks]), 0.0, key=lambda last: -lacks(ranks, last))
    return ranks, room[ranks] - last, last


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
        pieces = mixed(
            documents,
            *documents.halves(documents.runs[d], coarse),
            [tokens[r] for r in order],
            goals,
        )
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
        self._documents = documents
        self._parts: Parts = [[] for _ in counts]
        self._most = max(1, *counts)
        self._coarse = objective.judged_together(min(counts))
        self._filler, filled = filler, filler * documents.work.seq_len / len(counts)
        self._sign = -1 if filled > objective.mean else 1
        self._mean = max(self._sign * (objective.mean - filled), 1e-9)
        self._limit = self._mean + (objective.enough - 1) * objective.mean
        # Work, beyond that of as many rows of the filler, or what lacks; room, negative; rank.
        self._state = [(0.0, -count, rank) for rank, count in enumerate(counts)]
        self._order = sorted(self._state)

    def packed(self, *, even: bool) -> Parts:
        """The parts, once all documents are dealt out."""
        documents, order = self._documents, self._order
        table = zip(documents.areas, documents.sizes, strict=True)
        works = [self._sign * (area - self._filler * size) for area, size in table]
        first = documents.areas if self._sign > 0 else works
        for d in sorted(range(len(documents)), key=lambda d: (-first[d], d)):
            size, work = documents.sizes[d], works[d]
            least, _, chosen = next((x for x in order if -x[1] >= size), (math.inf, 0, -1))
            if least + work > self._limit:
                must = work > self._mean or chosen < 0
                fewest = max(2, -int(-max(work / self._mean, size / self._most) // 1))
                few = self._few(d, len(order) if must else fewest) if must or even else []
                if len(few) > 1 or (few and must):
                    self._share(d, few)
                    continue
            self._give(chosen, [(d, *documents.runs[d])])
        return self._parts

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
        """Work of a document per row, beyond that of the filler, or what lacks."""
        mean = self._documents.areas[d] / self._documents.sizes[d]
        return max(self._sign * (mean - self._filler), 1e-12)

    def _share(self, d: int, chosen: Sequence[int]) -> None:
        """Shares a document between ranks so that work is level; who has room gets the rest."""
        state, density, size = self._state, self._density(d), self._documents.sizes[d]
        works, left = [state[rank][0] for rank in chosen], size
        least, most = min(works), max(works) + density * size
        for _ in range(24):  # to a fraction of a row
            level = (least + most) / 2
            rows = [min(-state[r][1], max(0.0, level - state[r][0]) / density) for r in chosen]
            least, most = (level, most) if sum(rows) < size else (least, level)
        tokens = dict.fromkeys(chosen, 0)
        for rank, due in zip(chosen, accumulate(rows), strict=True):
            tokens[rank] = min(-state[rank][1], max(0, round(due) - size + left), left)
            left -= tokens[rank]
        others = sorted(range(len(state)), key=lambda rank: state[rank][1]) if left else []
        for rank in (*chosen, *others):
            more = min(left, -state[rank][1] - tokens.get(rank, 0))
            tokens[rank] = tokens.get(rank, 0) + more
            left -= more
        counts = {rank: count for rank, count in tokens.items() if count}
        halves = self._documents.halves(self._documents.runs[d], self._coarse)
        pieces = mixed(self._documents, *halves, [*counts.values()])
        for rank, own in zip(counts, pieces, strict=True):
            self._give(rank, own)

    def _give(self, rank: int, pieces: Sequence[Piece]) -> None:
        self._parts[rank] += pieces
        work, room, _ = old = self._state[rank]
        for _, a, b in pieces:
            room += b - a
            work += self._sign * (self._documents.area(a, b) - self._filler * (b - a))
        del self._order[bisect_left(self._order, old)]
        self._state[rank] = (work, room, rank)
        insort(self._order, self._state[rank])
