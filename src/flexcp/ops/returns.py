"""Gradients of K and V: how they are summed, and sent home to the owners of the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from flexcp.comm import PassLabel, Pending, Transport
from flexcp.kernels.merge import accumulation_dtype
from flexcp.ops.gradient_program import Add, RowSums
from flexcp.ops.places import Places
from flexcp.ops.program import RankProgram
from flexcp.ops.rows import Messages, RowKind, rows_of, stretches_of


@dataclass(frozen=True, eq=False)
class BoundAdd:
    """An `Add`, with tensors in place of places."""

    piece: Tensor
    """What is added, or what its rows are picked from."""
    source: Tensor | None
    """Which rows of the piece; None for all."""
    target: Tensor
    """The sums, or those of its rows that are added to."""
    index: Tensor | None
    """Which of its rows, if they don't stand side by side."""
    writes: bool
    clears: tuple[Tensor, Tensor | None] | None
    """A tensor to be set to 0, or some of its rows."""


@dataclass(frozen=True, eq=False)
class BoundWork:
    """Where the gradients of a piece of work go."""

    rows: Tensor
    """Where they are written: the sums themselves, or a piece that is added to them."""
    for_kernel: tuple[Tensor, Tensor]
    """The same as K [B, G, n, D] and V [B, G, n, Dv]."""
    add: BoundAdd | None
    """What is to be done afterwards."""


@dataclass(frozen=True, eq=False)
class BoundSums:
    """`RowSums`, with tensors in place of places."""

    cast: tuple[Tensor, Tensor] | None
    """What came, and where to put it behind the sums; None if it came there."""
    rows: Tensor
    """[rows, width] The sums, and behind them what came."""
    source: Tensor
    starts: Tensor
    target: tuple[Tensor, Tensor | None] | None
    """Where new values go: a tensor, or some of its rows; None if the pass returns them."""


