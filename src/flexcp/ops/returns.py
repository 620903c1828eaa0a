"""Gradients of K and V: how they are summed, and sent home to the owners of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.comm import PassLabel, Pending, Transport
from flexcp.kernels.merge import accumulation_dtype
from flexcp.ops.gradient_program import Add
from flexcp.ops.places import Places
from flexcp.ops.program import RankProgram
from flexcp.ops.rows import Messages, RowKind, rows_of


@dataclass(frozen=True, eq=False)
class BoundAdd:
    """An `Add`, with tensors in place of places."""

    piece: Tensor | None
    """Where the piece is put first; None if it goes straight to its target."""
    source: Tensor | None
    """Which rows of the piece are added; None for all."""
    target: Tensor
    """The sums, or those of its rows that are added to."""
    index: Tensor | None
    """Which of its rows, if they don't stand side by side."""
    halves: tuple[Tensor, ...]
    """The target's part of K, and of V, if the kernel's results are added to it one by one."""
    writes: bool
    clears: tuple[Tensor, Tensor | None] | None
    """A tensor to be set to 0, or some of its rows."""


@dataclass(frozen=True, eq=False)
class BoundReturns:
    """A `GradientRound`, with tensors in place of places."""

    work: tuple[BoundAdd, ...]
    clears: tuple[Tensor, Tensor | None] | None
    cast: tuple[Tensor, Tensor] | None
    """Sums, and where to put them in the type of the rows before they are sent."""
    sends: Messages
    receives: Messages
    all_to_all: tuple[Tensor, Tensor, tuple[int, ...], tuple[int, ...]] | None
    """Flat tensors for all that comes and goes, and elements from and to each rank, instead."""
    sum_alike: tuple[Tensor, Tensor] | None
    """What peers returned, by peer, and where its sum goes; straight to its place, if it can."""
    returned: tuple[BoundAdd, ...]


@dataclass(frozen=True, eq=False)
class BoundGradients:
    """The sums of gradients, and how they are summed."""

    own: Tensor
    """Those of the own rows, in the accumulation type."""
    nbytes: int
    """What all of its memory takes."""
    clears: tuple[Tensor, Tensor | None] | None
    rounds: tuple[BoundReturns, ...]


