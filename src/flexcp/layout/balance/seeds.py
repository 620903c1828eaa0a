"""Seeds: a few ways to deal out documents, from which the local search goes on."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence

from flexcp.layout.balance.documents import Documents, Piece, mixed, shares

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


def dense_rows_dealt(documents: Documents, counts: Sequence[int]) -> Parts | None:
    """Rows that see far more than most dealt out to all ranks, the others in order; if any do."""
    rows = documents.dense_rows
    if not rows:
        return None
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
    documents: Documents, counts: Sequence[int], enough: float, *, tails: bool
) -> Parts:
    """Whole documents, those with most work first, to the rank with least work that has room.

    One with more work than a rank should have is shared by as few ranks as have room for it,
    two-ended, so that their work is level. One that fits nowhere is shared likewise; or with
    `tails`, its last rows go to the rank with least work, and the others are dealt out later.
    Ranks get up to `enough` times the mean work.
    """
    return _Packing(documents, counts, enough).packed(tails=tails)


def two_ended(documents: Documents, counts: Sequence[int]) -> Parts:
    """Every rank gets heavy rows, from the ends of documents, and light ones, from their starts.

    Documents follow each other, those with most work first, so that few are on many ranks. Under
    a causal mask this is the exact zigzag.
    """
    coarse = max(1, min(counts) // 16)
    mean = documents.total / documents.work.seq_len
    heavy, light = [], []
    for d in sorted(range(len(documents)), key=lambda d: (-documents.areas[d], d)):
        dear, cheap = documents.heavy_and_light(d, coarse, mean)
        heavy += dear
        light += cheap
    return mixed(documents, heavy, light, counts)


class _Packing:
    """Ranks that are being filled."""

    def __init__(self, documents: Documents, counts: Sequence[int], enough: float) -> None:
        self._documents, self._over = documents, enough
        self._parts: Parts = [[] for _ in counts]
        self._room = list(counts)
        self._area = [0.0] * len(counts)
        self._mean = max(documents.total / len(counts), 1e-9)
        self._most = max(1, *counts)
        self._coarse = max(1, min(counts) // 16)

    def packed(self, *, tails: bool) -> Parts:
        """Everything that is left, then the parts."""
        documents, mean = self._documents, self._mean
        items = [
            (-documents.areas[d], d, documents.edges[d], documents.edges[d + 1])
            for d in range(len(documents))
        ]
        heapq.heapify(items)
        heap = [(area, rank) for rank, area in enumerate(self._area)]
        heapq.heapify(heap)
        while items:
            negative, d, start, stop = heapq.heappop(items)
            area, size = -negative, stop - start
            aside, chosen = [], -1
            while heap:
                entry = heapq.heappop(heap)
                if self._room[entry[1]] > 0:
                    aside.append(entry)
                if self._room[entry[1]] >= size:
                    chosen = entry[1]
                    break
            few: list[int] = []
            if size == documents.sizes[d] and (
                chosen < 0 or self._area[chosen] + area > self._over * mean
            ):
                few = self._few(d)
            least = max(2, -int(-max(area / mean, size / self._most) // 1))
            if 1 < len(few) <= least or (few and (area > mean or (chosen < 0 and not tails))):
                self._level(d, few)
                heap = [(area, rank) for rank, area in enumerate(self._area)]
                heapq.heapify(heap)
                continue
            if chosen < 0:  # its last rows go where there is most work to do, its first wait
                enough = [r for _, r in aside if self._room[r] * 8 >= size]
                chosen = (
                    enough[0] if enough else max((r for _, r in aside), key=self._room.__getitem__)
                )
                rows = self._tail(start, stop, chosen)
                heapq.heappush(items, (-documents.area(start, stop - rows), d, start, stop - rows))
                start = stop - rows
            self._give(chosen, [(d, start, stop)])
            for _, rank in aside:
                heapq.heappush(heap, (self._area[rank], rank))
        return self._parts

    def _tail(self, start: int, stop: int, rank: int) -> int:
        """How many of the last rows of a stretch a rank has room for, in tokens and work."""
        before = self._documents.before
        least = before[stop] - max(0.0, self._over * self._mean - self._area[rank])
        room = min(self._room[rank], stop - start - 1)
        rows = stop - bisect_left(before, least, stop - room, stop)
        return rows if rows * 8 >= room else room

    def _few(self, d: int) -> list[int]:
        """As few ranks as have room for a document without more work than the mean."""
        size, total = self._documents.sizes[d], self._documents.areas[d]
        order = sorted(
            (r for r in range(len(self._room)) if self._room[r] > 0),
            key=lambda r: (self._area[r], -self._room[r], r),
        )
        density = total / size
        free, room, chosen = 0.0, 0, []
        for rank in order:
            chosen.append(rank)
            room += self._room[rank]
            free += min(
                max(0.0, self._over * self._mean - self._area[rank]), self._room[rank] * density
            )
            if free >= total * (1 - 1e-9) and room >= size:
                return chosen
        return order

    def _level(self, d: int, chosen: Sequence[int]) -> None:
        """Shares a document between ranks so that their work is level."""
        size = self._documents.sizes[d]
        density = max(self._documents.areas[d] / size, 1e-12)
        low, high = 0.0, self._mean + self._documents.areas[d] + density * max(self._room)
        high += max(self._area)
        for _ in range(30):
            level = (low + high) / 2
            if self._fill(chosen, level, density) >= size:
                high = level
            else:
                low = level
        parts = [
            (r, min(float(self._room[r]), max(0.0, high - self._area[r]) / density)) for r in chosen
        ]
        self._share(d, parts)

    def _fill(self, ranks: Sequence[int], level: float, density: float) -> float:
        each = (max(0.0, level - self._area[r]) / max(density, 1e-12) for r in ranks)
        return sum(min(self._room[r], e) for r, e in zip(ranks, each, strict=True))

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
        for d, a, b in pieces:
            self._parts[rank].append((d, a, b))
            self._room[rank] -= b - a
            whole = (a, b) == (self._documents.edges[d], self._documents.edges[d + 1])
            self._area[rank] += self._documents.areas[d] if whole else self._documents.area(a, b)
