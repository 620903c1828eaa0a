"""Attention inside torch.compile: one opaque op in the graph, planned and run as outside of it.

An op takes tensors, so a mask travels as its handle (see `flexcp.graph_handles`), and another mask
runs in the same graph. A BlockMask that torch made has no handle, nor does a plain function: those
travel as numbers, and dynamo guards on their identity, so that another one compiles another graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.graph_handles import owner_of
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.merge import accumulation_dtype
from flexcp.kernels.registry import choose
from flexcp.masks import Mask
from flexcp.ops.autograd import Call, run_backward, run_forward
from flexcp.ops.mask_cache import MaskLike, compiled_shapes_for

# Compiled graphs refer to these for as long as the process lives.
_constants: list[object] = []
_NO_MASK = -1
_HANDLE = -2


def _number_of(mask: object) -> int:
    if isinstance(mask, Mask) and "mask_mod" not in vars(mask):
        raise FlexCPError(
            "a mask that exists before the compiled function is called",
            "one that is made inside of it",
            "make it outside and pass it in; it may be another one at every call",
        )
    for number, known in enumerate(_constants):
        if known is mask:
            return number
    _constants.append(mask)
    return len(_constants) - 1


# What `torch._dynamo.assume_constant_result` does, without importing dynamo.
_number_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def compiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: MaskLike | None,
    scale: float,
    sinks: Tensor | None,
    wants_max: bool,
    kernel: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and the largest scores (empty unless wanted), as part of a compiled graph."""
    handle = None if block_mask is None else getattr(block_mask, "graph_handle", None)
    if block_mask is None:
        number = _NO_MASK
    elif handle is not None:
        number = _HANDLE
    else:
        id(block_mask)  # makes dynamo guard on which object it is
        number = _number_of(block_mask)
    found: tuple[Tensor, Tensor, Tensor] = _attention(
        query, key, value, sinks, handle, number, scale, wants_max, kernel
    )
    return found


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: Tensor | None,
    mask: int,
    scale: float,
    wants_max: bool,
    kernel: str | None,
) -> Call:
    block_mask: Any = None
    if mask != _NO_MASK:
        block_mask = _constants[mask] if handle is None else owner_of(handle)
    prepared: CompiledShapes = compiled_shapes_for(block_mask, q, k)
    # Not "flex", the default on CUDA: it would have to be compiled into the graph by itself.
    choice = choose(q, v, max_scores=wants_max, kernel="flash" if kernel is None else kernel)
    return Call(prepared, scale, choice.fused, None, wants_max)


@torch.library.custom_op("flexcp::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    handle: Tensor | None,
    mask: int,
    scale: float,
    wants_max: bool,
    kernel: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    call = _call(q, k, v, handle, mask, scale, wants_max, kernel)
    found = run_forward(call, q, k, v, sinks)
    highest = (
        q.new_empty(0, dtype=found.lse.dtype) if found.max_scores is None else found.max_scores
    )
    return found.out.to(q.dtype).contiguous(), found.lse.contiguous(), highest


@_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,  # noqa: ARG001
    v: Tensor,
    sinks: Tensor | None,  # noqa: ARG001
    handle: Tensor | None,  # noqa: ARG001
    mask: int,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    wants_max: bool,
    kernel: str | None,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(q.dtype)
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    lse = q.new_empty(q.shape[:3], dtype=dtype)
    return out, lse, q.new_empty(q.shape[:3] if wants_max else (0,), dtype=dtype)


@torch.library.custom_op("flexcp::attention_backward", mutates_args=())
def _attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    handle: Tensor | None,
    mask: int,
    scale: float,
    kernel: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _call(q, k, v, handle, mask, scale, False, kernel)
    grads = run_backward(call, grad_out, grad_lse, q, k, v, out, lse, sinks)
    dq, dk, dv, d_sinks = (
        q.new_empty(0) if grad is None else grad.contiguous() for grad in grads[:4]
    )
    return dq, dk, dv, d_sinks


@_attention_backward.register_fake
def _(
    grad_out: Tensor | None,  # noqa: ARG001
    grad_lse: Tensor | None,  # noqa: ARG001
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,  # noqa: ARG001
    lse: Tensor,  # noqa: ARG001
    sinks: Tensor | None,
    handle: Tensor | None,  # noqa: ARG001
    mask: int,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    kernel: str | None,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, sinks, handle, mask, scale, _, kernel = inputs
    out, lse, highest = output
    ctx.mark_non_differentiable(highest)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, sinks, handle)
    ctx.rest = (mask, scale, kernel)


def _backward(ctx: Any, grad_out: Any, grad_lse: Any, _: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, sinks, handle = ctx.saved_tensors
    dq, dk, dv, d_sinks = _attention_backward(
        grad_out, grad_lse, q, k, v, out, lse, sinks, handle, *ctx.rest
    )
    return dq, dk, dv, None if sinks is None else d_sinks, None, None, None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)
