"""Attention over a plan: an `AttentionOp` of which every rank runs its own part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexcp.comm import CallLabel, PassLabel, Transport
from flexcp.comm.agreement import Agreement
from flexcp.errors import FlexCPError
from flexcp.kernels.merge import accumulation_dtype, add_sinks, sinks_gradient
from flexcp.kernels.registry import choose
from flexcp.kernels.score import ScoreFunction, ScoreMod, examine
from flexcp.ops.agreement import CallKind
from flexcp.ops.arguments import needs_gradients
from flexcp.ops.dropout import drawn_seed
from flexcp.ops.executor import RoundKernel, run_backward, run_forward
from flexcp.ops.head_extras import SWAPPED, all_heads, of_parts, split_heads
from flexcp.ops.interface import Gradients, OutputGradients, Saved
from flexcp.ops.program import RankPrograms
from flexcp.ops.rows import SPARE, RowKind
from flexcp.ops.swap import HeadPart, Swap, swapped_backward, swapped_forward
from flexcp.plan import Plan


@dataclass(frozen=True, eq=False)
class ShardedAttention:
    """Attention under one mask of a plan, as one rank computes it: all calls of a kind share it.

    The extras are, where the schedule keeps what forward received, K and V of each round; after a
    swap of rows for heads they are those of `swapped_forward`.
    """

    agreement: Agreement
    """What all ranks have to do alike."""
    transport: Transport
    parts: tuple[HeadPart, ...]
    """All heads; or, where ranks swap rows for heads, the parts that are computed in turn."""
    dropout_p: float = 0.0
    """The share of weights that are dropped; each call has a seed."""

    @property
    def keeps_kv(self) -> bool:
        """Whether backward uses the K and V that forward received."""
        return self.parts[0].programs.schedule.keeps_kv

    @property
    def swaps(self) -> bool:
        """Whether ranks swap rows for heads."""
        return self.parts[0].swap is not None

    def begin(self, seed: int | None = None) -> ShardedCall:
        """The next call of this kind, once all ranks are known to make it.

        `seed` is that of its dropout; None draws one if there is any.
        """
        calls = self.transport.calls
        if not self.dropout_p:
            return ShardedCall(self, calls.begin(self.agreement))
        draw = drawn_seed if seed is None else None
        return ShardedCall(self, calls.begin(self.agreement, dropout_seed=seed, draw_seed=draw))

    def again(self, label: Tensor) -> ShardedCall:
        """A call that began before, for one more backward pass; `label` is what `pack` made."""
        known = CallLabel.of_tensor(self.agreement.step, label)
        return ShardedCall(self, known, self.transport.calls.next_backward(known))

    def parts_of(self, call: CallLabel) -> tuple[HeadPart, ...]:
        """The parts, with the dropout of a call."""
        if call.dropout_seed is None:
            return self.parts
        return tuple(part.dropping(self.dropout_p, call.dropout_seed) for part in self.parts)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, labels: PassLabel
    ) -> Saved:
        """This rank's rows of the output."""
        parts = self.parts_of(labels.call)
        with torch.autocast(q.device.type, enabled=False):
            if self.swaps:
                return swapped_forward(parts, self.transport, q, k, v, sinks, labels)
            (part,) = parts
            out, lse, kept = run_forward(
                part.programs.forward, self.transport, part.kernel, q, k, v, labels
            )
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        return Saved(q, k, v, sinks, out.to(q.dtype), lse, () if kept is None else (kept,))

    def backward(self, saved: Saved, grads: OutputGradients, labels: PassLabel) -> Gradients:
        """Gradients of this rank's own rows, from those of its output."""
        parts, dtype = self.parts_of(labels.call), saved.q.dtype
        grad_sinks = None
        if saved.sinks is not None:
            grad_sinks = sinks_gradient(saved.sinks, grads.out, grads.lse, saved.out, saved.lse)
        mod = parts[0].kernel.score_mods[0]
        captured = [] if mod is None else mod.new_sums()
        with torch.autocast(saved.q.device.type, enabled=False):
            if self.swaps:
                found = swapped_backward(parts, self.transport, saved, grads, labels, captured)
            else:
                (part,) = parts
                found = run_backward(
                    part.programs.backward,
                    self.transport,
                    part.kernel,
                    saved,
                    grads,
                    saved.extras[0] if self.keeps_kv else None,
                    labels,
                    captured=captured,
                    kv_dtype=dtype,
                )
        grad_q, grad_k, grad_v = (x.to(dtype) for x in found)
        in_type = [] if mod is None else mod.in_type(captured)
        return Gradients(grad_q, grad_k, grad_v, grad_sinks, in_type)

    def pack(self, saved: Saved) -> list[Tensor]:
        """What was swapped, then all kept rows and the elements behind them, flat."""
        swapped, kept = of_parts(saved.extras, len(self.parts) if self.swaps else 0)
        rows = saved.q.new_empty(SPARE)
        if len(kept) == 1:
            rows = kept[0].as_strided((kept[0].numel() + SPARE,), (1,))
        elif kept:
            rows = torch.cat([*(x.flatten() for x in kept), rows])
        return [*(_in_own_memory(x) for x in all_heads(swapped)), rows]

    def unpack(self, packed: Sequence[Tensor], saved: Saved) -> tuple[Tensor, ...]:
        """What was swapped, then the kept rows."""
        *swapped, rows = packed
        extras = split_heads([p.heads for p in self.parts] if self.swaps else [], swapped)
        if not self.keeps_kv:
            return extras
        given = [extras[i + 1 : i + 3] for i in range(0, len(extras), SWAPPED)]
        by_element = self.parts[0].programs.forward.by_element
        kinds = [RowKind.of(k, v, by_element) for k, v in given or [(saved.k, saved.v)]]
        widths = [math.prod(kind.shape) for kind in kinds]
        count, at, kept = (rows.numel() - SPARE) // max(1, sum(widths)), 0, []
        for kind, width in zip(kinds, widths, strict=True):
            kept.append(rows.narrow(0, at, count * width).view(count, *kind.shape))
            at += count * width
        return *extras, *kept


