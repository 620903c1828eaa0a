"""The autograd boundary: one function whose backward pass computes scores again, in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.kernels import flash
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.fused import FusedOp
from flexcp.kernels.interface import Partial
from flexcp.kernels.merge import accumulation_dtype, add_sinks, sinks_gradient
from flexcp.kernels.score import ScoreMod


@dataclass(frozen=True, eq=False)
class Call:
    """Everything about an attention call that is not a differentiable tensor."""

    prepared: CompiledShapes
    scale: float
    fused: FusedOp | None
    score_mod: ScoreMod | None
    max_scores: bool


class Attention(torch.autograd.Function):
    """(call, q, k, v, sinks, *captured) -> (out, lse, max_scores)."""

    @staticmethod
    def forward(
        call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_captured: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Runs the kernel and joins the sinks."""
        result = run_forward(call, q, k, v, sinks)
        highest = result.max_scores
        return (
            result.out.to(q.dtype),
            result.lse,
            q.new_empty(0, dtype=result.lse.dtype) if highest is None else highest,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps the inputs, out and lse; no scores."""
        call, q, k, v, sinks, *captured = inputs
        out, lse, highest = output
        ctx.call = call
        ctx.has_sinks = sinks is not None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(highest)
        kept = (q, k, v, out, lse, *((sinks,) if ctx.has_sinks else ()), *captured)
        ctx.save_for_backward(*kept)

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _grad_max: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, sinks and the captured tensors."""
        q, k, v, out, lse, *rest = ctx.saved_tensors
        sinks = rest.pop(0) if ctx.has_sinks else None
        grads: tuple[Tensor | None, ...] = AttentionGradients.apply(  # type: ignore[no-untyped-call]
            ctx.call, grad_out, grad_lse, q, k, v, out, lse, sinks
        )
        return (None, *grads)


class AttentionGradients(torch.autograd.Function):
    """The backward pass as a function of its own: `torch.func` hands it plain tensors this way."""

    @staticmethod
    def forward(call: Call, *tensors: Any) -> tuple[Tensor | None, ...]:
        """See `run_backward`."""
        return run_backward(call, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:  # noqa: ARG004
        """There is no second derivative."""
        raise FlexCPError(
            "first derivatives of attention",
            "a derivative of its gradients",
            'ask for the kernel "reference", which torch differentiates any number of times',
        )


def run_forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Partial:
    """The result over all keys, sinks included, in the accumulation type."""
    with torch.autocast(q.device.type, enabled=False):
        found = flash.forward(
            q,
            k,
            v,
            call.prepared,
            scale=call.scale,
            fused=call.fused,
            score_mod=call.score_mod,
            max_scores=call.max_scores,
        )
        if sinks is None:
            return found
        out, lse = add_sinks(found.out, found.lse, sinks)
        return Partial(out, lse, found.max_scores)


def run_backward(
    call: Call,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, sinks (None without) and each captured tensor."""
    dtype = accumulation_dtype(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        if grad_lse is not None:
            grad_lse = grad_lse.to(dtype).masked_fill(lse == -torch.inf, 0.0)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        found = flash.backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse,
            call.prepared,
            scale=call.scale,
            fused=None if grad_lse is not None else call.fused,
            score_mod=call.score_mod,
            grad_lse=grad_lse,
        )
        grad_sinks = None
        if sinks is not None:
            grad_sinks = sinks_gradient(sinks, grad_out, grad_lse, out, lse)
    return (
        found.q.to(q.dtype),
        found.k.to(k.dtype),
        found.v.to(v.dtype),
        grad_sinks,
        *found.captured,
    )
