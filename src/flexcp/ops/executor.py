"""The executor: runs a rank's program on a transport and a kernel.

While a round is computed, the rows of the next one are on their way. K and V of a row travel
together and unrepeated. Results of rounds are merged in the order of the rounds, so that the same
run gives the same bits. Nothing is decided here: the program has the places of all rows, and the
workspace a view of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexcp.comm import PassLabel, Pending, Transport
from flexcp.eager import outside_of_inference_mode
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.interface import Kernel, Partial
from flexcp.kernels.merge import accumulation_dtype
from flexcp.kernels.score import ScoreMod
from flexcp.ops.interface import OutputGradients, Saved
from flexcp.ops.program import RankProgram
from flexcp.ops.returns import BoundGradients, GradientReturns, bound_gradients
from flexcp.ops.rows import BoundRound, RowKind, bound_rounds

_MOST_FREE = 4
"""Workspaces of a kind that are kept while nobody uses them: as many passes can run at a time."""
_MOST_TIMES_OWN = 24
"""Bytes of a workspace that is kept, over those of the own K and V: rounds of a ring take some 10,
of documents up to 20 or so, an all-gather as many as there are ranks, which is memory that others
need between passes."""
_MOST_KINDS = 4
"""Kinds of rows that they are kept for, under one mask of a plan."""


@dataclass(frozen=True, eq=False)
class RoundKernel:
    """How the tiles of a round are computed."""

    scale: float
    kernel: Kernel
    score_mods: tuple[ScoreMod | None, ...] = (None,)
    """One for each batch element with a layout of its own, else one."""
    dropout: Dropout | None = None
    """Of the weights, as the call's seed says."""

    def score_mod(self, b: int | None) -> ScoreMod | None:
        """The score function, which sees the batch element's own number."""
        return self.score_mods[b or 0] if len(self.score_mods) > 1 else self.score_mods[0]

    def dropout_of(self, b: int | None) -> Dropout | None:
        """The dropout of a batch element's own tensors, or of all."""
        return None if self.dropout is None else self.dropout.of_element(b)