@dataclass(eq=False)
class ShardedCall:
    """One call of attention over a plan: its messages carry its number, in every pass."""

    op: ShardedAttention
    label: CallLabel
    backwards: int = 0
    """How many backward passes have begun."""

    name = "attention over a plan"

    @property
    def score_mod(self) -> ScoreMod | None:
        """What is done to scores, and which tensors that takes."""
        return self.op.parts[0].kernel.score_mods[0]

    @property
    def replaces_inputs(self) -> bool:
        """After a swap, the kernel had other tensors than the caller gave."""
        return self.op.swaps

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Saved:
        """This rank's rows of the output."""
        labels = self.label.passing("forward")
        with telling_ranks(self.op.transport, labels):
            return self.op.forward(q, k, v, sinks, labels)

    def backward(self, saved: Saved, grads: OutputGradients) -> Gradients:
        """Gradients of this rank's own rows; a call may have several backward passes."""
        labels = self.label.passing("backward", self.backwards)
        self.backwards += 1
        with telling_ranks(self.op.transport, labels):
            return self.op.backward(saved, grads, labels)

    def pack(self, saved: Saved) -> list[Tensor]:
        """The label of the call, and the extras."""
        return [self.label.as_tensor(), *self.op.pack(saved)]

    def unpack(self, packed: Sequence[Tensor], saved: Saved) -> tuple[Tensor, ...]:
        """The extras of a call again, from what `pack` made of them."""
        return self.op.unpack(packed[1:], saved)


def _in_own_memory(x: Tensor) -> Tensor:
    """A contiguous tensor that shares its memory with no other, as outputs of a custom op must."""
    if x.numel() == 0:
        return x.new_empty(x.shape)
    is_whole = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if is_whole and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def sharded_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    mask: str | None,
    score_mod: ScoreFunction | None,
    scale: float | None,
    sinks: Tensor | None,
    *,
    gradients: bool | None = None,
    traced: bool = False,
    kernel: str | None = None,
    dropout_p: float = 0.0,
    first_head: int = 0,
) -> ShardedAttention:
    """The op of a call, if the plan fits the tensors; calls of one kind share it.

    `gradients` says whether a backward pass will follow; None asks the tensors. `traced` says that
    a score function is part of a compiled graph. `kernel` asks for a kernel by name. `first_head`
    is the global number of the first head, where dropout or an agreement has to know it.
    """
    b, h, rows, d = q.shape
    kind = CallKind(
        mask,
        (b, h, k.shape[1], d, v.shape[3], rows, k.shape[2]),
        q.dtype,
        q.device,
        scale,
        "traced" if traced else "none" if score_mod is None else "eager",
        sinks is not None,
        needs_gradients(q, k, v, sinks) if gradients is None else gradients,
        kernel,
        dropout_p,
        first_head if dropout_p else 0,
    )
    if score_mod is not None:
        return _make_op(plan, kind, q, k, v, score_mod)
    key = (kind, torch.get_num_threads())  # a kernel is chosen by how many threads there are
    op: ShardedAttention | None = plan.memo.get(key)
    if op is None:
        op = plan.memo.kept(key, lambda: _make_op(plan, kind, q, k, v, None))
    return op


