"""Runs: a sparse matrix of block kinds, stored as stretches of equal kind within a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flexcp.grid.analysis.indexing import take
from flexcp.packing import reduce_packed


class BlockKind(IntEnum):
    """What a tile of the attention matrix is."""

    EMPTY = 0
    """No pair may attend."""
    PARTIAL = 1
    """Some pairs may; the mask says which."""
    FULL = 2
    """Every pair may."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Stretches of PARTIAL or FULL tiles, sorted by row, then by column; the rest is EMPTY.

    Neighbouring stretches of one kind are always joined, so that equal matrices have equal runs.
    """

    rows: int
    """Number of rows."""
    cols: int
    """Number of columns."""
    row: Tensor
    """int64 [N] Row of each run, never falling."""
    start: Tensor
    """int64 [N] First column of each run."""
    stop: Tensor
    """int64 [N] Column after the last of each run."""
    kind: Tensor
    """int8 [N] `BlockKind` of each run, never EMPTY."""

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_packed(self)

    def __len__(self) -> int:
        return self.row.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the runs."""
        return sum(x.nbytes for x in (self.row, self.start, self.stop, self.kind))

    @cached_property
    def row_ptr(self) -> Tensor:
        """int64 [rows + 1] Row i has the runs row_ptr[i] .. row_ptr[i + 1] - 1."""
        return torch.searchsorted(self.row, torch.arange(self.rows + 1))

    @cached_property
    def _keys(self) -> Tensor:
        return self.row * (self.cols + 1) + self.start

    def kinds_at(self, row: Tensor, col: Tensor) -> Tensor:
        """int8 The kinds of some tiles."""
        if len(self) == 0:
            return torch.zeros_like(row + col, dtype=torch.int8)
        key = row * (self.cols + 1) + col
        at = torch.searchsorted(self._keys, key, right=True) - 1
        near = at.clamp(min=0)
        inside = (at >= 0) & (take(self.row, near) == row) & (col < take(self.stop, near))
        return torch.where(inside, take(self.kind, near), 0).to(torch.int8)

    def refined(self, rows: int, cols: int, *, planes: int = 1) -> Runs:
        """Each tile split into 2 x 2, clipped to `rows` x `cols`.

        With several planes stacked on top of each other, `rows` are those of one plane.
        """
        coarse = self.rows // planes
        plane, inner = self.row // coarse, self.row % coarse
        inner = torch.stack([2 * inner, 2 * inner + 1], dim=1).reshape(-1)
        plane, start, stop, kind = (
            x.repeat_interleave(2)
            for x in (plane, 2 * self.start, (2 * self.stop).clamp(max=cols), self.kind)
        )
        row = plane * rows + inner
        inside = inner < rows
        if not bool(inside.all()):
            row, start, stop, kind = row[inside], start[inside], stop[inside], kind[inside]
        return Runs(planes * rows, cols, row, start, stop, kind)

    def unstacked(self, planes: int) -> tuple[Runs, ...]:
        """The planes that are stacked on top of each other, one by one."""
        rows = self.rows // planes
        every = range(self.cols)
        return tuple(self.window(range(p * rows, (p + 1) * rows), every) for p in range(planes))

    def window(self, rows: range, cols: range) -> Runs:
        """The part within some rows and columns, counted from there."""
        a, b = int(self.row_ptr[rows.start]), int(self.row_ptr[rows.stop])
        start = self.start[a:b].clamp(min=cols.start)
        stop = self.stop[a:b].clamp(max=cols.stop)
        part = Runs(
            len(rows),
            len(cols),
            self.row[a:b] - rows.start,
            start - cols.start,
            torch.maximum(stop, start) - cols.start,
            self.kind[a:b],
        )
        return joined([part])

    def transposed(self) -> Runs:
        """The runs of the transposed matrix: those of its columns.

        Only where a row differs from the one above does a column's stretch begin or end, so the
        work is proportional to the runs that come in and go out.
        """
        # A row that is missing above the first and below the last makes their edges visible too.
        edge_row = torch.cat([self.row, self.row, self.row + 1, self.row + 1])
        edge = torch.cat([self.start, self.stop, self.start, self.stop])
        keys = torch.unique(edge_row * (self.cols + 1) + edge)
        line, left = keys // (self.cols + 1), keys % (self.cols + 1)
        same_line = line[1:] == line[:-1]
        line, left, right = line[:-1][same_line], left[:-1][same_line], left[1:][same_line]
        below = self.kinds_at(line, left)
        changed = below != self.kinds_at(line - 1, left)
        line, left, right, below = line[changed], left[changed], right[changed], below[changed]
        col = _expand(left, right)
        line, below = (x.repeat_interleave(right - left) for x in (line, below))
        order = torch.argsort(col * (self.rows + 1) + line)
        col, line, below = take(col, order), take(line, order), take(below, order)
        begins = torch.nonzero(below != BlockKind.EMPTY).squeeze(1)
        stops = line[begins + 1]
        return joined([Runs(self.cols, self.rows, col[begins], line[begins], stops, below[begins])])

    def tiles(self, kind: BlockKind) -> tuple[Tensor, Tensor]:
        """int64 Rows and columns of all tiles of a kind."""
        at = self.kind == kind
        start, stop = self.start[at], self.stop[at]
        return self.row[at].repeat_interleave(stop - start), _expand(start, stop)

    def count(self, kind: BlockKind) -> int:
        """How many tiles of a kind there are."""
        at = self.kind == kind
        return int((self.stop[at] - self.start[at]).sum())

    def to_dense(self) -> Tensor:
        """int8 [rows, cols]."""
        dense = torch.zeros(self.rows * self.cols, dtype=torch.int8)
        first = self.row * self.cols
        at = _expand(first + self.start, first + self.stop)
        dense[at] = self.kind.repeat_interleave(self.stop - self.start)
        return dense.view(self.rows, self.cols)

    @classmethod
    def from_dense(cls, dense: Tensor) -> Runs:
        """From int8 [rows, cols]."""
        rows, cols = dense.shape
        row, col = torch.nonzero(dense, as_tuple=True)
        return joined([cls(rows, cols, row, col, col + 1, dense[row, col].to(torch.int8))])

    def equals(self, other: Runs) -> bool:
        """Whether two matrices are the same."""
        return (self.rows, self.cols, len(self)) == (other.rows, other.cols, len(other)) and all(
            torch.equal(a, b)
            for a, b in (
                (self.row, other.row),
                (self.start, other.start),
                (self.stop, other.stop),
                (self.kind, other.kind),
            )
        )


