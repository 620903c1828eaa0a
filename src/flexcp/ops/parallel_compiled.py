"""Attention over a plan inside torch.compile: one opaque op in the graph, run as outside of it.

The plan travels as its handle (see `flexcp.graph_handles`), so that the next plan, for the
documents of the next batch say, runs in the same graph. Besides the output the op returns what its
gradient needs: the tensors after the swap of rows for heads, and the rows that the schedule keeps.
Their sizes are numbers of the plan, known while the graph is made.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flexcp.graph_handles import owner_of
from flexcp.kernels.reference import accumulation_dtype
from flexcp.ops.agreement import refusing
from flexcp.ops.executor import Kept
from flexcp.ops.passes import Call, Saved, backward_pass, forward_pass, prepare_call
from flexcp.ops.rows import shape_of_rows
from flexcp.plan import Plan

_Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def compiled_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    mask: str | None,
    scale: float | None,
    sinks: Tensor | None,
    gradients: str,
) -> tuple[Tensor, Tensor]:
    """Out and lse, as part of a compiled graph."""
    name = plan.mask_name(mask)
    plan.require_mesh()
    sizes = plan.sizes[name]
    swapped = [sizes.rows, sizes.q_heads, sizes.kv_heads] if sizes.swaps else []
    # A shape, and not asked whether it is 0: either would tie the graph to the number.
    each = k.shape[1] if not sizes.swaps else sizes.kv_heads
    batch = 1 if plan.layout.batch_elements > 1 else k.shape[0]
    kept = sizes.kept.shape[0] * batch * each * (k.shape[3] + v.shape[3])
    found: _Outputs = _attention(
        q, k, v, sinks, plan.compiler_handle, name, scale, gradients, swapped, kept
    )
    return found[0], found[1]


def _call(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: Tensor, mask: str, scale: Any
) -> Call:
    plan = owner_of(handle)
    assert isinstance(plan, Plan)
    with refusing(plan):
        return prepare_call(q, k, v, plan, mask, None, scale, sinks)


@torch.library.custom_op("flexcp::parallel_attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    handle: Tensor,
    mask: str,
    scale: float | None,
    gradients: str,
    swapped: list[int],  # noqa: ARG001
    kept: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, lse; q, k, v, out and lse after the swap, if there is one; rows that are kept."""
    call = _call(q, k, v, sinks, handle, mask, scale)
    call.agree(gradients)
    saved = forward_pass(call, q, k, v, sinks)
    inner = [q.new_empty(0) for _ in range(4)] + [saved.lse.new_empty(0)]
    if call.swap is not None:
        inner = [saved.q, saved.k, saved.v, saved.part, saved.part_lse]
    a, b, c, d, e = (x.contiguous() for x in inner)
    rows = q.new_empty(0)
    if saved.kept is not None:
        rows = torch.cat([x.flatten() for x in saved.kept.batches[1:] if x is not None])
    assert rows.numel() == kept, "the graph was compiled for another plan"
    return saved.out.contiguous(), saved.lse.contiguous(), a, b, c, d, e, rows


@_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,  # noqa: ARG001
    handle: Tensor,  # noqa: ARG001
    mask: str,  # noqa: ARG001
    scale: float | None,  # noqa: ARG001
    gradients: str,  # noqa: ARG001
    swapped: list[int],
    kept: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(q.dtype)
    batch, d, dv = q.shape[0], k.shape[3], v.shape[3]
    shapes: list[tuple[Any, ...]] = [(0,)] * 5
    if swapped:
        rows, heads, kv_heads = swapped
        q_shape = (batch, heads, rows, d)
        shapes = [
            q_shape,
            (batch, kv_heads, rows, d),
            (batch, kv_heads, rows, dv),
            (*q_shape[:3], dv),
            q_shape[:3],
        ]
    return (
        q.new_empty((*q.shape[:3], dv)),
        q.new_empty(q.shape[:3], dtype=dtype),
        q.new_empty(shapes[0]),
        q.new_empty(shapes[1]),
        q.new_empty(shapes[2]),
        q.new_empty(shapes[3]),
        q.new_empty(shapes[4], dtype=dtype),
        q.new_empty(kept),
    )


@torch.library.custom_op("flexcp::parallel_attention_backward", mutates_args=())
def _attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    handle: Tensor,
    saved: list[Tensor],
    mask: str,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _call(q, k, v, sinks, handle, mask, scale)
    out, lse, *inner, rows = saved
    if call.swap is None:
        inner = [q, k, v, out, lse]
    kept = _kept(call, rows, inner[1], inner[2])
    found = backward_pass(call, Saved.of([*inner, out, lse], sinks, kept), grad_out, grad_lse)
    grad_sinks = q.new_empty(0) if found.sinks is None else found.sinks.contiguous()
    return found.q.contiguous(), found.k.contiguous(), found.v.contiguous(), grad_sinks


def _kept(call: Call, flat: Tensor, k: Tensor, v: Tensor) -> Kept | None:
    """The rows of each round, out of one tensor."""
    if not call.plan.schedules[call.mask].keeps_kv:
        return None
    program = call.program("forward")
    counts = [sum(m.rows for m in round_.receives) for round_ in program.rounds]
    shapes = [shape_of_rows(k, v, rows, program.by_element) for rows in counts]
    parts = flat.split([math.prod(shape) for shape in shapes])
    return Kept([None, *(x.view(s) for x, s in zip(parts, shapes, strict=True))])


@_attention_backward.register_fake
def _(
    grad_out: Tensor | None,  # noqa: ARG001
    grad_lse: Tensor | None,  # noqa: ARG001
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    handle: Tensor,  # noqa: ARG001
    saved: list[Tensor],  # noqa: ARG001
    mask: str,  # noqa: ARG001
    scale: float | None,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, sinks, handle, mask, scale, *_ = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sinks, handle, *output)
    ctx.rest = (mask, scale)


def _backward(ctx: Any, grad_out: Any, grad_lse: Any, *_: Any) -> tuple[Any, ...]:
    q, k, v, sinks, handle, *saved = ctx.saved_tensors
    dq, dk, dv, d_sinks = _attention_backward(
        grad_out, grad_lse, q, k, v, sinks, handle, saved, *ctx.rest
    )
    return dq, dk, dv, None if sinks is None else d_sinks, None, None, None, None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)