def bound_gradients(
    program: RankProgram,
    kind: RowKind,
) -> BoundGradients | None:
    """The gradient part of a program on new memory; None in a forward pass."""
    gradients = program.gradients
    if gradients is None:
        return None
    dtype = accumulation_dtype(kind.dtype)
    sums = kind.empty(gradients.rows, dtype)
    sends_sums = dtype == kind.dtype
    rounds = gradients.rounds
    picked = [add.target.rows for r in rounds for add in r.work if add.target.index is not None]
    piece = kind.empty(max(picked, default=0), dtype)
    alike = kind.empty(max((r.came // r.alike for r in rounds if r.alike), default=0), dtype)
    cast = kind.empty(0 if sends_sums else max((r.sent.rows for r in rounds), default=0))
    came = kind.empty(max((r.came for r in rounds), default=0))
    width = kind.empty(1).numel()

    def cleared(places: Places) -> tuple[Tensor, Tensor | None] | None:
        if places.rows == 0:
            return None
        if places.index is not None:
            return sums, places.index
        return rows_of(sums, places.first, places.rows), None

    def bound_add(add: Add, piece: Tensor | None, source: Tensor | None) -> BoundAdd:
        target, index = sums, add.target.index
        if index is None:
            target = rows_of(sums, add.target.first, add.target.rows)
        halves: tuple[Tensor, ...] = ()
        if piece is None and not add.writes:
            halves = (target[..., : kind.d], target[..., kind.d :])
        return BoundAdd(piece, source, target, index, halves, add.writes, cleared(add.clears))

    def bound_work(add: Add) -> BoundAdd:
        goes_straight = add.target.index is None
        return bound_add(add, None if goes_straight else piece[: add.target.rows], None)

    def bound_returned(add: Add, given: Tensor) -> BoundAdd:
        source = add.source
        if source.index is None:
            given = rows_of(given, source.first, source.rows)
        return bound_add(add, given, source.index)

    bound = []
    for round_ in rounds:
        sent = rows_of(sums, round_.sent.first, round_.sent.rows)
        casts = None
        if not sends_sums:
            casts = (sent, rows_of(cast, 0, round_.sent.rows)) if round_.sent.rows else None
            sent = rows_of(cast, 0, round_.sent.rows)
        sends: Messages = ()
        receives: Messages = ()
        all_to_all = None
        if gradients.all_to_all:
            takes, gives = [0] * program.ranks, [0] * program.ranks
            for p, x in round_.receives:
                takes[p] = x.rows * width
            for p, x in round_.sends:
                gives[p] = x.rows * width
            whole = rows_of(came, 0, round_.came)
            all_to_all = (whole.view(-1), sent.view(-1), tuple(takes), tuple(gives))
        else:
            begin = round_.sent.first
            sends = tuple((p, rows_of(sent, x.first - begin, x.rows)) for p, x in round_.sends)
            receives = tuple((p, rows_of(came, x.first, x.rows)) for p, x in round_.receives)
        sum_alike, given, returned = None, came, round_.returned
        if round_.alike:
            rows = round_.came // round_.alike
            given = rows_of(alike, 0, rows)
            (add,) = round_.returned  # each row once
            if add.writes and add.target.index is None:
                given, returned = sums.narrow(0, add.target.first, rows), ()
            sum_alike = (rows_of(came, 0, round_.came).unflatten(0, (round_.alike, rows)), given)
        bound.append(
            BoundReturns(
                tuple(bound_work(add) for add in round_.work),
                cleared(round_.clears),
                casts,
                sends,
                receives,
                all_to_all,
                sum_alike,
                tuple(bound_returned(add, given) for add in returned),
            )
        )
    own = rows_of(sums, 0, program.own_rows)
    nbytes = sum(x.nbytes for x in (sums, piece, alike, cast, came))
    return BoundGradients(own, nbytes, cleared(gradients.clears), tuple(bound))


class GradientReturns:
    """Sums the gradients of K and V, and sends those of other ranks' rows home.

    What comes back for the rank's own rows is added while the next round is computed.
    """

    def __init__(
        self, bound: BoundGradients | None, transport: Transport, labels: PassLabel
    ) -> None:
        assert bound is not None, "only backward programs have gradients"
        self._bound, self._transport, self._labels = bound, transport, labels
        self._pending: tuple[BoundReturns, Pending] | None = None

    def add_round(self, number: int, pieces: Sequence[tuple[Tensor, ...]]) -> None:
        """Takes the gradients of a round's pieces of work, and sends off what the schedule says.

        Each piece is given in parts of its rows' width: those of K and of V, rows first.
        """
        self._collect()
        round_ = self._bound.rounds[number]
        for add, parts in zip(round_.work, pieces, strict=True):
            _add_parts(add, parts)
        _clear(round_.clears)
        if round_.cast is not None:
            sums, sent = round_.cast
            sent.copy_(sums)
        if round_.all_to_all is not None:
            out, x, takes, gives = round_.all_to_all
            label, ranks = self._labels.round("gradients", number), range(len(takes))
            pending = self._transport.all_to_all(out, x, takes, gives, ranks, label=label)
        elif round_.sends or round_.receives:
            label = self._labels.round("gradients", number)
            pending = self._transport.exchange(round_.sends, round_.receives, label=label)
        else:
            return
        self._pending = (round_, pending)

    def finish(self) -> Tensor:
        """The gradients of the rank's own rows, in memory of their own."""
        self._collect()
        _clear(self._bound.clears)
        return self._bound.own.clone()

    def _collect(self) -> None:
        """Adds what peers have returned."""
        if self._pending is None:
            return
        round_, pending = self._pending
        pending.wait()
        self._pending = None
        if round_.sum_alike is not None:
            by_peer, total = round_.sum_alike
            torch.sum(by_peer, 0, dtype=total.dtype, out=total)
        for add in round_.returned:
            assert add.piece is not None
            piece = add.piece
            if add.source is not None:
                piece = piece.index_select(0, add.source)
            _add_rows(add, piece)


def _add_parts(add: BoundAdd, parts: tuple[Tensor, ...]) -> None:
    """Adds what a kernel has found."""
    if add.index is None and not add.writes:
        _clear(add.clears)
        for target, part in zip(add.halves, parts, strict=True):
            target.add_(part)
        return
    target = add.target if add.piece is None else add.piece
    torch.cat(parts, -1, out=target)
    if add.piece is not None:
        _add_rows(add, add.piece)


def _add_rows(add: BoundAdd, piece: Tensor) -> None:
    """Adds rows that are together."""
    _clear(add.clears)
    if add.index is None:
        if add.writes:
            add.target.copy_(piece)
        else:
            add.target.add_(piece)
        return
    piece = piece.to(add.target.dtype)
    if add.writes:
        add.target.index_copy_(0, add.index, piece)
    else:
        add.target.index_add_(0, add.index, piece)


def _clear(what: tuple[Tensor, Tensor | None] | None) -> None:
    if what is None:
        return
    target, index = what
    if index is None:
        target.zero_()
    else:
        target.index_fill_(0, index, 0.0)
