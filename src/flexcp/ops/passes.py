"""The two passes of attention over a plan, on plain tensors: what autograd and compilers wrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flexcp.comm import Transport
from flexcp.eager import run_eagerly_on_cpu
from flexcp.errors import FlexCPError
from flexcp.kernels.merge import add_sinks, sinks_gradient
from flexcp.kernels.reference import accumulation_dtype
from flexcp.kernels.registry import choose
from flexcp.kernels.score import ScoreFunction, ScoreMod, examine
from flexcp.ops.agreement import EXTRAS, agree_on_call, facts_of
from flexcp.ops.executor import Kept, Kernel, run_backward, run_forward
from flexcp.ops.rank_program import RankProgram, rank_program
from flexcp.ops.swap import Swap
from flexcp.plan import Plan


@dataclass(frozen=True, eq=False)
class Call:
    """Everything about a call that is not a differentiable tensor."""

    plan: Plan
    mask: str
    transport: Transport
    rank: int
    swap: Swap | None
    kernel: Kernel
    facts: Mapping[str, str]
    """What all ranks have to do alike."""

    def agree(self, gradients: str, extras: str | None = None) -> None:
        """Raises on every rank if the ranks' calls differ; comes before any data moves."""
        facts = {**self.facts, "gradients": gradients}
        agree_on_call(self.transport, facts if extras is None else {**facts, EXTRAS: extras})

    def program(self, direction: Literal["forward", "backward"]) -> RankProgram:
        """This rank's program, worked out once per plan."""
        kept: dict[tuple[str, str], RankProgram] = vars(self.plan).setdefault("_programs", {})
        key = (self.mask, direction)
        if key not in kept:
            schedule, grid = self.plan.schedules[self.mask], self.plan.grids[self.mask]
            kept[key] = _rank_program(schedule, grid, self.rank, direction)
        return kept[key]


_rank_program = run_eagerly_on_cpu(rank_program)


def prepare_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    mask: str | None,
    score_mod: ScoreFunction | None,
    scale: float | None,
    sinks: Tensor | None,
) -> Call:
    """Checks what this rank was given; `Call.agree` compares it with what the others were."""
    name = plan.mask_name(mask)
    transport, rank = transport_of(plan)
    _check_rows(q, k, plan, rank)
    schedule = plan.schedules[name]
    planned = (plan.shape.num_heads, plan.shape.num_kv_heads)
    if schedule.heads_group_size > 1 and planned != (q.shape[1], k.shape[1]):
        raise FlexCPError(
            f"{planned[0]} query heads and {planned[1]} kv heads, which the plan splits over ranks",
            f"{q.shape[1]} and {k.shape[1]}",
            "make the plan with num_heads= and num_kv_heads= of the tensors",
        )
    given = ("score_mod" if score_mod is not None else "", "sinks" if sinks is not None else "")
    facts = facts_of(plan, name, q, k, v, scale, ", ".join(filter(None, given)))
    swap = Swap.of(schedule, rank, transport, q.shape[1], k.shape[1])
    first_head = 0 if swap is None else swap.heads[swap.place].q.start
    mods: tuple[ScoreMod | None, ...] = (None,)
    if score_mod is not None:
        dtype = accumulation_dtype(q.dtype)
        mods = tuple(
            examine(shifted(score_mod, b, first_head), dtype, q.device)
            for b in range(schedule.groups.batch_elements)
        )
    choice = choose(q, v, score_mod=score_mod is not None, kernel=_kernel(q, score_mod))
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    kernel = Kernel(factor, choice.fused, mods)
    return Call(plan, name, transport, rank, swap, kernel, facts)


def _kernel(q: Tensor, score_mod: ScoreFunction | None) -> str | None:
    """Partial results need a kernel that returns them: compiled FlexAttention is no such."""
    if q.device.type == "cuda":
        return "flash" if score_mod is None else "scored"
    return None


