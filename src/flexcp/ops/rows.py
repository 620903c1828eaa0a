"""Rows of K and V as they are picked, sent, computed against and kept: side by side, by head.

The rows of a head stand together, so that what arrives is what the kernel reads: nothing is turned
around on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.ops.rank_program import Lane, Pick, RankProgram

ROW = -2
"""The dim of the rows, in all tensors of rows."""


@dataclass(frozen=True, eq=False)
class Rows:
    """K and V of a rank's own tokens as one tensor."""

    own: Tensor
    """[B, G, L, D + Dv], or [G, B * L, D + Dv] if batch elements have layouts of their own."""
    shape: tuple[int, int, int, int, int]
    """B, G, L, D, Dv."""
    by_element: bool

    @classmethod
    def of(cls, k: Tensor, v: Tensor, program: RankProgram) -> Rows:
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

    def for_kernel(self, keys: Tensor, lane: Lane) -> tuple[Tensor, Tensor]:
        """K and V [B, G, n, D] of a lane."""
        d = self.shape[3]
        if lane.b is not None:
            keys = keys.index_select(ROW, lane.keys.to(keys.device))[None]
        return keys[..., :d], keys[..., d:]

    def with_gradient(
        self, piece: Tensor | None, keys: Tensor, lane: Lane, grad_k: Tensor, grad_v: Tensor
    ) -> Tensor:
        """The gradient of a round's rows so far, and what a lane found."""
        both = torch.cat([grad_k, grad_v], dim=-1)
        if lane.b is None:
            assert piece is None, "a lane for all batch elements is the only one"
            return both
        piece = keys.new_zeros(keys.shape, dtype=both.dtype) if piece is None else piece
        return piece.index_add_(piece.ndim + ROW, lane.keys.to(piece.device), both[0])

    def home(self, total: Tensor) -> tuple[Tensor, Tensor]:
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


def picked(
    picks: Sequence[Pick], batches: Sequence[Tensor | None], into: Callable[[], Tensor]
) -> Tensor:
    """The picked rows; nothing is copied if they stand together in one batch.

    The picks together say what is at every place of the result.
    """
    runs = picks[0].runs if len(picks) == 1 else None
    if runs is not None and len(runs) == 1:
        row, _, rows = runs[0]
        return _held(picks[0], batches).narrow(ROW, row, rows)
    found = into()
    for pick in picks:
        batch = _held(pick, batches)
        for row, place, rows in pick.runs or ():
            found.narrow(ROW, place, rows).copy_(batch.narrow(ROW, row, rows))
        if pick.runs is None:
            part = batch.index_select(ROW, pick.source.to(found.device))
            found.index_copy_(ROW, pick.place.to(found.device), part)
    return found


def add_picked(pick: Pick, piece: Tensor, total: Tensor) -> None:
    """Adds the picked rows of a piece to where they go."""
    for row, place, rows in pick.runs or ():
        total.narrow(ROW, place, rows).add_(piece.narrow(ROW, row, rows))
    if pick.runs is None:
        part = piece.index_select(ROW, pick.source.to(total.device))
        total.index_add_(ROW, pick.place.to(total.device), part)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of all rows; the part itself if there is one only."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=ROW)


def _held(pick: Pick, batches: Sequence[Tensor | None]) -> Tensor:
    batch = batches[pick.batch]
    assert batch is not None, "a batch was dropped before its last use"
    return batch