@dataclass(frozen=True, eq=False)
class BoundReturns:
    """A `GradientRound`, with tensors in place of places."""

    work: tuple[BoundWork, ...]
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
    summed: BoundSums | None


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
    sends_sums = dtype == kind.dtype
    rounds = gradients.rounds
    summed_rows = max((r.came for r in rounds if r.summed is not None), default=0)
    beyond = kind.empty(gradients.rows + summed_rows, dtype)
    sums = rows_of(beyond, 0, gradients.rows)

    def goes_straight(add: Add) -> bool:
        """Whether a kernel may write to the sums: not where the last message may still leave."""
        at = add.target
        stays = not sends_sums or at.first + at.rows <= program.own_rows
        return add.writes and at.index is None and stays

    detours = [sum(x.target.rows for x in r.work if not goes_straight(x)) for r in rounds]
    pieces = kind.empty(max(detours, default=0), dtype)
    alike = kind.empty(max((r.came // r.alike for r in rounds if r.alike), default=0), dtype)
    cast = kind.empty(0 if sends_sums else max((r.sent.rows for r in rounds), default=0))
    direct = sends_sums and summed_rows > 0
    most_came = max((r.came for r in rounds if not (direct and r.summed)), default=0)
    came = kind.empty(most_came)
    width = kind.empty(1).numel()

    def cleared(places: Places) -> tuple[Tensor, Tensor | None] | None:
        if places.rows == 0:
            return None
        if places.index is not None:
            return sums, places.index
        return rows_of(sums, places.first, places.rows), None

    def bound_add(add: Add, piece: Tensor) -> BoundAdd:
        target, (source, index) = sums, (add.source.index, add.target.index)
        if index is None:
            target = rows_of(sums, add.target.first, add.target.rows)
        if source is None:
            piece = rows_of(piece, add.source.first, add.source.rows)
        return BoundAdd(piece, source, target, index, add.writes, cleared(add.clears))

    def bound_work(adds: Sequence[Add]) -> Iterator[BoundWork]:
        at = 0
        for add in adds:
            if goes_straight(add):
                rows, then = rows_of(sums, add.target.first, add.target.rows), None
            else:
                rows = rows_of(pieces, at, add.target.rows)
                then, at = bound_add(add, rows), at + add.target.rows
            yield BoundWork(rows, kind.for_kernel(rows), then)

    def bound_sums(add: RowSums, count: int) -> BoundSums:
        behind = beyond.narrow(0, gradients.rows, count)
        target = None
        if add.target is not None:
            at = add.target
            where = sums if at.index is not None else rows_of(sums, at.first, at.rows)
            target = (where, at.index)
        cast = None if sends_sums else (rows_of(came, 0, count), behind)
        return BoundSums(cast, beyond.flatten(1), add.source, add.starts, target)

    bound = []
    for round_ in rounds:
        lands = came
        if sends_sums and round_.summed is not None:
            lands = beyond.narrow(0, gradients.rows, round_.came)
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
            whole = rows_of(lands, 0, round_.came)
            all_to_all = (whole.view(-1), sent.view(-1), tuple(takes), tuple(gives))
        else:
            begin = round_.sent.first
            sends = _messages(sent, round_.sends, begin)
            receives = _messages(lands, round_.receives)
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
                tuple(bound_work(round_.work)),
                cleared(round_.clears),
                casts,
                sends,
                receives,
                all_to_all,
                sum_alike,
                tuple(bound_add(add, given) for add in returned),
                None if round_.summed is None else bound_sums(round_.summed, round_.came),
            )
        )
    own = rows_of(sums, 0, program.own_rows)
    nbytes = sum(x.nbytes for x in (beyond, pieces, alike, cast, came))
    return BoundGradients(own, nbytes, cleared(gradients.clears), tuple(bound))


def _messages(x: Tensor, places: Sequence[tuple[int, Places]], begin: int = 0) -> Messages:
    """Rows of a tensor for each peer, counted from row `begin` on."""
    cut = stretches_of(x, [(at.first - begin, at.rows) for _, at in places])
    return tuple((p, part) for (p, _), part in zip(places, cut, strict=True))


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

    def work(self, number: int) -> tuple[BoundWork, ...]:
        """Where the gradients of each piece of a round's work are to be written."""
        return self._bound.rounds[number].work

    def add_round(self, number: int) -> None:
        """Adds a round's gradients, once they are written, and sends off what the schedule says."""
        came = self._wait()
        round_ = self._bound.rounds[number]
        for piece in round_.work:
            if piece.add is not None:
                _add_rows(piece.add)
        if came is not None:
            _add_returned(came)
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

    def finish(self, dtype: torch.dtype) -> Tensor:
        """The gradients of the rank's own rows, in memory of their own."""
        came = self._wait()
        found = None if came is None else _add_returned(came)
        if found is not None:
            return found.view_as(self._bound.own).to(dtype)
        _clear(self._bound.clears)
        return self._bound.own.to(dtype, copy=True)

    def _wait(self) -> BoundReturns | None:
        """The round whose gradients have come back: what left in it has left."""
        if self._pending is None:
            return None
        round_, pending = self._pending
        pending.wait()
        self._pending = None
        return round_


def _add_returned(round_: BoundReturns) -> Tensor | None:
    """Adds what peers have returned; the sums of all own rows, if they are new."""
    if round_.sum_alike is not None:
        by_peer, total = round_.sum_alike
        torch.sum(by_peer, 0, dtype=total.dtype, out=total)
    for add in round_.returned:
        _add_rows(add)
    return None if round_.summed is None else _sum_rows(round_.summed)


def _sum_rows(sums: BoundSums) -> Tensor | None:
    """Sums the rows of each target, one after the other: no atomics, on any device."""
    if sums.cast is not None:
        came, behind = sums.cast
        behind.copy_(came)
    found: Tensor = embedding_bag(
        sums.source, sums.rows, sums.starts, mode="sum", include_last_offset=True
    )
    if sums.target is None:
        return found
    target, index = sums.target
    if index is None:
        target.copy_(found.view_as(target))
    else:
        target.index_copy_(0, index, found.view(-1, *target.shape[1:]))
    return None


def _add_rows(add: BoundAdd) -> None:
    """Adds rows of a piece to their places."""
    _clear(add.clears)
    piece = add.piece
    if add.source is not None:
        piece = piece.index_select(0, add.source)
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
