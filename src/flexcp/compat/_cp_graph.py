"""Attention over a sharded sequence as an op of compiled graphs.

How the sequence is sharded is asked when the graph runs, as outside of one: a graph that was
compiled in one context runs in the next, whatever its layout is. So what is kept for the backward
pass has other sizes from call to call, and travels as a handle (see `flexcp.graph_handles`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexcp.compat._cp_layout import group_of
from flexcp.compat._cp_plan import plan_for
from flexcp.compat._cp_transport import CollectiveTransport, compare_backward_passes
from flexcp.graph_handles import constant_handle, owner_of
from flexcp.kernels.merge import accumulation_dtype
from flexcp.ops.interface import OutputGradients, Saved
from flexcp.ops.sharded import ShardedAttention, sharded_op, tell_ranks_on_error


class Answering(Protocol):
    """Whom a graph asks to answer calls of attention."""

    mesh: DeviceMesh
    answered: list[str]


@dataclass(frozen=True, eq=False)
class _ShardedCall:
    """A call that has run forward."""

    op: ShardedAttention
    kept: Sequence[Tensor]
    """What its gradient needs beyond inputs and outputs."""
    step: tuple[CollectiveTransport, int] | None
    """Where ranks compare which backward pass they run, and which it is."""


@torch.library.custom_op("flexcp::sharded_sdpa", mutates_args=())
def graph_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: Tensor,
    is_causal: bool,
    scale: float | None,
    gradients: bool,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and a handle of the call, for its backward pass.

    Args:
        q: [B, H, L, D] This rank's queries.
        k: [B, G, L, D]
        v: [B, G, L, Dv]
        handle: Of the one who answers.
        is_causal: Whether keys after a query are hidden.
        scale: Factor on the scores; 1 / sqrt(D) by default.
        gradients: Whether a backward pass will follow.
        dropout_p: Share of weights that are dropped.
        seed: int64 [1] Says which, if any are.
    """
    answering = cast(Answering, owner_of(handle, keep=True))
    answering.answered.append("scaled_dot_product_attention")
    plan = plan_for(group_of(answering.mesh), q, k, is_causal, (q, k, v))
    with tell_ranks_on_error(plan):
        op = sharded_op(
            q, k, v, plan, None, None, scale, None, gradients=gradients, dropout_p=dropout_p
        )
    call = op.begin(None if seed is None else int(seed))
    saved = call.forward(q, k, v, None)
    transport, step = plan.ranks.transport, None
    if gradients and isinstance(transport, CollectiveTransport):
        step = (transport, transport.next_backward())
    state = _ShardedCall(op, call.pack(saved) if gradients else (), step)
    return saved.out.contiguous(), saved.lse.contiguous(), constant_handle(state)


@graph_sdpa.register_fake
def _(
    q: Tensor,
    k: Tensor,  # noqa: ARG001
    v: Tensor,
    handle: Tensor,
    is_causal: bool,  # noqa: ARG001
    scale: float | None,  # noqa: ARG001
    gradients: bool,  # noqa: ARG001
    dropout_p: float,  # noqa: ARG001
    seed: Tensor | None,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse, handle.new_empty(())


@torch.library.custom_op("flexcp::sharded_sdpa_backward", mutates_args=())
def _graph_sdpa_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    state = cast(_ShardedCall, owner_of(handle))
    if state.step is not None:
        compare_backward_passes(*state.step, grad.device)
    call = state.op.again(state.kept[0])
    saved = Saved(q, k, v, None, out, lse)
    saved = Saved(q, k, v, None, out, lse, call.unpack(state.kept, saved))
    grads = call.backward(saved, OutputGradients.of(saved, grad, None))
    return grads.q.contiguous(), grads.k.contiguous(), grads.v.contiguous()


@_graph_sdpa_backward.register_fake
def _(
    grad: Tensor,  # noqa: ARG001
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,  # noqa: ARG001
    lse: Tensor,  # noqa: ARG001
    handle: Tensor,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:3], *output)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    return *_graph_sdpa_backward(grad, *ctx.saved_tensors), *[None] * 6


graph_sdpa.register_autograd(_backward, setup_context=_setup_context)
