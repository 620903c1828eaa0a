"""The executor: runs a rank's program on a transport and a kernel.

While a round is computed, the rows of the next one are on their way. K and V of a row travel
together and unrepeated. Results of rounds are merged in the order of the rounds, so that the same
run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flexcp.comm import Pending, RoundLabel, Transport
from flexcp.kernels import flash
from flexcp.kernels.fused import FusedOp
from flexcp.kernels.merge import merge_into
from flexcp.kernels.reference import accumulation_dtype
from flexcp.kernels.score import ScoreMod
from flexcp.ops.rank_program import Lane, Message, Pick, RankProgram, Round
from flexcp.ops.rows import ROW, Rows, add_picked, joined, picked


@dataclass(frozen=True, eq=False)
class Kernel:
    """How tiles are computed."""

    scale: float
    fused: FusedOp | None
    score_mods: tuple[ScoreMod | None, ...]
    """One for each batch element with a layout of its own, else one."""

    def score_mod(self, lane: Lane) -> ScoreMod | None:
        """The score function, which sees the batch element's own number."""
        return self.score_mods[lane.b or 0] if len(self.score_mods) > 1 else self.score_mods[0]


@dataclass(eq=False)
class Kept:
    """K and V that arrived in the forward pass, if the backward pass uses them again."""

    batches: list[Tensor | None]


def run_forward(
    program: RankProgram,
    transport: Transport,
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: str,
) -> tuple[Tensor, Tensor, Kept]:
    """(out, lse) of the rank's queries over all keys, in the accumulation type."""
    total: tuple[Tensor, Tensor] | None = None
    rows = Rows.of(k, v, program)
    flow = _Flow(program, transport, rows, partial(RoundLabel, "forward", mask))
    for round_ in flow:
        keys = flow.work(round_)
        for lane in round_.lanes if q.numel() else ():
            at = slice(None) if lane.b is None else slice(lane.b, lane.b + 1)
            lane_k, lane_v = rows.for_kernel(keys, lane)
            found = flash.forward(
                q[at],
                lane_k,
                lane_v,
                lane.prepared,
                scale=kernel.scale,
                fused=kernel.fused,
                score_mod=kernel.score_mod(lane),
            )
            if lane.b is None and total is None:
                total = found.out, found.lse
                continue
            total = total or _nothing_seen(q, v)
            merge_into(total[0][at], total[1][at], found.out, found.lse)
    out, lse = total or _nothing_seen(q, v)
    return out, lse, Kept(flow.batches)


def _nothing_seen(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(q.dtype)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=dtype, device=q.device)
    return out, torch.full(q.shape[:3], -torch.inf, dtype=dtype, device=q.device)


