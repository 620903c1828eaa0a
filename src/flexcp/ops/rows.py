"""Rows of K and V as they are gathered, sent, computed against and kept: side by side, by head.

The rows of a head stand together, so that what arrives is what the kernel reads: nothing is turned
around on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.ops.program import ElementWork, RankProgram, RowCopy

ROW = -2
"""The dim of the rows, in all tensors of rows."""


@dataclass(frozen=True, eq=False)
class KVRows:
    """K and V of a rank's own tokens as one tensor."""

    own: Tensor
    """[B, G, L, D + Dv], or [G, B * L, D + Dv] if batch elements have layouts of their own."""
    shape: tuple[int, int, int, int, int]
    """B, G, L, D, Dv."""
    by_element: bool

    @classmethod
    def of(cls, k: Tensor, v: Tensor, program: RankProgram) -> KVRows:
        """K [B, G, L, D] and V [B, G, L, Dv], side by side."""
        both = torch.cat([k, v], dim=-1)
        b, g, length = k.shape[:3]
        own = both.transpose(0, 1).flatten(1, 2) if program.by_element else both
        return cls(own.contiguous(), (b, g, length, k.shape[3], v.shape[3]), program.by_element)

    def shape_of(self, rows: int) -> tuple[int, ...]:
        """The shape of some rows."""
        b, g, _, d, dv = self.shape
        return _shape_of(b, g, rows, d + dv, self.by_element)

    def empty(self, rows: int) -> Tensor:
        """Room for some rows."""
        return self.own.new_empty(self.shape_of(rows))

    def for_kernel(self, keys: Tensor, work: ElementWork) -> tuple[Tensor, Tensor]:
        """K [B, G, n, D] and V [B, G, n, Dv] that some work is computed against."""
        d = self.shape[3]
        if work.b is not None:
            keys = keys.index_select(ROW, work.keys.to(keys.device))[None]
        return keys[..., :d], keys[..., d:]

    def with_gradient(
        self, piece: Tensor | None, keys: Tensor, work: ElementWork, grad_k: Tensor, grad_v: Tensor
    ) -> Tensor:
        """The gradient of a round's rows so far, with what some of its work found added."""
        both = torch.cat([grad_k, grad_v], dim=-1)
        if work.b is None:
            assert piece is None, "work for all batch elements is the only one"
            return both
        piece = keys.new_zeros(keys.shape, dtype=both.dtype) if piece is None else piece
        return piece.index_add_(piece.ndim + ROW, work.keys.to(piece.device), both[0])

    def split(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of K and V in their own shape."""
        b, g, length, d, dv = self.shape
        if self.by_element:
            total = total.view(g, b, length, d + dv).transpose(0, 1)
        return total[..., :d], total[..., d:]


def shape_of_rows(k: Tensor, v: Tensor, rows: int, by_element: bool) -> tuple[int, ...]:
    """The shape of some rows of such K [B, G, L, D] and V [B, G, L, Dv]."""
    return _shape_of(k.shape[0], k.shape[1], rows, k.shape[3] + v.shape[3], by_element)


def _shape_of(b: int, g: int, rows: int, width: int, by_element: bool) -> tuple[int, ...]:
    return (g, rows, width) if by_element else (b, g, rows, width)


def gather_rows(
    copies: Sequence[RowCopy], buffers: Sequence[Tensor | None], into: Callable[[], Tensor]
) -> Tensor:
    """The rows that the copies say; nothing is copied if they stand together in one buffer.

    The copies together say what is at every place of the result.
    """
    runs = copies[0].runs if len(copies) == 1 else None
    if runs is not None and len(runs) == 1:
        row, _, rows = runs[0]
        return _held(copies[0], buffers).narrow(ROW, row, rows)
    found = into()
    for copy in copies:
        buffer = _held(copy, buffers)
        for row, place, rows in copy.runs or ():
            found.narrow(ROW, place, rows).copy_(buffer.narrow(ROW, row, rows))
        if copy.runs is None:
            part = buffer.index_select(ROW, copy.source.to(found.device))
            found.index_copy_(ROW, copy.place.to(found.device), part)
    return found


def add_rows(copy: RowCopy, piece: Tensor, total: Tensor) -> None:
    """Adds some rows of a piece of gradient to where they go."""
    for row, place, rows in copy.runs or ():
        total.narrow(ROW, place, rows).add_(piece.narrow(ROW, row, rows))
    if copy.runs is None:
        part = piece.index_select(ROW, copy.source.to(total.device))
        total.index_add_(ROW, copy.place.to(total.device), part)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of all rows; the part itself if there is one only."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=ROW)


def _held(copy: RowCopy, buffers: Sequence[Tensor | None]) -> Tensor:
    buffer = buffers[copy.buffer]
    assert buffer is not None, "a buffer was dropped before its last use"
    return buffer
