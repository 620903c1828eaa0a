"""Attention over a sequence that is sharded as a plan says: the one entry, and its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from flexcp.comm import Transport
from flexcp.eager import planning
from flexcp.errors import FlexCPError
from flexcp.kernels.merge import add_sinks, sinks_gradient
from flexcp.kernels.reference import accumulation_dtype
from flexcp.kernels.registry import choose
from flexcp.kernels.score import ScoreFunction, ScoreMod, examine
from flexcp.plan import Plan
from flexcp.runtime.agreement import agree
from flexcp.runtime.checks import check_sinks, check_tensors
from flexcp.runtime.executor import Kernel, run_backward, run_forward
from flexcp.runtime.rank_program import RankProgram, rank_program
from flexcp.runtime.swap import Swap


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    mask: str | None = None,
    score_mod: ScoreFunction | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of this rank's queries over the whole sequence, with gradients.

    Every rank calls it with its own rows, as `plan.shard` gives them. Gradients of k and v are
    complete on the rank that owns them. Gradients of `sinks` and of tensors that `score_mod`
    captures are those of this rank's queries: sum them over ranks, as for any parameter.

    Args:
        q: [B, H, L, D], the rows of `plan.positions()`.
        k: [B, G, L, D], likewise; H must be a multiple of G.
        v: [B, G, L, Dv], likewise.
        plan: What `make_plan` returned, with a mesh.
        mask: The name of the mask, if the plan was made for several.
        score_mod: A function of (score, b, h, q_idx, kv_idx), which sees global positions.
        scale: Factor on the scores; 1 / sqrt(D) by default.
        sinks: [H] logits that join each row's denominator.
        return_lse: Whether to return lse [B, H, L] as well; gradients flow through it.

    >>> import flexcp
    >>> from flexcp.testing import simulate
    >>> def rank(mesh):
    ...     plan = flexcp.make_plan(flexcp.masks.causal(), 10, mesh, num_heads=2, head_dim=4)
    ...     x = torch.ones(1, 2, 10, 4)
    ...     out = attention(*(plan.shard(x, 2) for _ in range(3)), plan)
    ...     return plan.unshard(out, 2)
    >>> torch.allclose(simulate(rank, 3)[0], torch.ones(1, 2, 10, 4))
    True
    """
    if has_torch_function_variadic(q, k, v):
        return handle_torch_function(
            attention,
            (q, k, v),
            q,
            k,
            v,
            plan,
            mask=mask,
            score_mod=score_mod,
            scale=scale,
            sinks=sinks,
            return_lse=return_lse,
        )
    check_tensors(q, k, v, True)
    if sinks is not None:
        check_sinks(sinks, q)
    call = _prepare(q, k, v, plan, mask, score_mod, scale, sinks)
    captured = () if call.kernel.score_mods[0] is None else call.kernel.score_mods[0].captured
    out, lse = _ParallelAttention.apply(call, q, k, v, sinks, *captured)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


@dataclass(frozen=True, eq=False)
class _Call:
    """Everything about a call that is not a differentiable tensor."""

    plan: Plan
    mask: str
    transport: Transport
    rank: int
    swap: Swap | None
    kernel: Kernel

    def program(self, direction: Literal["forward", "backward"]) -> RankProgram:
        """This rank's program, worked out once per plan."""
        kept: dict[tuple[str, str], RankProgram] = vars(self.plan).setdefault("_programs", {})
        key = (self.mask, direction)
        if key not in kept:
            schedule, grid = self.plan.schedules[self.mask], self.plan.grids[self.mask]
            kept[key] = _rank_program(schedule, grid, self.rank, direction)
        return kept[key]

    @property
    def label(self) -> str:
        """What to call it in errors."""
        return f"attention under mask {self.mask!r}" if self.mask else "attention"


_rank_program = planning(rank_program)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    mask: str | None,
    score_mod: ScoreFunction | None,
    scale: float | None,
    sinks: Tensor | None,
) -> _Call:
    name = plan.mask_name(mask)
    transport, rank = transport_of(plan)
    _check_rows(q, k, plan, rank)
    schedule = plan.schedules[name]
    planned = (plan.shape.num_heads, plan.shape.num_kv_heads)
    if schedule.inner > 1 and planned != (q.shape[1], k.shape[1]):
        raise FlexCPError(
            f"{planned[0]} query heads and {planned[1]} kv heads, which the plan splits over ranks",
            f"{q.shape[1]} and {k.shape[1]}",
            "make the plan with num_heads= and num_kv_heads= of the tensors",
        )
    agree(transport, plan, name, q, k, v, scale, score_mod is not None, sinks is not None)
    swap = Swap.of(schedule, rank, transport, q.shape[1], k.shape[1])
    first_head = 0 if swap is None else swap.heads[swap.place].q.start
    mods: tuple[ScoreMod | None, ...] = (None,)
    if score_mod is not None:
        dtype = accumulation_dtype(q.dtype)
        mods = tuple(
            examine(_shifted(score_mod, b, first_head), dtype, q.device)
            for b in range(schedule.groups.lanes)
        )
    choice = choose(q, v, score_mod=score_mod is not None, kernel=_kernel(q, score_mod))
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return _Call(plan, name, transport, rank, swap, Kernel(factor, choice.fused, mods))


