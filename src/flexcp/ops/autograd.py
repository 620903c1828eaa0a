"""THE autograd function of attention, around any `AttentionOp`: scores are computed again."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.ops.interface import AttentionOp, OutputGradients, Saved
from flexcp.torch_names import transforms_are_on


def differentiable(
    op: AttentionOp, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, ...]:
    """out, lse and the op's extras; gradients flow through the first two."""
    # What `torch.func` needs makes torch look up the function's signature in every call.
    transformed = transforms_are_on()
    if not torch.is_grad_enabled() and not transformed:
        # No node: calls of a reentrant checkpoint are known by the number of the next one.
        return Attention.forward(op, q, k, v, sinks)
    function = Attention if transformed else _EagerAttention
    captured = () if op.score_mod is None else op.score_mod.captured
    found: tuple[Tensor, ...] = function.apply(op, q, k, v, sinks, *captured)  # type: ignore[no-untyped-call]
    return found


class Attention(torch.autograd.Function):
    """(op, q, k, v, sinks, *captured) -> (out, lse, *extras)."""

    @staticmethod
    def forward(
        op: AttentionOp, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_captured: Tensor
    ) -> tuple[Tensor, ...]:
        """Runs the op; its captured tensors are inputs so that they get gradients."""
        saved = op.forward(q, k, v, sinks)
        return saved.out, saved.lse, *saved.extras

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps the inputs and outputs; no scores."""
        op, q, k, v, sinks, *captured = inputs
        ctx.op, ctx.has_sinks, ctx.outputs = op, sinks is not None, len(output)
        ctx.set_materialize_grads(False)
        if len(output) > 2:
            ctx.mark_non_differentiable(*output[2:])
        given = () if op.replaces_inputs else (q, k, v)
        # Captured tensors are kept for torch to notice if they are changed in place.
        mod = None if transforms_are_on() else op.score_mod
        constants = () if mod is None else mod.constants
        own = (sinks,) if ctx.has_sinks else ()
        ctx.save_for_backward(*output, *given, *own, *captured, *constants)

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, sinks and the captured tensors."""
        tensors = ctx.saved_tensors  # once: a checkpoint gives them only once
        given = (ctx.op, ctx.outputs, ctx.has_sinks, grad_out, grad_lse, *tensors)
        grads: tuple[Tensor | None, ...]
        if torch.is_grad_enabled() or transforms_are_on():
            grads = AttentionGradients.apply(*given)  # type: ignore[no-untyped-call]
        else:
            grads = AttentionGradients.forward(*given)
        return (None, *grads)


class _EagerAttention(torch.autograd.Function):
    """`Attention`, where no transform of `torch.func` is active."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """Runs the op, and keeps what its gradient needs."""
        output = Attention.forward(*inputs)
        Attention.setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, sinks and the captured tensors."""
        return Attention.backward(ctx, *grads)


class AttentionGradients(torch.autograd.Function):
    """The backward pass as a function of its own.

    `torch.func` hands it plain tensors this way, and its own derivative can be refused.
    """

    @staticmethod
    def forward(
        op: AttentionOp,
        outputs: int,
        has_sinks: bool,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Runs the op's backward pass on what `Attention.setup_context` kept."""
        out, lse, *extras = tensors[:outputs]
        given = list(tensors[outputs:])
        q, k, v = extras[:3] if op.replaces_inputs else (given.pop(0) for _ in range(3))
        sinks = given.pop(0) if has_sinks else None
        saved = Saved(q, k, v, sinks, out, lse, tuple(extras))
        found = op.backward(saved, OutputGradients.of(saved, grad_out, grad_lse))
        return (found.q, found.k, found.v, found.sinks, *found.captured)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        """Keeps what to call it in errors."""
        ctx.name = inputs[0].name

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:  # noqa: ARG004
        """There is no second derivative."""
        raise FlexCPError(
            f"first derivatives of {ctx.name}",
            "a derivative of its gradients",
            'ask flexcp.flex_attention for the kernel "reference", which torch differentiates any '
            "number of times, in one process",
        )