def run_backward(
    program: RankProgram,
    transport: Transport,
    kernel: Kernel,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: Kept | None,
    mask: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of q, k, v and captured tensors, from the out and lse over all keys."""
    dtype = accumulation_dtype(q.dtype)
    grad_q: Tensor | None = None
    mods = [mod for mod in kernel.score_mods if mod is not None]
    captured = [torch.zeros_like(x) for x in mods[0].captured] if mods else []
    rows = Rows.of(k, v, program)
    flow = _Flow(program, transport, rows, partial(RoundLabel, "backward", mask), kept)
    home = _Homecoming(program, transport, rows, dtype, partial(RoundLabel, "gradients", mask))
    for number, round_ in enumerate(flow):
        keys = flow.work(round_)
        piece: Tensor | None = None
        for lane in round_.lanes if q.numel() else ():
            at = slice(None) if lane.b is None else slice(lane.b, lane.b + 1)
            lane_k, lane_v = rows.for_kernel(keys, lane)
            found = flash.backward(
                grad_out[at],
                q[at],
                lane_k,
                lane_v,
                out[at],
                lse[at],
                lane.prepared,
                scale=kernel.scale,
                fused=None if grad_lse is not None else kernel.fused,
                score_mod=kernel.score_mod(lane),
                grad_lse=None if grad_lse is None else grad_lse[at],
            )
            if lane.b is None and grad_q is None:
                grad_q = found.q
            else:
                grad_q = torch.zeros_like(q, dtype=dtype) if grad_q is None else grad_q
                grad_q[at] += found.q
            for total, part in zip(captured, found.captured, strict=True):
                total += part
            piece = rows.with_gradient(piece, keys, lane, found.k, found.v)
        if piece is None:
            piece = keys.new_zeros(keys.shape, dtype=dtype)
        home.after(number, round_, piece)
    grad_k, grad_v = home.arrive()
    grad_q = torch.zeros_like(q, dtype=dtype) if grad_q is None else grad_q
    return grad_q, grad_k, grad_v, captured


def run_gather(
    program: RankProgram, transport: Transport, k: Tensor, v: Tensor, mask: str
) -> Tensor:
    """K and V of all rows that the rank computes against, in the order of the rounds, as `Rows`."""
    flow = _Flow(program, transport, Rows.of(k, v, program), partial(RoundLabel, "forward", mask))
    return joined([flow.work(round_) for round_ in flow])


def run_scatter(
    program: RankProgram,
    transport: Transport,
    gradient: Tensor,
    k: Tensor,
    v: Tensor,
    rows_of_round: Sequence[Tensor],
    mask: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of the own k and v, from that of what `run_gather` returned.

    `rows_of_round` says which of its rows each round of the backward program speaks of.
    """
    rows = Rows.of(k, v, program)
    home = _Homecoming(
        program, transport, rows, gradient.dtype, partial(RoundLabel, "gradients", mask)
    )
    for number, (round_, index) in enumerate(zip(program.rounds, rows_of_round, strict=True)):
        home.after(number, round_, gradient.index_select(ROW, index.to(gradient.device)))
    return home.arrive()


class _Flow:
    """Rounds, with the rows of the next one on their way while one is computed."""

    def __init__(
        self,
        program: RankProgram,
        transport: Transport,
        rows: Rows,
        label: Callable[[int], RoundLabel],
        kept: Kept | None = None,
    ) -> None:
        self._program, self._transport, self._rows, self._label = program, transport, rows, label
        self.batches: list[Tensor | None] = [rows.own]
        self._kept = kept is not None
        if kept is not None:
            self.batches.extend(kept.batches[1:])

    def __iter__(self) -> Iterator[Round]:
        rounds = self._program.rounds
        pending = self._start(0) if rounds else None
        for number, round_ in enumerate(rounds):
            assert pending is not None
            came = pending.wait()
            if not self._kept:
                self.batches.append(joined(came) if came else self._rows.empty(0))
            pending = self._start(number + 1) if number + 1 < len(rounds) else None
            yield round_
            self._forget(number)

    def work(self, round_: Round) -> Tensor:
        """The rows that a round is computed against."""
        return self._picked(round_.picks, round_.rows)

    def _start(self, number: int) -> Pending:
        round_ = self._program.rounds[number]
        return self._transport.exchange(
            [(m.peer, self._picked(m.picks, m.rows)) for m in round_.sends if m.rows],
            [(m.peer, self._rows.shape_of(m.rows)) for m in round_.receives if m.rows],
            like=self._rows.own,
            label=self._label(number),
        )

    def _picked(self, picks: Sequence[Pick], rows: int) -> Tensor:
        return picked(picks, self.batches, lambda: self._rows.empty(rows))

    def _forget(self, number: int) -> None:
        for batch, last in enumerate(self._program.last_use):
            if 0 < batch <= number + 1 and last <= number and not self._kept:
                self.batches[batch] = None


class _Homecoming:
    """Gradients of other ranks' rows on their way to their owners.

    What comes for the rank's own rows is added up at once, and what has been sent is forgotten, so
    that memory is that of a few rounds, however many ranks there are.
    """

    def __init__(
        self,
        program: RankProgram,
        transport: Transport,
        rows: Rows,
        dtype: torch.dtype,
        label: Callable[[int], RoundLabel],
    ) -> None:
        self._program, self._transport, self._rows = program, transport, rows
        self._dtype, self._label = dtype, label
        self._pieces: dict[int, Tensor] = {}
        self._pending: tuple[int, Pending] | None = None
        self._total: Tensor | None = None
        self._last_sent = {
            pick.batch: number
            for number, round_ in enumerate(program.rounds)
            for message in round_.returns_out
            for pick in message.picks
        }

    def after(self, number: int, round_: Round, piece: Tensor) -> None:
        """Takes the gradient of a round's work, and sends off what the schedule says."""
        self._collect()
        self._take(2 * number, piece)
        if not (round_.returns_in or round_.returns_out):
            return
        sends = [(m.peer, self._gathered(m)) for m in round_.returns_out if m.rows]
        self._pieces = {n: x for n, x in self._pieces.items() if self._last_sent[n] > number}
        pending = self._transport.exchange(
            sends,
            [(m.peer, self._rows.shape_of(m.rows)) for m in round_.returns_in if m.rows],
            like=self._rows.own,
            label=self._label(number),
        )
        self._pending = (number, pending)

    def _collect(self) -> None:
        if self._pending is None:
            return
        number, pending = self._pending
        came = pending.wait()
        self._pending = None
        if came:
            self._take(2 * number + 1, joined(came).to(self._dtype))

    def _take(self, number: int, piece: Tensor) -> None:
        """Adds what is the rank's own, and keeps the piece if some of it is to be sent."""
        for pick in self._program.home:
            if pick.batch != number:
                continue
            own = self._rows.own
            if self._total is None and pick.takes_all_of(own.shape[ROW]):
                self._total = piece.narrow(ROW, 0, own.shape[ROW]).clone()
                continue
            if self._total is None:
                self._total = torch.zeros_like(own, dtype=self._dtype)
            add_picked(pick, piece, self._total)
        if number in self._last_sent:
            self._pieces[number] = piece

    def arrive(self) -> tuple[Tensor, Tensor]:
        """Gradients of the rank's own K and V."""
        self._collect()
        if self._total is None:
            self._total = torch.zeros_like(self._rows.own, dtype=self._dtype)
        return self._rows.home(self._total)

    def _gathered(self, message: Message) -> Tensor:
        own = self._rows.own
        first = message.picks[0] if len(message.picks) == 1 else None
        if first is not None and first.takes_all_of(self._pieces[first.batch].shape[ROW]):
            return self._pieces[first.batch].to(own.dtype)
        total = own.new_zeros(self._rows.shape_of(message.rows), dtype=self._dtype)
        for pick in message.picks:
            add_picked(pick, self._pieces[pick.batch], total)
        return total.to(own.dtype)