def _kernel(q: Tensor, score_mod: ScoreFunction | None) -> str | None:
    """Partial results need a kernel that returns them: compiled FlexAttention is no such."""
    if q.device.type == "cuda":
        return "flash" if score_mod is None else "scored"
    return None


def _shifted(function: ScoreFunction, b: int, h: int) -> ScoreFunction:
    """A score function that is called with a part of the batch and heads, counted from 0."""
    if b == 0 and h == 0:
        return function

    def shifted(score: Tensor, b_: Tensor, h_: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return function(score, b_ + b, h_ + h, q_idx, kv_idx)

    return shifted


def transport_of(plan: Plan) -> tuple[Transport, int]:
    """How this rank reaches the others, and which one it is."""
    ranks = plan.ranks
    if ranks.rank is None or ranks.transport is None:
        raise FlexCPError(
            "a plan that was made with a mesh",
            f"one for {ranks.size} ranks that was made from numbers",
            "call flexcp.make_plan with a DeviceMesh, or with the mesh that testing.simulate gives",
        )
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
    lanes = plan.layout.lanes
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


class _ParallelAttention(torch.autograd.Function):
    """(call, q, k, v, sinks, *captured) -> (out, lse)."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *captured: Tensor,
    ) -> tuple[Tensor, Tensor]:
        swap = call.swap
        program = call.program("forward")
        inner = (q, k, v)
        if swap is not None:
            kv = swap.to_heads(torch.cat([k, v], dim=-1), kv=True)
            kv = swap.own_keys(kv)
            inner = (swap.to_heads(q), kv[..., : k.shape[3]], kv[..., k.shape[3] :])
        with torch.autocast(q.device.type, enabled=False):
            part, part_lse, kept = run_forward(
                program, call.transport, call.kernel, *inner, call.label
            )
        dtype = q.dtype
        out, lse = part, part_lse
        if swap is not None:
            out = swap.to_rows(part.to(dtype)).to(part.dtype)
            lse = swap.to_rows(part_lse)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
            if swap is not None:
                part, part_lse = add_sinks(part, part_lse, _own_heads(sinks, swap))
            else:
                part, part_lse = out, lse
        out = out.to(dtype)
        ctx.call, ctx.captured = call, captured
        ctx.kept = kept if call.plan.schedules[call.mask].keeps_kv else None
        ctx.has_sinks = sinks is not None
        saved = [*inner, part.to(dtype) if swap is not None else out, part_lse, out, lse]
        ctx.save_for_backward(*saved, *([sinks] if sinks is not None else []))
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        q, k, v, part, part_lse, out, lse, *rest = ctx.saved_tensors
        swap = call.swap
        dtype = accumulation_dtype(q.dtype)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.to(out.dtype)
        if grad_lse is not None:
            grad_lse = grad_lse.to(dtype).masked_fill(lse == -torch.inf, 0.0)
        grad_sinks = sinks_gradient(rest[0], grad_out, grad_lse, out, lse) if rest else None
        inner_out, inner_lse = grad_out, grad_lse
        if swap is not None:
            inner_out = swap.to_heads(grad_out)
            inner_lse = None if grad_lse is None else swap.to_heads(grad_lse)
        with torch.autocast(q.device.type, enabled=False):
            grad_q, grad_k, grad_v, captured = run_backward(
                call.program("backward"),
                call.transport,
                call.kernel,
                inner_out,
                inner_lse,
                q,
                k,
                v,
                part,
                part_lse,
                ctx.kept,
                call.label,
            )
        if swap is not None:
            own = len(swap.heads[swap.place].kv)
            both = swap.own_keys_gradient(torch.cat([grad_k, grad_v], dim=-1), own)
            both = swap.to_rows(both.to(k.dtype), kv=True)
            grad_k, grad_v = both[..., : k.shape[3]], both[..., k.shape[3] :]
            grad_q = swap.to_rows(grad_q.to(q.dtype))
        gradients = (x.to(q.dtype) for x in (grad_q, grad_k, grad_v))
        return (None, *gradients, grad_sinks, *captured)


def _own_heads(sinks: Tensor, swap: Swap) -> Tensor:
    own = swap.heads[swap.place].q
    return sinks[own.start : own.stop]
