"""Attention over a sequence that is sharded as a plan says: the one entry, and its gradient."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.kernels.score import ScoreFunction
from flexcp.ops.agreement import refusing
from flexcp.ops.autocast import autocast
from flexcp.ops.checks import check_sinks, check_tensors
from flexcp.ops.executor import Kept
from flexcp.ops.overridable import overridable
from flexcp.ops.parallel_compiled import compiled_parallel_attention
from flexcp.ops.parallel_traced import traced_parallel_attention
from flexcp.ops.passes import Call, Saved, backward_pass, forward_pass, prepare_call
from flexcp.plan import Plan


@overridable
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
    captures are those of what this rank computes: sum them over ranks, as for any parameter.

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
    if torch.compiler.is_compiling():
        q, k, v = _checked(q, k, v, sinks)
        inputs = [x for x in (q, k, v, sinks) if x is not None]
        if score_mod is None:
            out, lse = compiled_parallel_attention(
                q, k, v, plan, mask, scale, sinks, _gradients(inputs)
            )
        else:
            out, lse = traced_parallel_attention(
                q, k, v, plan, mask, score_mod, scale, sinks, _gradients([k, v])
            )
        return (out, lse) if return_lse else out
    with refusing(plan):
        q, k, v = _checked(q, k, v, sinks)
        call = prepare_call(q, k, v, plan, mask, score_mod, scale, sinks)
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    captured = () if call.kernel.score_mods[0] is None else call.kernel.score_mods[0].captured
    call.agree(_gradients([*inputs, *captured]))
    out, lse = _ParallelAttention.apply(call, q, k, v, sinks, *captured)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


def _checked(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors as they are computed with, if they fit together."""
    q, k, v = autocast(q, k, v)
    check_tensors(q, k, v, True)
    if sinks is not None:
        check_sinks(sinks, q)
    return q, k, v


def _gradients(inputs: list[Tensor]) -> str:
    """Whether a backward pass will follow; all ranks have to answer the same."""
    needed = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return "needed" if needed else "not needed"


class _ParallelAttention(torch.autograd.Function):
    """(call, q, k, v, sinks, *captured) -> (out, lse)."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *captured: Tensor,
    ) -> tuple[Tensor, Tensor]:
        saved = forward_pass(call, q, k, v, sinks)
        ctx.call, ctx.captured, ctx.kept = call, captured, saved.kept
        ctx.save_for_backward(*saved.tensors, *(() if sinks is None else (sinks,)))
        ctx.set_materialize_grads(False)
        return saved.out, saved.lse

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved_tensors = ctx.saved_tensors  # once: a checkpoint gives them only once
        grads: tuple[Tensor | None, ...] = _ParallelGradients.apply(  # type: ignore[no-untyped-call]
            ctx.call, ctx.kept, grad_out, grad_lse, *saved_tensors
        )
        return (None, *grads)


class _ParallelGradients(torch.autograd.Function):
    """The backward pass as a function of its own, so that its derivative can be refused."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ARG004
        call: Call,
        kept: Kept | None,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor | None, ...]:
        sinks = tensors[7] if len(tensors) > 7 else None
        found = backward_pass(call, Saved.of(tensors[:7], sinks, kept), grad_out, grad_lse)
        return (found.q, found.k, found.v, found.sinks, *found.captured)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:  # noqa: ARG004
        raise FlexCPError(
            "first derivatives of attention over a plan",
            "a derivative of its gradients",
            'flexcp.flex_attention with the kernel "reference" has them, in one process',
        )