@dataclass(frozen=True, eq=False)
class PassWorkspace:
    """The memory of one pass."""

    key: tuple[Any, ...]
    """What passes that can use it agree in."""
    kind: RowKind
    program: RankProgram
    own: Tensor | None
    """Room for own rows; None if K and V come as rows."""
    arriving: Tensor | None
    """Room for rows that arrive; None if they are kept, and new in each pass."""
    staged: Tensor
    """Room for what is gathered to be sent."""
    gathered: Tensor
    """Room for what is gathered to be computed against."""
    rounds: tuple[BoundRound, ...]
    """All rounds on this memory; none if some of it is new in each pass."""
    gradients: BoundGradients | None
    is_small: bool
    """Whether it may be kept between passes."""

    @classmethod
    def of(cls, program: RankProgram, kind: RowKind, key: tuple[Any, ...]) -> PassWorkspace:
        """Memory for a program, on the device of the rows."""
        program = program.on(kind.device)
        own = arriving = None
        rounds: tuple[BoundRound, ...] = ()
        with outside_of_inference_mode():
            staged, gathered = (kind.empty(n) for n in (program.staged_rows, program.gathered_rows))
            if not program.keeps:
                arriving = kind.empty(program.arriving_rows)
            if arriving is not None and program.own_arrive:
                own = arriving[: program.own_rows]
            elif not program.own_is_given:
                own = kind.empty(program.sent_rows)
                if program.sent_rows > program.own_rows:  # padding that is sent
                    own[program.own_rows :].zero_()
            if own is not None and arriving is not None:
                rounds = bound_rounds(program, kind, own, arriving, staged, gathered)
            gradients = bound_gradients(program, kind)
        nbytes = sum(x.nbytes for x in (own, arriving, staged, gathered) if x is not None)
        nbytes += 0 if gradients is None else gradients.nbytes
        is_small = nbytes <= _MOST_TIMES_OWN * kind.nbytes(program.own_rows)
        return cls(key, kind, program, own, arriving, staged, gathered, rounds, gradients, is_small)

    def rounds_of(
        self, k: Tensor, v: Tensor, kept: Tensor | None
    ) -> tuple[tuple[BoundRound, ...], Tensor]:
        """All rounds, ready to be run on K and V; and all rows that arrive.

        `kept` are those of a former pass, if it kept them.
        """
        program, kind, own, arriving = self.program, self.kind, self.own, self.arriving
        if arriving is None:
            arriving = kind.empty_to_keep(program.arriving_rows) if kept is None else kept
            if program.own_arrive:
                own = arriving[: program.own_rows]
        given = self.found_in(k, v) if program.own_is_given else None
        if given is not None:
            own = given
        else:
            own = kind.empty(program.own_rows) if own is None else own
            if program.own_is_read:
                self.fill(own, k, v)
        if own is self.own and arriving is self.arriving:
            return self.rounds, arriving
        return bound_rounds(program, kind, own, arriving, self.staged, self.gathered), arriving

    def fill(self, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Puts K [B, G, L, D] and V [B, G, L, Dv] into the first rows, in one copy."""
        if rows.shape[0] > k.shape[2] * (k.shape[0] if self.kind.by_element else 1):
            rows = rows[: k.shape[2] * (k.shape[0] if self.kind.by_element else 1)]
        order = (0, 2, 1, 3) if self.kind.by_element else (2, 0, 1, 3)
        if self.kind.by_element:
            rows = rows.view(k.shape[0], k.shape[2], *rows.shape[1:])
        torch.cat((k.permute(order), v.permute(order)), -1, out=rows)

    def found_in(self, k: Tensor, v: Tensor) -> Tensor | None:
        """The rows that K and V are views of, if they are the halves of such, as after a swap."""
        b, g, length = k.shape[:3]
        width = self.kind.d + self.kind.dv
        by_token = (length * g * width, width, g * width, 1)
        strides = by_token if self.kind.by_element else (g * width, width, b * g * width, 1)
        if k.stride() != strides or v.stride() != strides:
            return None
        if v.data_ptr() - k.data_ptr() != self.kind.d * k.element_size():
            return None
        if k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr():
            return None
        if self.kind.by_element:
            return k.as_strided((b * length, g, width), (g * width, width, 1))
        return k.as_strided((length, b, g, width), (b * g * width, g * width, width, 1))


def take_workspace(program: RankProgram, k: Tensor, v: Tensor) -> PassWorkspace:
    """Memory for a pass over K and V; nobody else has it until it is given back."""
    key = _key_of(k, v)
    with program.lock:
        free = program.free.get(key)
        if free:
            space: PassWorkspace = free.pop()
            return space
    return PassWorkspace.of(program, RowKind.of(k, v, program.by_element), key)


def _key_of(k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """What passes agree in that can use the same memory; on a GPU, the stream that orders them."""
    device = k.device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return (k.shape, v.shape, k.dtype, device, stream)


def give_workspace(program: RankProgram, space: PassWorkspace) -> None:
    """Takes it back; not if the pass has failed: something may still arrive in it."""
    if not space.is_small or type(space.staged) is not Tensor:
        return  # nothing that a FakeTensorMode made outlives it
    with program.lock:
        free = program.free.setdefault(space.key, [])
        if len(free) < _MOST_FREE:
            free.append(space)
        if len(program.free) > _MOST_KINDS:
            del program.free[next(iter(program.free))]


def run_forward(
    program: RankProgram,
    transport: Transport,
    kernel: RoundKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    labels: PassLabel,
    *,
    former: Partial | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    before_waiting: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse) of the rank's queries over all keys, in the accumulation type.

    Also the rows that arrived, if the program keeps them. `former` is what was computed before, to
    which the rest is added in place. `meanwhile` is called once the first transfers are on their
    way, before anything is computed; `before_waiting` when a round is, and the next may have to be
    waited for.
    """
    if 0 in (*q.shape[:2], q.shape[3]):  # so on all ranks that this one exchanges rows with
        meanwhile()
        return *nothing_seen(q, v), _nothing_kept(program, k, v) if program.keeps else None
    space = take_workspace(program, k, v)
    rounds, arriving = space.rounds_of(k, v, None)
    if program.as_one:
        batch, q = q.shape[0], _as_one_sequence(q)
    out: Tensor | None = None
    lse = q  # until the first result
    if former is not None:
        out, lse = former.out, former.lse
    for round_ in fetched(rounds, transport, labels, meanwhile, before_waiting):
        for b, keys, values, shapes in round_.work:
            so_far = None
            if b is not None:
                if out is None:
                    out, lse = nothing_seen(q, v)
                so_far = Partial(out.narrow(0, b, 1), lse.narrow(0, b, 1))
            elif out is not None:
                so_far = Partial(out, lse)
            found = kernel.kernel.forward(
                q if b is None else q.narrow(0, b, 1),
                keys,
                values,
                shapes,
                scale=kernel.scale,
                score_mod=kernel.score_mod(b),
                former=so_far,
                dropout=kernel.dropout_of(b),
            )
            if out is None:
                out, lse = found.out, found.lse
    give_workspace(program, space)
    if out is None:
        out, lse = nothing_seen(q, v)
    if program.as_one:
        out, lse = (_as_elements(x, batch) for x in (out, lse))
    return out, lse, arriving if program.keeps else None


def _as_one_sequence(x: Tensor) -> Tensor:
    """[B, H, L, ...] as [1, H, B * L, ...]: a view if tokens are next to each other in memory."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def _as_elements(x: Tensor, batch: int) -> Tensor:
    """[1, H, B * L, ...] as [B, H, L, ...], a view."""
    apart: Tensor = x[0].unflatten(1, (batch, -1))
    return apart.transpose(0, 1)


def nothing_seen(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries that have seen no key yet, in the accumulation type."""
    dtype = accumulation_dtype(q.dtype)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=dtype, device=q.device)
    return out, torch.full(q.shape[:3], -torch.inf, dtype=dtype, device=q.device)