def joined(pieces: Sequence[Runs]) -> Runs:
    """Sorts runs that don't overlap, drops those without columns, joins neighbours of one kind."""
    rows, cols = pieces[0].rows, pieces[0].cols
    row, start, stop, kind = (
        torch.cat([getattr(piece, name) for piece in pieces])
        if len(pieces) > 1
        else getattr(pieces[0], name)
        for name in ("row", "start", "stop", "kind")
    )
    row, start, stop, kind = _without_empty(row, start, stop, kind)
    if row.numel() == 0:
        return Runs(rows, cols, row, start, stop, kind)
    key, order = torch.sort(row * (cols + 1) + start)
    row = torch.div(key, cols + 1, rounding_mode="floor")
    start, stop, kind = key - row * (cols + 1), take(stop, order), take(kind, order)
    joins = (row[1:] == row[:-1]) & (start[1:] == stop[:-1]) & (kind[1:] == kind[:-1])
    if not bool(joins.any()):
        return Runs(rows, cols, row, start, stop, kind)
    true = torch.ones(1, dtype=torch.bool)
    begins, ends = (
        torch.nonzero(torch.cat(pair)).squeeze(1) for pair in ((true, ~joins), (~joins, true))
    )
    return Runs(
        rows, cols, take(row, begins), take(start, begins), take(stop, ends), take(kind, begins)
    )


def _without_empty(
    row: Tensor, start: Tensor, stop: Tensor, kind: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    keep = start < stop
    if bool(keep.all()):
        return row, start, stop, kind
    return row[keep], start[keep], stop[keep], kind[keep]


def _expand(start: Tensor, stop: Tensor) -> Tensor:
    """start[0], ..., stop[0] - 1, start[1], ..., one after the other."""
    sizes = stop - start
    ends = sizes.cumsum(0)
    total = int(ends[-1]) if sizes.numel() else 0
    return torch.arange(total) + (start - (ends - sizes)).repeat_interleave(sizes)
