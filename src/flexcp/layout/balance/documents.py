"""Documents: stretches of rows that no other stretch has to do with, their work and their needs."""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from flexcp.layout.work import Work

Run = tuple[int, int]
"""First row of a stretch, and the row after the last."""
Piece = tuple[int, int, int]
"""Document, first row, row after the last."""
Span = tuple[int, int, int]
"""Of some rows of a document: the first key that they see, the key after the last, their number."""


def needs(span: Span) -> int:
    """Rows of others that a rank needs for rows of a document, about: all between that it sees."""
    return span[1] - span[0] - span[2]


@dataclass(frozen=True, eq=False)
class Documents:
    """A sequence as documents, with the work of any stretch of rows and the keys that it sees."""

    work: Work
    edges: list[int]
    """Where each document begins, and the end of the sequence."""
    _halves: dict[tuple[Run, int], tuple[list[Run], list[Run]]] = field(default_factory=dict)

    @classmethod
    def of(cls, work: Work) -> Documents:
        """Finds them: a mask without seams has one document."""
        return cls(work, [0, *work.seams.tolist(), work.seq_len])

    def __len__(self) -> int:
        return len(self.edges) - 1

    @cached_property
    def total(self) -> int:
        """Pairs of all rows."""
        return int(self.rows[-1])

    @cached_property
    def runs(self) -> list[Run]:
        """Each document as a stretch of rows."""
        return list(pairwise(self.edges))

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each document."""
        return [b - a for a, b in self.runs]

    @cached_property
    def areas(self) -> list[int]:
        """Pairs of each document."""
        return cast("list[int]", np.diff(self.rows[self.edges]).tolist())

    @cached_property
    def by_density(self) -> list[Run]:
        """Those with least work per row first."""
        table = zip(self.areas, self.sizes, self.runs, strict=True)
        return [run for _, run in sorted((area / max(1, size), run) for area, size, run in table)]

    @cached_property
    def light(self) -> RowQueue:
        """Those with less work per row than the mean, in that order."""
        mean = self.total / max(1, self.work.seq_len)
        count = sum(a < mean * n for a, n in zip(self.areas, self.sizes, strict=True))
        return RowQueue(self, self.by_density[: min(count, len(self) - 1)], from_end=False)

    @cached_property
    def rows(self) -> Any:
        """int64 [S + 1] Work of all rows before each."""
        return self.work.before_rows.numpy()

    @cached_property
    def before(self) -> Sequence[int]:
        """Work of all rows before each, to be read one by one."""
        return _integers(self.work.before_rows)

    @cached_property
    def hull(self) -> tuple[Sequence[int], Sequence[int]]:
        """First key that each row sees, and the key after the last."""
        first, last = self.work.hull
        return _integers(first), _integers(last)

    def area(self, start: int, stop: int) -> int:
        """Pairs of a stretch of rows."""
        return self.before[stop] - self.before[start]

    def span(self, document: int, runs: Sequence[Run]) -> Span:
        """What some stretches of a document have and see."""
        if not runs:
            return 0, 0, 0
        first, last = self.hull
        own, low, high = 0, self.edges[document + 1], 0
        for start, stop in runs:
            own += stop - start
            begin, end = first[start], last[stop - 1]
            if begin < low:
                low = begin
            if end > high:
                high = end
        return low, high, own

    def holder(self, row: int) -> int:
        """The document that a row is in."""
        return bisect_right(self.edges, row) - 1

    def dense_rows(self, many: float) -> list[int]:
        """Rows with many times the work of the mean row."""
        limit = many * self.total / max(1, self.work.seq_len)
        found: list[int] = np.flatnonzero(np.diff(self.rows) > limit).tolist()
        return found

    def halves(self, run: Run, coarse: int) -> tuple[list[Run], list[Run]]:
        """Heavy and light rows of a stretch by their own mean; see `heavy_and_light`."""
        if (run, coarse) not in self._halves:
            mean = self.area(*run) / (run[1] - run[0])
            self._halves[run, coarse] = self.heavy_and_light(run, coarse, mean)
        return self._halves[run, coarse]

    def heavy_and_light(self, run: Run, coarse: int, mean: float) -> tuple[list[Run], list[Run]]:
        """The rows of a stretch with more than a mean work, last first; the others, first first.

        `coarse` rows are judged together where single ones differ too often.
        """
        begin, end = run
        if end - begin <= coarse:
            return ([run], []) if self.area(begin, end) > mean * (end - begin) else ([], [run])
        before, size = self.rows[begin : end + 1], end - begin
        heavy = before[1:] - before[:-1] > mean
        edges = np.flatnonzero(heavy[1:] != heavy[:-1]) + 1
        first_heavy = bool(heavy[0])
        if edges.size > 2 * (size // coarse):
            ends = np.append(np.arange(coarse, size, coarse), size)
            above = np.diff(before[ends], prepend=before[0]) > mean * np.diff(ends, prepend=0)
            edges = ends[:-1][above[1:] != above[:-1]]
            first_heavy = bool(above[0])
        bounds = [begin, *(edges + begin).tolist(), end]
        runs = list(pairwise(bounds))
        of_heavy, of_light = runs[0 if first_heavy else 1 :: 2], runs[1 if first_heavy else 0 :: 2]
        return of_heavy[::-1], of_light


def _integers(vector: Tensor) -> Sequence[int]:
    """A vector of int64 whose entries can be read one by one without making a tensor of each.

    The vector has to be kept for as long as the result is used.
    """
    assert vector.dtype == torch.int64
    assert vector.is_contiguous()
    found = (ctypes.c_int64 * vector.numel()).from_address(vector.data_ptr())
    return cast("Sequence[int]", found)


class RowQueue:
    """Stretches of rows in the order in which they are dealt out."""

    def __init__(self, documents: Documents, runs: list[tuple[int, int]], *, from_end: bool):
        self._documents, self.runs, self._from_end = documents, runs, from_end
        self._tokens, self._areas = [0], [0]
        for start, stop in runs:
            self._tokens.append(self._tokens[-1] + stop - start)
            self._areas.append(self._areas[-1] + documents.area(start, stop))
        self.size = self._tokens[-1]

    def area(self, rows: int) -> int:
        """Pairs of so many of the first rows to be dealt out."""
        at = max(0, bisect_left(self._tokens, rows) - 1)
        rest = rows - self._tokens[at]
        if rest == 0:
            return self._areas[at]
        start, stop = self.runs[at]
        part = (stop - rest, stop) if self._from_end else (start, start + rest)
        return self._areas[at] + self._documents.area(*part)

    def stretches(self, first: int, last: int) -> list[tuple[int, int]]:
        """The rows from the first to the last to be dealt out, as stretches of the sequence."""
        found = []
        at = max(0, bisect_right(self._tokens, first) - 1)
        while at < len(self.runs) and self._tokens[at] < last:
            (start, stop), before = self.runs[at], self._tokens[at]
            a, b = max(first - before, 0), min(last - before, stop - start)
            if a < b:
                found.append((stop - b, stop - a) if self._from_end else (start + a, start + b))
            at += 1
        return found


def mixed(
    documents: Documents,
    heavy_runs: list[Run],
    light_runs: list[Run],
    tokens: Sequence[int],
    areas: Sequence[int] | None = None,
) -> list[list[Piece]]:
    """Rows cut into parts of given sizes, each with its share of the work.

    Each part gets heavy rows and light ones in their order: what is left has the same mean work as
    before, so that the next part finds its mix as well. If the work of parts is given, they get
    that as far as what is left allows, and the last one the rest.
    """
    heavy = RowQueue(documents, heavy_runs, from_end=True)
    light = RowQueue(documents, light_runs, from_end=False)
    size, total = heavy.size + light.size, heavy.area(heavy.size) + light.area(light.size)
    found: list[list[Piece]] = []
    given = dear = 0
    goals = accumulate(areas) if areas else (total * n // max(1, size) for n in accumulate(tokens))
    for count, goal in zip(tokens, goals, strict=True):
        given += count
        cheap_before, dear_before = given - count - dear, dear
        # More heavy rows among as many rows are always more work.
        low, high = max(dear, given - light.size), min(heavy.size, dear + count)
        while low < high:
            middle = (low + high) // 2
            if heavy.area(middle) + light.area(given - middle) < goal:
                low = middle + 1
            else:
                high = middle
        dear = low
        runs = heavy.stretches(dear_before, dear) + light.stretches(cheap_before, given - dear)
        found.append([(documents.holder(a), a, b) for a, b in sorted(runs)])
    return found