def shifted(function: ScoreFunction, b: int, h: int) -> ScoreFunction:
    """A score function that is called with a part of the batch and heads, counted from 0."""
    if b == 0 and h == 0:
        return function

    def shifted(score: Tensor, b_: Tensor, h_: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return function(score, b_ + b, h_ + h, q_idx, kv_idx)

    return shifted


def transport_of(plan: Plan) -> tuple[Transport, int]:
    """How this rank reaches the others, and which one it is."""
    plan.require_mesh()
    ranks = plan.ranks
    assert ranks.rank is not None
    transport: Any = ranks.transport
    return transport, ranks.rank


def _check_rows(q: Tensor, k: Tensor, plan: Plan, rank: int) -> None:
    rows = int(plan.layout.counts[rank])
    for name, x in (("q", q), ("k", k)):
        if x.shape[2] != rows:
            raise FlexCPError(
                f"{name} with the {rows} rows that rank {rank} owns, along dim 2",
                f"shape {tuple(x.shape)}",
                "pass what plan.shard(x, 2) gives",
            )
    lanes = plan.layout.batch_elements
    if lanes > 1 and q.shape[0] != lanes:
        raise FlexCPError(
            f"{lanes} batch elements, since the layout differs between them",
            f"{q.shape[0]}",
            "pass the whole batch",
        )
    for name, grid in plan.grids.items():
        of = grid.planes.of
        matters = (bool((of != of[:1]).any()), bool((of != of[:, :1]).any()))
        for dim, what in enumerate(("batch elements", "query heads")):
            if matters[dim] and of.shape[dim] != q.shape[dim]:
                raise FlexCPError(
                    f"{of.shape[dim]} {what}, between which the mask {name!r} differs",
                    f"{q.shape[dim]}",
                    "make the plan with batch= and num_heads= of the tensors",
                )


@dataclass(frozen=True, eq=False)
class Saved:
    """What the backward pass needs of the forward pass."""

    q: Tensor
    """[B, H, L, D], as the kernel got it: after the swap of rows for heads, if there is one."""
    k: Tensor
    v: Tensor
    part: Tensor
    """[B, H, L, Dv] The result for these rows and heads; the output itself without a swap."""
    part_lse: Tensor
    out: Tensor
    """[B, H, L, Dv] The output."""
    lse: Tensor
    sinks: Tensor | None
    kept: Kept | None
    """K and V of other ranks, if the schedule keeps them."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor], sinks: Tensor | None, kept: Kept | None) -> Saved:
        """From what `tensors` gave."""
        q, k, v, part, part_lse, out, lse = tensors
        return cls(q, k, v, part, part_lse, out, lse, sinks, kept)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All but the sinks and what is kept."""
        return self.q, self.k, self.v, self.part, self.part_lse, self.out, self.lse


def forward_pass(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Saved:
    """This rank's output (`out`, `lse`), and all that its gradient needs."""
    swap = call.swap
    inner = (q, k, v)
    if swap is not None:
        kv = swap.to_heads(torch.cat([k, v], dim=-1), kv=True)
        kv = swap.own_keys(kv)
        inner = (swap.to_heads(q), kv[..., : k.shape[3]], kv[..., k.shape[3] :])
    with torch.autocast(q.device.type, enabled=False):
        part, part_lse, kept = run_forward(
            call.program("forward"), call.transport, call.kernel, *inner, call.mask
        )
    dtype = q.dtype
    out, lse = part, part_lse
    if swap is not None:
        out = swap.to_rows(part.to(dtype)).to(part.dtype)
        lse = swap.to_rows(part_lse)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
        if swap is not None:
            own = swap.heads[swap.place].q
            part, part_lse = add_sinks(part, part_lse, sinks[own.start : own.stop])
        else:
            part, part_lse = out, lse
    out = out.to(dtype)
    part = out if swap is None else part.to(dtype)
    keeps = call.plan.schedules[call.mask].keeps_kv
    return Saved(*inner, part, part_lse, out, lse, sinks, kept if keeps else None)


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of what attention was given."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    captured: list[Tensor]
    """Of each tensor that the score function captures."""


def backward_pass(
    call: Call, saved: Saved, grad_out: Tensor | None, grad_lse: Tensor | None
) -> Gradients:
    """Gradients of this rank's own rows, from those of its output."""
    q, k, v, out, lse, swap = saved.q, saved.k, saved.v, saved.out, saved.lse, call.swap
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out.to(out.dtype)
    if grad_lse is not None:
        dtype = accumulation_dtype(q.dtype)
        grad_lse = grad_lse.to(dtype).masked_fill(lse == -torch.inf, 0.0)
    grad_sinks = None
    if saved.sinks is not None:
        grad_sinks = sinks_gradient(saved.sinks, grad_out, grad_lse, out, lse)
    if swap is not None:
        grad_out = swap.to_heads(grad_out)
        grad_lse = None if grad_lse is None else swap.to_heads(grad_lse)
    with torch.autocast(q.device.type, enabled=False):
        grad_q, grad_k, grad_v, captured = run_backward(
            call.program("backward"),
            call.transport,
            call.kernel,
            grad_out,
            grad_lse,
            q,
            k,
            v,
            saved.part,
            saved.part_lse,
            saved.kept,
            call.mask,
        )
    if swap is not None:
        own = len(swap.heads[swap.place].kv)
        both = swap.own_keys_gradient(torch.cat([grad_k, grad_v], dim=-1), own)
        both = swap.to_rows(both.to(k.dtype), kv=True)
        grad_k, grad_v = both[..., : k.shape[3]], both[..., k.shape[3] :]
        grad_q = swap.to_rows(grad_q.to(q.dtype))
    grad_q, grad_k, grad_v = (x.to(q.dtype) for x in (grad_q, grad_k, grad_v))
    return Gradients(grad_q, grad_k, grad_v, grad_sinks, captured)