def _nothing_kept(program: RankProgram, k: Tensor, v: Tensor) -> Tensor:
    return RowKind.of(k, v, program.by_element).empty_to_keep(program.arriving_rows)


def fetched(
    rounds: Sequence[BoundRound],
    transport: Transport,
    labels: PassLabel,
    meanwhile: Callable[[], None] = lambda: None,
    before_waiting: Callable[[], None] = lambda: None,
) -> Iterator[BoundRound]:
    """Rounds that can be computed, with the rows of the next on their way while one is.

    `meanwhile` is called once, when the first rows are on their way; `before_waiting` whenever a
    round is computed and the rows of the next may not be here yet.
    """
    pending = _start(rounds[0], 0, transport, labels) if rounds else None
    last = len(rounds) - 1
    for number, round_ in enumerate(rounds):
        if pending is not None:
            if number > 0:
                before_waiting()
            pending.wait()
        pending = None
        if number < last:
            pending = _start(rounds[number + 1], number + 1, transport, labels)
        if number == 0:
            meanwhile()
        if round_.key_gather is not None:
            source, index, keys = round_.key_gather
            torch.index_select(source, 0, index, out=keys)
        yield round_


def _start(
    round_: BoundRound, number: int, transport: Transport, labels: PassLabel
) -> Pending | None:
    """Sends the rows of a round on their way."""
    if round_.all_gather is not None:
        out, own = round_.all_gather
        return transport.all_gather(out, own, label=labels.round("rows", number))
    if not (round_.sends or round_.receives):
        return None
    for source, index, part in round_.gathers:
        torch.index_select(source, 0, index, out=part)
    return transport.exchange(round_.sends, round_.receives, label=labels.round("rows", number))


def run_backward(
    program: RankProgram,
    transport: Transport,
    kernel: RoundKernel,
    saved: Saved,
    grads: OutputGradients,
    kept: Tensor | None,
    labels: PassLabel,
    *,
    captured: Sequence[Tensor] = (),
    kv_dtype: torch.dtype | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from the out and lse over all keys.

    `saved` and `grads` are of the rows and heads that the kernel computes. `kept` are the rows that
    arrived in the forward pass, if they were kept. Those of what a score function captures are
    added to `captured`, the sums for all its calls. All are in the accumulation type, but for those
    of k and v if `kv_dtype` names another. `meanwhile` is called once the first transfers are on
    their way, before anything is computed.
    """
    q, k, v, out, lse = saved.q, saved.k, saved.v, saved.out, saved.lse
    batch = q.shape[0]
    dtype = accumulation_dtype(q.dtype)
    grad_q: Tensor | None = None
    if 0 in (*q.shape[:2], q.shape[3]):
        meanwhile()
        zeros = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
        return next(zeros), next(zeros), next(zeros)
    space = take_workspace(program, k, v)
    rounds, _ = space.rounds_of(k, v, kept)
    if program.as_one:
        q, out, lse = (_as_one_sequence(x) for x in (q, out, lse))
        from_lse = None if grads.lse is None else _as_one_sequence(grads.lse)
        grads = OutputGradients(_as_one_sequence(grads.out), from_lse)
    returns = GradientReturns(space.gradients, transport, labels)
    delta = kernel.kernel.delta(grads.out, out, grads.lse)
    for number, round_ in enumerate(fetched(rounds, transport, labels, meanwhile)):
        rooms = returns.work(number)
        for (b, keys, values, shapes), room in zip(round_.work, rooms, strict=True):
            own = (grads.out, q, out, lse, grads.lse, delta, grad_q)
            if b is not None:
                grad_q = torch.zeros_like(q, dtype=dtype) if grad_q is None else grad_q
                own = (*own[:-1], grad_q)
                own = tuple(x if x is None else x.narrow(0, b, 1) for x in own)  # type: ignore[assignment]
            grad_out, own_q, own_out, own_lse, grad_lse, own_delta, so_far = own
            found = kernel.kernel.backward(
                grad_out,
                own_q,
                keys,
                values,
                own_out,
                own_lse,
                shapes,
                scale=kernel.scale,
                score_mod=kernel.score_mod(b),
                grad_lse=grad_lse,
                delta=own_delta,
                grad_q=so_far,
                grad_kv=room.for_kernel,
                dropout=kernel.dropout_of(b),
            )
            grad_q = found.q if grad_q is None else grad_q
            for total, part in zip(captured, found.captured, strict=True):
                total += part
        returns.add_round(number)
    grad_k, grad_v = space.kind.as_tokens(returns.finish(kv_dtype or dtype))
    give_workspace(program, space)
    grad_q = torch.zeros_like(q, dtype=dtype) if grad_q is None else grad_q
    grad_q = _as_elements(grad_q, batch) if program.as_one else grad_q
    return grad_q, grad_k, grad_v
