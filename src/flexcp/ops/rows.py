"""Rows of K and V as they are sent, kept and computed against: K and V of a token are one row.

A tensor of rows is contiguous and has its rows first, [R, B, G, D + Dv], or [R, G, D + Dv] if batch
elements have layouts of their own and a row is a token of one element. So rows that stand side by
side are a message as they are, what arrives stands where it is needed, and kernels get strided
views of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from flexcp.comm import Pending
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.merge import accumulation_dtype
from flexcp.ops.program import RankProgram, Round, Source

Gather = tuple[Tensor, Tensor, Tensor]
"""Rows of the first tensor at the places of the second, to be put into the third."""
Messages = tuple[tuple[int, Tensor], ...]
"""Peers, and contiguous tensors."""


SPARE = 2
"""Elements behind the rows that are kept: graphs are compiled for any size, but for 0 and 1."""


@dataclass(frozen=True)
class RowKind:
    """What the rows of a call look like."""

    batch: int
    heads: int
    """Key-value heads."""
    d: int
    dv: int
    by_element: bool
    """Whether a row is a token of one batch element."""
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, k: Tensor, v: Tensor, by_element: bool) -> RowKind:
        """The kind of K [B, G, L, D] and V [B, G, L, Dv]."""
        b, g, _, d = k.shape
        return cls(b, g, d, v.shape[3], by_element, k.dtype, k.device)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        width = self.d + self.dv
        return (self.heads, width) if self.by_element else (self.batch, self.heads, width)

    def empty(self, rows: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room for some rows."""
        return torch.empty((rows, *self.shape), dtype=dtype or self.dtype, device=self.device)

    def empty_to_keep(self, rows: int) -> Tensor:
        """Room for rows that a compiled graph may keep, with `SPARE` elements behind them."""
        whole = torch.empty(rows * prod(self.shape) + SPARE, dtype=self.dtype, device=self.device)
        return whole[:-SPARE].view(rows, *self.shape)

    def nbytes(self, rows: int) -> int:
        """Bytes that some rows take."""
        return rows * prod(self.shape) * self.dtype.itemsize

    def for_kernel(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """K [B, G, n, D] and V [B, G, n, Dv], as views."""
        both = rows.permute(1, 0, 2)[None] if self.by_element else rows.permute(1, 2, 0, 3)
        return both[..., : self.d], both[..., self.d :]

    def as_tokens(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """K [B, G, L, D] and V [B, G, L, Dv] of all own rows, as views."""
        if self.by_element:
            both = rows.unflatten(0, (self.batch, -1)).permute(0, 2, 1, 3)
        else:
            both = rows.permute(1, 2, 0, 3)
        return both[..., : self.d], both[..., self.d :]


@dataclass(frozen=True, eq=False)
class BoundRound:
    """A round, with tensors in place of places."""

    gathers: tuple[Gather, ...]
    """What has to be put side by side to be sent."""
    sends: Messages
    receives: Messages
    all_gather: tuple[Tensor, Tensor] | None
    """Where to gather what of all ranks, instead."""
    key_gather: Gather | None
    """What has to be put side by side to be computed against."""
    work: tuple[tuple[int | None, Tensor, Tensor, CompiledShapes], ...]
    """Batch element, K, V, and what to compute against them."""


def rows_of(x: Tensor, first: int, rows: int) -> Tensor:
    """Some rows that stand side by side; the tensor itself if these are all of it."""
    return x if rows == x.shape[0] else x.narrow(0, first, rows)


def stretches_of(x: Tensor, places: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
    """Rows from a first one on, as many as are said, for each of some places.

    Those that follow each other are cut by one operation.
    """
    ends = [first + rows for first, rows in places]
    if len(places) < 2 or any(
        end != first for end, (first, _) in zip(ends, places[1:], strict=False)
    ):
        return [rows_of(x, first, rows) for first, rows in places]
    whole = rows_of(x, places[0][0], ends[-1] - places[0][0])
    cut: tuple[Tensor, ...] = whole.split([rows for _, rows in places])
    return cut


def bound_rounds(
    program: RankProgram,
    kind: RowKind,
    own: Tensor,
    arriving: Tensor,
    staged: Tensor,
    gathered: Tensor,
) -> tuple[BoundRound, ...]:
    """The rounds of a program on some memory."""
    tensors = {"own": own, "arriving": arriving, "staged": staged}

    def bound(round_: Round) -> BoundRound:
        def rows_from(source: Source) -> Tensor:
            """Rows that stand side by side."""
            return rows_of(tensors[source.of], source.places.first, source.places.rows)

        def messages_from(sources: Sequence[tuple[int, Source]]) -> Messages:
            found: dict[int, Tensor] = {}
            for of, x in tensors.items():
                peers = [p for p, source in sources if source.of == of]
                places = [s.places for _, s in sources if s.of == of]
                cut = stretches_of(x, [(at.first, at.rows) for at in places])
                found.update(zip(peers, cut, strict=True))
            return tuple((p, found[p]) for p, _ in sources)

        gathers, at = [], 0
        for source in round_.gathers:
            places = source.places
            assert places.index is not None
            gathers.append((tensors[source.of], places.index, rows_of(staged, at, places.rows)))
            at += places.rows
        places = round_.keys.places
        key_gather = None
        if places.index is None:
            keys = rows_from(round_.keys)
        else:
            keys = rows_of(gathered, 0, places.rows)
            key_gather = (tensors[round_.keys.of], places.index, keys)
        work = (
            (w.b, *kind.for_kernel(rows_of(keys, w.first, w.rows)), w.shapes) for w in round_.work
        )
        return BoundRound(
            tuple(gathers),
            messages_from(round_.sends),
            messages_from([(p, Source("arriving", places)) for p, places in round_.receives]),
            (arriving.view(-1, *own.shape), own) if round_.gathers_all else None,
            key_gather if round_.work else None,
            tuple(work),
        )

    return tuple(bound(round_) for round_ in program.rounds)


def fetched_shape(k: Tensor, v: Tensor, rows: int, by_element: bool) -> tuple[int, ...]:
    """The shape of some rows of such K [B, G, L, D] and V [B, G, L, Dv]."""
    b, g, width = k.shape[0], k.shape[1], k.shape[3] + v.shape[3]
    return (rows, g, width) if by_element else (rows, b, g, width)


@dataclass(frozen=True, eq=False)
class HeadsOnTheirWay:
    """All rows of the group for this rank's own heads, once they are here."""

    pending: Pending
    rows: Tensor
    """[rows, B, heads, D]"""

    def wait(self) -> Tensor:
        """[B, heads, rows, D], as a view of memory that has rows first."""
        self.pending.wait()
        return self.rows.permute(1, 2, 0, 3)


@dataclass(frozen=True, eq=False)
class RowsOnTheirWay:
    """Heads of this rank's own rows, once they are here: all, or those of one part."""

    pending: Pending
    pieces: tuple[Tensor, ...]
    """[rows, B, heads of each member, D]"""
    first_heads: tuple[int, ...]
    """The first head of each."""
    num_heads: int
    """How many heads there are in all parts."""
    shared: bool
    """Whether several members, or several parts, may have the same head."""

    def with_own(self, place: int, own: Tensor) -> RowsOnTheirWay:
        """The same, but for what comes of this rank itself: [B, heads, rows, D], of its own heads.

        What is summed keeps the type that it is given in.
        """
        pieces = list(self.pieces)
        rows = own.permute(2, 0, 1, 3)
        pieces[place] = rows if self.shared else rows.to(pieces[place].dtype)
        return replace(self, pieces=tuple(pieces))


def whole_rows(moving: Sequence[RowsOnTheirWay]) -> Tensor:
    """[B, heads, rows, D] All heads, from those of every part, once they are here.

    A head that several ranks had is summed, in the order of parts and ranks, and rounded once: what
    is summed comes in the accumulation type.
    """
    pieces = []
    for part in moving:
        part.pending.wait()
        pieces += [x.permute(1, 2, 0, 3) for x in part.pieces]
    one = moving[0]
    if len(moving) == 1 and not one.shared:
        return torch.cat(pieces, dim=1)
    b, _, rows, d = pieces[0].shape
    shape = (b, one.num_heads, rows, d)
    if one.shared:
        total = pieces[0].new_zeros(shape, dtype=accumulation_dtype(pieces[0].dtype))
    else:
        total = pieces[0].new_empty(shape)
    for first, piece in zip((n for part in moving for n in part.first_heads), pieces, strict=True):
        place = total.narrow(1, first, piece.shape[1])
        if one.shared:
            place.add_(piece)
        else:
            place.copy_(piece)
    return total