def _make_op(
    plan: Plan, kind: CallKind, q: Tensor, k: Tensor, v: Tensor, score_mod: ScoreFunction | None
) -> ShardedAttention:
    mask = plan.mask_name(kind.mask)
    transport = plan.transport
    _check_rows(q, k, plan, transport.rank)
    schedule = plan.schedules[mask]
    planned = (plan.shape.num_heads, plan.shape.num_kv_heads)
    if schedule.heads_group_size > 1 and planned != (q.shape[1], k.shape[1]):
        raise FlexCPError(
            f"{planned[0]} query heads and {planned[1]} kv heads, which the plan splits over ranks",
            f"{q.shape[1]} and {k.shape[1]}",
            "make the plan with num_heads= and num_kv_heads= of the tensors",
        )
    swaps = Swap.of(schedule, transport, q.shape[1], k.shape[1])
    own: ScoreMod | None = None
    content = ""
    if score_mod is not None:
        # Of the function itself: what each rank adds to the number of a head is its own.
        own = examine(score_mod, accumulation_dtype(q.dtype), q.device)
        content = own.digest
        if needs_gradients(*own.captured):
            kind = replace(kind, gradients=True)
    choice = choose(
        q,
        v,
        score_mod=own,
        partial=True,
        kernel=kind.kernel,
        dropout=kind.dropout_p > 0,
        mask_kind=lambda: programs_of(plan, mask).mask_kind,
        scores=lambda: programs_of(plan, mask).mean_scores(*q.shape[:2]),
    )
    factor = q.shape[-1] ** -0.5 if kind.scale is None else float(kind.scale)
    kernel = RoundKernel(factor, choice.runs)
    as_one = score_mod is None and not kind.dropout_p
    elements = range(schedule.groups.batch_elements)
    parts = []
    for number, swap in enumerate(swaps or (None,)):
        first = 0 if swap is None else swap.heads[swap.place].q.start
        if own is not None:
            mods = tuple(replace(own, first_batch=b, first_head=first) for b in elements)
            kernel = replace(kernel, score_mods=mods)
        programs = programs_of(plan, mask, as_one=as_one, part=number)
        parts.append(HeadPart(programs, kernel, kind.first_head + first, swap))
    # The op of a kind is kept with the plan, so it must not hold the plan.
    return ShardedAttention(kind.agreement(plan, content), transport, tuple(parts), kind.dropout_p)


def programs_of(plan: Plan, mask: str, *, as_one: bool = True, part: int = 0) -> RankPrograms:
    """What this rank does under a mask of the plan, in both passes: found once per plan.

    `as_one` says that it does not matter which batch element a row is of; `part` which part of its
    heads it is for, where masks of heads differ.
    """
    schedule, grid, rank = plan.schedules[mask], plan.grids[mask], plan.transport.rank
    as_one = as_one and plan.layout.batch_elements > 1
    part = part if grid.heads > 1 else 0
    return plan.memo.kept(
        ("programs", mask, as_one, part),
        lambda: RankPrograms(schedule, grid, rank, as_one, part),
        per_mask=True,
    )


def shifted(function: ScoreFunction, b: int, h: int) -> ScoreFunction:
    """A score function that is called with a part of the batch and heads, counted from 0."""
    if b == 0 and h == 0:
        return function

    def of_whole(score: Tensor, b_: Tensor, h_: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return function(score, b_ + b, h_ + h, q_idx, kv_idx)

    return of_whole


@contextmanager
def tell_ranks_on_error(plan: Plan) -> Iterator[None]:
    """Tells the other ranks if this one can't make the call that they make."""
    try:
        yield
    except Exception as error:
        transport = plan.ranks.transport if isinstance(plan, Plan) else None
        if transport is not None:
            with suppress(Exception):  # what went wrong here matters more
                transport.calls.refuse("attention", f"{type(error).__name__}: {error}")
        raise


@contextmanager
def telling_ranks(transport: Transport, labels: PassLabel) -> Iterator[None]:
    """Tells the ranks that are in a pass if this one leaves it before its end."""
    try:
        yield
    except BaseException as error:
        if getattr(error, "is_of_peer", False):
            raise
        with suppress(Exception):  # what went wrong here matters more
            transport.calls.give_up(labels, f"{type(error).__name__}: {error}")
        raise


def _check_rows(q: Tensor, k: Tensor, plan: Plan, rank: int) -> None:
    rows = int(plan.layout.counts[rank])
    for name, x in (("q", q), ("k", k)):
        if x.shape[2] != rows:
            raise FlexCPError(
                f"{name} with the {rows} rows that rank {rank} owns, along dim 2",
                f"shape {tuple(x.shape)}",
                "pass what plan.shard(x, 2) gives",
            )
    elements = plan.layout.batch_elements
    if elements > 1 and q.shape[0] != elements:
        raise FlexCPError(
            f"{elements} batch elements, since the layout differs between them",
            f"{q.shape[0]}",
            "pass the whole batch",
        )
    for name, grid in plan.grids.items():
        of = grid.planes.of
        for dim, (what, index) in enumerate((("batch elements", "b"), ("query heads", "h"))):
            if of.shape[dim] == q.shape[dim]:
                continue
            if index in grid.reads or bool((of != of.narrow(dim, 0, 1)).any()):
                raise FlexCPError(
                    f"{of.shape[dim]} {what}, between which the mask {name!r} differs",
                    f"{q.shape[dim]}",
                    "make the plan with batch= and num_heads= of the tensors",
                )
