"""Seeds: a few ways to deal out documents, from which the local search goes on."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from flexcp.layout.balance.documents import Documents, Piece, mixed, shares
from flexcp.layout.balance.objective import Objective

Parts = list[list[Piece]]
"""The pieces of every rank."""


def in_order(documents: Documents, counts: Sequence[int]) -> Parts:
    """Rank r gets the r-th stretch."""
    parts: Parts = [[] for _ in counts]
    document, at = 0, 0
    for part, count in zip(parts, counts, strict=True):
        end = at + count
        while at < end:
            while documents.edges[document + 1] <= at:
                document += 1
            stop = min(end, documents.edges[document + 1])
            part.append((document, at, stop))
            at = stop
    return parts


def dense_rows_dealt(documents: Documents, counts: Sequence[int], rows: Sequence[int]) -> Parts:
    """Some rows that see far more than most dealt out to all ranks, the others in order."""
    dealt: list[list[int]] = [[] for _ in counts]
    each = -(-len(rows) // len(counts))
    for i, row in enumerate(rows):
        dealt[i // each].append(row)
    taken = set(rows)
    parts: Parts = []
    document, at = 0, 0
    for own, count in zip(dealt, counts, strict=True):
        part = [(documents.holder(row), row, row + 1) for row in own[:count]]
        left = count - len(part)
        while left:
            while documents.edges[document + 1] <= at:
                document += 1
            if at in taken:
                at += 1
                continue
            stop = min(at + left, documents.edges[document + 1])
            stop = min([stop, *(row for row in rows if at < row < stop)])
            part.append((document, at, stop))
            left -= stop - at
            at = stop
        parts.append(part)
    return parts


def whole_documents(
    documents: Documents,
    counts: Sequence[int],
    objective: Objective,
    *,
    tails: bool = False,
    lightest: bool = False,
) -> Parts:
    """Whole documents, those with most work first, to the rank with least work that has room.

    One with more work than a rank should have is shared by as few ranks as have room for it,
    two-ended, so that their work is level. One that fits nowhere is shared likewise; or with
    `tails`, its last rows go to the rank with least work, and the others are dealt out later.
    With `lightest`, work is what a document has beyond as many of the lightest rows: those fill
    what room is left at last, and the more of it the more room a rank has.
    """
    rows = documents.work.seq_len
    filler = documents.lightest(objective.small * rows) if lightest else 0.0
    return _Packing(documents, counts, objective, filler).packed(tails=tails)


SEEDS: tuple[dict[str, bool], ...] = ({}, {"tails": True}, {"tails": True, "lightest": True})
"""The ways to deal out whole documents that are tried."""


def two_ended(documents: Documents, counts: Sequence[int], objective: Objective) -> Parts:
    """Every rank gets heavy rows, from the ends of documents, and light ones, from their starts.

    Documents follow each other, those with most work first, so that few are on many ranks. Under
    a causal mask this is the exact zigzag.
    """
    coarse = max(1, round(min(counts) * objective.small))
    mean = documents.total / documents.work.seq_len
    heavy, light = [], []
    for d in sorted(range(len(documents)), key=lambda d: (-documents.areas[d], d)):
        dear, cheap = documents.heavy_and_light(d, coarse, mean)
        heavy += dear
        light += cheap
    return mixed(documents, heavy, light, counts)


class _Packing:
    """Ranks that are being filled."""

    def __init__(
        self, documents: Documents, counts: Sequence[int], objective: Objective, filler: float
    ) -> None:
        self._documents, self._small = documents, objective.small
        self._parts: Parts = [[] for _ in counts]
        self._room = list(counts)
        self._most = max(1, *counts)
        self._coarse = max(1, round(min(counts) * objective.small))
        rows = documents.work.seq_len
        self._filler = filler
        self._mean = max((documents.total - self._filler * rows) / len(counts), 1e-9)
        filled = self._filler * rows / len(counts)
        self._limit = objective.enough * (self._mean + filled) - filled
        self._work = [0.0] * len(counts)  # beyond that of as many of the lightest rows

    def packed(self, *, tails: bool) -> Parts:
        """Everything that is left, then the parts."""
        documents, room = self._documents, self._room
        items = [
            (-documents.areas[d], d, documents.edges[d], documents.edges[d + 1])
            for d in range(len(documents))
        ]
        heapq.heapify(items)
        heap = [(0.0, rank) for rank in range(len(room))]
        while items:
            negative, d, start, stop = heapq.heappop(items)
            size = stop - start
            work = -negative - self._filler * size
            aside, chosen = [], -1
            while heap:
                entry = heapq.heappop(heap)
                if room[entry[1]] > 0:
                    aside.append(entry)
                if room[entry[1]] >= size:
                    chosen = entry[1]
                    break
            few: list[int] = []
            if size == documents.sizes[d] and (
                chosen < 0 or self._work[chosen] + work > self._limit
            ):
                few = self._few(d)
            least = max(2, -int(-max(work / self._mean, size / self._most) // 1))
            if 1 < len(few) <= least or (few and (work > self._mean or (chosen < 0 and not tails))):
                self._level(d, few)
                heap = [(work, rank) for rank, work in enumerate(self._work)]
                heapq.heapify(heap)
                continue
            if chosen < 0:  # its last rows go where there is most work to do, its first wait
                enough = [r for _, r in aside if room[r] >= self._small * size]
                chosen = enough[0] if enough else max((r for _, r in aside), key=room.__getitem__)
                rows = self._tail(start, stop, chosen)
                heapq.heappush(items, (-documents.area(start, stop - rows), d, start, stop - rows))
                start = stop - rows
            self._give(chosen, [(d, start, stop)])
            for _, rank in aside:
                heapq.heappush(heap, (self._work[rank], rank))
        return self._parts

    def _tail(self, start: int, stop: int, rank: int) -> int:
        """How many of the last rows of a stretch a rank has room for, in tokens and work."""
        before, filler = self._documents.before, self._filler
        room = min(self._room[rank], stop - start - 1)
        free = max(0.0, self._limit - self._work[rank])
        least, most = 0, room
        while least < most:
            rows = (least + most + 1) // 2
            if before[stop] - before[stop - rows] - filler * rows <= free:
                least = rows
            else:
                most = rows - 1
        return least if least >= self._small * room else room

    def _few(self, d: int) -> list[int]:
        """As few ranks as have room for a document without more work than the mean."""
        size = self._documents.sizes[d]
        order = sorted(
            (r for r in range(len(self._room)) if self._room[r] > 0),
            key=lambda r: (self._work[r], -self._room[r], r),
        )
        density = self._density(d)
        free, room, chosen = 0.0, 0, []
        for rank in order:
            chosen.append(rank)
            room += self._room[rank]
            free += min(max(0.0, self._limit - self._work[rank]), self._room[rank] * density)
            if free >= density * size * (1 - 1e-9) and room >= size:
                return chosen
        return order

    def _density(self, d: int) -> float:
        """Work of a document per row, beyond that of the lightest rows."""
        return max(self._documents.areas[d] / self._documents.sizes[d] - self._filler, 1e-12)

    def _level(self, d: int, chosen: Sequence[int]) -> None:
        """Shares a document between ranks so that their work is level."""
        size, density = self._documents.sizes[d], self._density(d)

        # Ranks in the order in which a rising level reaches them, and fills their room.
        edges = [(self._work[r], 1.0) for r in chosen]
        edges += [(self._work[r] + density * self._room[r], -1.0) for r in chosen]
        edges.sort()
        given, level, width = 0.0, edges[0][0], 0.0
        for edge, more in edges:
            if width and given + width * (edge - level) >= density * size:
                break
            given, level, width = given + width * (edge - level), edge, width + more
        if width > 0.5:
            level += max(0.0, density * size - given) / width
        free = (max(0.0, level - self._work[r]) / density for r in chosen)
        rows = [min(float(self._room[r]), f) for r, f in zip(chosen, free, strict=True)]
        self._share(d, list(zip(chosen, rows, strict=True)))

    def _share(self, d: int, parts: Sequence[tuple[int, float]]) -> None:
        """Gives ranks so many rows of a document each, about, as far as they have room."""
        tokens: list[int] = []
        left = self._documents.sizes[d]
        scale = left / max(sum(part for _, part in parts), 1e-12)
        given = 0.0
        for rank, part in parts:
            given += part * scale
            count = min(self._room[rank], max(0, round(given) - sum(tokens)), left)
            tokens.append(count)
            left -= count
        for i, (rank, _) in enumerate(parts):
            more = min(left, self._room[rank] - tokens[i])
            tokens[i] += more
            left -= more
        ranks = [rank for rank, _ in parts]
        for rank in sorted(set(range(len(self._room))) - set(ranks), key=lambda r: -self._room[r]):
            if left == 0:
                break
            ranks.append(rank)
            tokens.append(min(left, self._room[rank]))
            left -= tokens[-1]
        chosen = [(rank, count) for rank, count in zip(ranks, tokens, strict=True) if count]
        pieces = shares(self._documents, d, [count for _, count in chosen], self._coarse)
        for (rank, _), own in zip(chosen, pieces, strict=True):
            self._give(rank, own)

    def _give(self, rank: int, pieces: Sequence[Piece]) -> None:
        self._parts[rank] += pieces
        for d, a, b in pieces:
            self._room[rank] -= b - a
            whole = b - a == self._documents.sizes[d]
            area = self._documents.areas[d] if whole else self._documents.area(a, b)
            self._work[rank] += area - self._filler * (b - a)
