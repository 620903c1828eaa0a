"""The executor: runs a rank's program on a transport and a kernel.

While a round is computed, the rows of the next one are on their way. K and V of a row travel
together and unrepeated. Results of rounds are merged in the order of the rounds, so that the same
run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flexcp.comm import Pending, RoundLabel, Transport
from flexcp.kernels import Kernel, Partial
from flexcp.kernels.merge import accumulation_dtype
from flexcp.kernels.score import ScoreMod
from flexcp.ops.interface import OutputGradients, Saved
from flexcp.ops.program import ElementWork, Message, RankProgram, Round, RowCopy
from flexcp.ops.rows import ROW, KVRows, add_rows, gather_rows, joined


@dataclass(frozen=True, eq=False)
class RoundKernel:
    """How the tiles of a round are computed."""

    scale: float
    kernel: Kernel
    score_mods: tuple[ScoreMod | None, ...]
    """One for each batch element with a layout of its own, else one."""

    def score_mod(self, work: ElementWork) -> ScoreMod | None:
        """The score function, which sees the batch element's own number."""
        return self.score_mods[work.b or 0] if len(self.score_mods) > 1 else self.score_mods[0]


def run_forward(
    program: RankProgram,
    transport: Transport,
    kernel: RoundKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(out, lse) of the rank's queries over all keys, in the accumulation type.

    Also the K and V that arrived in each round, if the program keeps them.
    """
    total: Partial | None = None
    rows = KVRows.of(k, v, program)
    fetched = KVPrefetcher(program, transport, rows, "forward", mask)
    for round_ in fetched:
        keys = fetched.keys(round_)
        for work in round_.work if q.numel() else ():
            at = slice(None) if work.b is None else slice(work.b, work.b + 1)
            work_k, work_v = rows.for_kernel(keys, work)
            if total is None and work.b is not None:
                total = _nothing_seen(q, v)
            found = kernel.kernel.forward(
                q[at],
                work_k,
                work_v,
                work.shapes,
                scale=kernel.scale,
                score_mod=kernel.score_mod(work),
                former=None if total is None else Partial(total.out[at], total.lse[at]),
            )
            total = found if total is None else total
    total = _nothing_seen(q, v) if total is None else total
    return total.out, total.lse, [x for x in fetched.buffers[1:] if x is not None]


def _nothing_seen(q: Tensor, v: Tensor) -> Partial:
    dtype = accumulation_dtype(q.dtype)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=dtype, device=q.device)
    return Partial(out, torch.full(q.shape[:3], -torch.inf, dtype=dtype, device=q.device))


def run_backward(
    program: RankProgram,
    transport: Transport,
    kernel: RoundKernel,
    saved: Saved,
    grads: OutputGradients,
    kept: Sequence[Tensor] | None,
    mask: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of q, k, v and captured tensors, from the out and lse over all keys.

    `saved` and `grads` are of the rows and heads that the kernel computes. `kept` are the K and V
    that arrived in each round of the forward pass, if they were kept.
    """
    q, out, lse, grad_out, grad_lse = saved.q, saved.out, saved.lse, grads.out, grads.lse
    dtype = accumulation_dtype(q.dtype)
    grad_q: Tensor | None = None
    delta = kernel.kernel.delta(grad_out, out, grad_lse) if q.numel() else None
    mods = [mod for mod in kernel.score_mods if mod is not None]
    captured = [torch.zeros_like(x) for x in mods[0].captured] if mods else []
    rows = KVRows.of(saved.k, saved.v, program)
    fetched = KVPrefetcher(program, transport, rows, "backward", mask, kept)
    returns = GradientReturns(program, transport, rows, dtype, mask)
    for number, round_ in enumerate(fetched):
        keys = fetched.keys(round_)
        piece: Tensor | None = None
        for work in round_.work if q.numel() else ():
            at = slice(None) if work.b is None else slice(work.b, work.b + 1)
            work_k, work_v = rows.for_kernel(keys, work)
            if grad_q is None and work.b is not None:
                grad_q = torch.zeros_like(q, dtype=dtype)
            found = kernel.kernel.backward(
                grad_out[at],
                q[at],
                work_k,
                work_v,
                out[at],
                lse[at],
                work.shapes,
                scale=kernel.scale,
                score_mod=kernel.score_mod(work),
                grad_lse=None if grad_lse is None else grad_lse[at],
                delta=None if delta is None else delta[at],
                grad_q=None if grad_q is None else grad_q[at],
            )
            grad_q = found.q if grad_q is None else grad_q
            for total, part in zip(captured, found.captured, strict=True):
                total += part
            piece = rows.with_gradient(piece, keys, work, found.k, found.v)
        if piece is None:
            piece = keys.new_zeros(keys.shape, dtype=dtype)
        returns.add_round(number, round_, piece)
    grad_k, grad_v = returns.finish()
    grad_q = torch.zeros_like(q, dtype=dtype) if grad_q is None else grad_q
    return grad_q, grad_k, grad_v, captured


class KVPrefetcher:
    """Rounds, with the K and V of the next one on their way while one is computed.

    `kept` are those of a former pass: then nothing is fetched.
    """

    def __init__(
        self,
        program: RankProgram,
        transport: Transport,
        rows: KVRows,
        direction: Literal["forward", "backward"],
        mask: str,
        kept: Sequence[Tensor] | None = None,
    ) -> None:
        self._program, self._transport, self._rows = program, transport, rows
        self._direction, self._mask = direction, mask
        self.buffers: list[Tensor | None] = [rows.own, *(kept or ())]
        """The rank's own rows, and those that arrived in each round, as long as they are needed."""
        self._fetches = kept is None

    def __iter__(self) -> Iterator[Round]:
        rounds = self._program.rounds
        pending = self._start(0) if rounds else None
        for number, round_ in enumerate(rounds):
            assert pending is not None
            came = pending.wait()
            if self._fetches:
                self.buffers.append(joined(came) if came else self._rows.empty(0))
            pending = self._start(number + 1) if number + 1 < len(rounds) else None
            yield round_
            self._forget(number)

    def keys(self, round_: Round) -> Tensor:
        """The rows that a round is computed against."""
        return self._gathered(round_.copies, round_.rows)

    def _start(self, number: int) -> Pending:
        round_ = self._program.rounds[number]
        return self._transport.exchange(
            [(m.peer, self._gathered(m.copies, m.rows)) for m in round_.sends if m.rows],
            [(m.peer, self._rows.shape_of(m.rows)) for m in round_.receives if m.rows],
            like=self._rows.own,
            label=RoundLabel(self._direction, self._mask, number),
        )

    def _gathered(self, copies: Sequence[RowCopy], rows: int) -> Tensor:
        return gather_rows(copies, self.buffers, lambda: self._rows.empty(rows))

    def _forget(self, number: int) -> None:
        for buffer, last in enumerate(self._program.last_use):
            if 0 < buffer <= number + 1 and last <= number and self._fetches:
                self.buffers[buffer] = None


class GradientReturns:
    """Gradients of other ranks' rows on their way to their owners.

    What comes for the rank's own rows is added up at once, and what has been sent is forgotten, so
    that memory is that of a few rounds, however many ranks there are.
    """

    def __init__(
        self,
        program: RankProgram,
        transport: Transport,
        rows: KVRows,
        dtype: torch.dtype,
        mask: str,
    ) -> None:
        self._program, self._transport, self._rows = program, transport, rows
        self._dtype, self._mask = dtype, mask
        self._pieces: dict[int, Tensor] = {}
        self._pending: tuple[int, Pending] | None = None
        self._total: Tensor | None = None
        self._last_sent = {
            copy.buffer: number
            for number, round_ in enumerate(program.rounds)
            for message in round_.returns_out
            for copy in message.copies
        }

    def add_round(self, number: int, round_: Round, piece: Tensor) -> None:
        """Takes the gradient of a round's work, and sends off what the schedule says."""
        self._collect()
        self._accumulate(2 * number, piece)
        if not (round_.returns_in or round_.returns_out):
            return
        sends = [(m.peer, self._gathered(m)) for m in round_.returns_out if m.rows]
        self._pieces = {n: x for n, x in self._pieces.items() if self._last_sent[n] > number}
        pending = self._transport.exchange(
            sends,
            [(m.peer, self._rows.shape_of(m.rows)) for m in round_.returns_in if m.rows],
            like=self._rows.own,
            label=RoundLabel("gradients", self._mask, number),
        )
        self._pending = (number, pending)

    def _collect(self) -> None:
        if self._pending is None:
            return
        number, pending = self._pending
        came = pending.wait()
        self._pending = None
        if came:
            self._accumulate(2 * number + 1, joined(came).to(self._dtype))

    def _accumulate(self, number: int, piece: Tensor) -> None:
        """Adds what is the rank's own, and keeps the piece if some of it is to be sent."""
        for copy in self._program.own_gradients:
            if copy.buffer != number:
                continue
            own = self._rows.own
            if self._total is None and copy.takes_all_of(own.shape[ROW]):
                self._total = piece.narrow(ROW, 0, own.shape[ROW]).clone()
                continue
            if self._total is None:
                self._total = torch.zeros_like(own, dtype=self._dtype)
            add_rows(copy, piece, self._total)
        if number in self._last_sent:
            self._pieces[number] = piece

    def finish(self) -> tuple[Tensor, Tensor]:
        """Gradients of the rank's own K and V."""
        self._collect()
        if self._total is None:
            self._total = torch.zeros_like(self._rows.own, dtype=self._dtype)
        return self._rows.split(self._total)

    def _gathered(self, message: Message) -> Tensor:
        own = self._rows.own
        first = message.copies[0] if len(message.copies) == 1 else None
        if first is not None and first.takes_all_of(self._pieces[first.buffer].shape[ROW]):
            return self._pieces[first.buffer].to(own.dtype)
        total = own.new_zeros(self._rows.shape_of(message.rows), dtype=self._dtype)
        for copy in message.copies:
            add_rows(copy, self._pieces[copy.buffer], total)
        return total.to(own.dtype)
