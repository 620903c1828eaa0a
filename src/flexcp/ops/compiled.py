"""THE pair of custom ops: attention inside torch.compile, run as outside of it.

An op takes tensors, so a mask or a plan travels as its handle (see `flexcp.graph_handles`), and
another one runs in the same graph. A BlockMask that torch made has no handle, nor does a plain
function: the graph keeps one for them as a constant, and dynamo guards on their identity, so that
another one compiles another graph. Besides out and lse the op returns its extras, whose sizes are
numbers of the plan, known while the graph is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexcp.comm import CallLabel
from flexcp.errors import FlexCPError
from flexcp.graph_handles import constant_handle, owner_of, require_compiled_for
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.merge import accumulation_dtype
from flexcp.masks import Mask
from flexcp.ops.interface import AttentionOp, OutputGradients, Saved
from flexcp.ops.local import local_op
from flexcp.ops.mask_cache import MaskLike
from flexcp.ops.rows import SPARE
from flexcp.ops.sharded import ShardedAttention, sharded_op, tell_ranks_on_error
from flexcp.plan import Plan
from flexcp.torch_names import constant_in_graphs


def compiled_local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: Tensor | None,
    scale: float,
    sinks: Tensor | None,
    wants_max: bool,
    kernel: str | None,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and, if wanted, the largest scores of one device, as part of a compiled graph.

    `handle` stands for the mask; None allows every pair.
    """
    out, lse, *extras = _attention(
        q, k, v, sinks, handle, "", scale, False, wants_max, kernel, None, None, dropout_p, seed, 0
    )
    return out, lse, extras[0] if wants_max else None


def handle_of(mask: MaskLike | None) -> Tensor | None:
    """What stands for a mask in the graph that is being compiled."""
    handle: Tensor | None = None if mask is None else getattr(mask, "graph_handle", None)
    if mask is not None and handle is None:
        id(mask)  # makes dynamo guard on which object it is
        (handle,) = _constant_handle(mask)
    return handle


@constant_in_graphs
def _constant_handle(mask: object) -> tuple[Tensor]:
    """The handle in a tuple: dynamo can't tell tensors apart that one function returns."""
    require_made_outside(mask)
    return (constant_handle(mask),)


def require_made_outside(mask: object) -> None:
    """Raises for a Mask that the function being traced has made: it has no fields yet."""
    if isinstance(mask, Mask) and not hasattr(mask, "mask_mod"):
        raise FlexCPError(
            "a mask that exists before the compiled function is called",
            "one that is made inside of it",
            "make it outside and pass it in; it may be another one at every call",
        )


def compiled_sharded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    mask: str | None,
    scale: float | None,
    sinks: Tensor | None,
    gradients: bool,
    kernel: str | None,
    dropout_p: float,
    seed: Tensor | None,
    first_head: int,
    *,
    handle: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Out and lse over a plan, as part of a compiled graph.

    `handle` is another than the plan's own that stands for it.
    """
    name = plan.mask_name(mask)
    plan.require_mesh()
    sizes = plan.sizes[name]
    swapped = [sizes.rows, sizes.q_heads, sizes.kv_heads] if sizes.swaps else None
    # A shape, and not asked whether it is 0: either would tie the graph to the number.
    each = k.shape[1] if not sizes.swaps else sizes.kv_heads
    batch = 1 if plan.layout.batch_elements > 1 else k.shape[0]
    kept = (sizes.kept.shape[0] - 2) * batch * each * (k.shape[3] + v.shape[3]) + SPARE
    handle = plan.graph_handle if handle is None else handle
    out, lse, *_ = _attention(
        q, k, v, sinks, handle, name, scale, gradients, False, kernel, swapped, kept,
        dropout_p, seed, first_head,
    )  # fmt: skip
    return out, lse


def _op_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    handle: Tensor | None,
    mask: str,
    scale: float | None,
    gradients: bool,
    wants_max: bool,
    kernel: str | None,
    dropout_p: float,
    seed: int,
    first_head: int,
) -> AttentionOp | ShardedAttention:
    """The op that a handle stands for."""
    owner: Any = None if handle is None else owner_of(handle, keep=True)
    if isinstance(owner, Plan):
        with tell_ranks_on_error(owner):
            return sharded_op(
                q, k, v, owner, mask, None, scale, sinks, gradients=gradients, kernel=kernel,
                dropout_p=dropout_p, first_head=first_head,
            )  # fmt: skip
    assert scale is not None
    dropout = Dropout(dropout_p, seed) if dropout_p else None
    return local_op(
        q, k, v, owner, scale=scale, max_scores=wants_max, kernel=kernel, dropout=dropout
    )


@torch.library.custom_op("flexcp::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    handle: Tensor | None,
    mask: str,
    scale: float | None,
    gradients: bool,
    wants_max: bool,
    kernel: str | None,
    swapped: list[int] | None,  # noqa: ARG001
    kept: int | None,
    dropout_p: float,
    seed: Tensor | None,
    first_head: int,
) -> list[Tensor]:
    """out, lse, and the op's extras, packed.

    `swapped` has rows, query heads and kv heads after a swap of rows for heads, if there is one;
    `kept` is how many elements of K and V are kept, spare ones included; None on one device.
    `seed` is an int64 [1] on the host, if weights are dropped.
    """
    number = 0 if seed is None else int(seed)
    found = _op_of(
        q, k, v, sinks, handle, mask, scale, gradients, wants_max, kernel, dropout_p, number,
        first_head,
    )  # fmt: skip
    op: AttentionOp = found.begin(number) if isinstance(found, ShardedAttention) else found
    saved = op.forward(q, k, v, sinks)
    packed = op.pack(saved)
    if kept is not None:
        require_compiled_for("kept elements of K and V", kept, packed[-1].numel())
    return [saved.out.contiguous(), saved.lse.contiguous(), *packed]


@_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,  # noqa: ARG001
    handle: Tensor | None,  # noqa: ARG001
    mask: str,  # noqa: ARG001
    scale: float | None,  # noqa: ARG001
    gradients: bool,  # noqa: ARG001
    wants_max: bool,
    kernel: str | None,  # noqa: ARG001
    swapped: list[int] | None,
    kept: int | None,
    dropout_p: float,  # noqa: ARG001
    seed: Tensor | None,  # noqa: ARG001
    first_head: int,  # noqa: ARG001
) -> list[Tensor]:
    dtype = accumulation_dtype(q.dtype)
    batch, d, dv = q.shape[0], k.shape[3], v.shape[3]
    found = [q.new_empty((*q.shape[:3], dv)), q.new_empty(q.shape[:3], dtype=dtype)]
    if wants_max:
        found.append(q.new_empty(q.shape[:3], dtype=dtype))
    if kept is not None:
        found.append(torch.empty(CallLabel.WORDS, dtype=torch.int64))
    if swapped is not None:
        rows, heads, kv_heads = swapped
        found += [
            q.new_empty((batch, heads, rows, d)),
            q.new_empty((batch, kv_heads, rows, d)),
            q.new_empty((batch, kv_heads, rows, dv)),
            q.new_empty((batch, heads, rows, dv)),
            q.new_empty((batch, heads, rows), dtype=dtype),
        ]
    if kept is not None:
        found.append(q.new_empty(kept))
    return found


@torch.library.custom_op("flexcp::attention_backward", mutates_args=())
def _attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    handle: Tensor | None,
    outputs: list[Tensor],
    mask: str,
    scale: float | None,
    kernel: str | None,
    dropout_p: float,
    seed: Tensor | None,
    first_head: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    number = 0 if seed is None else int(seed)
    found = _op_of(
        q, k, v, sinks, handle, mask, scale, True, False, kernel, dropout_p, number, first_head
    )
    out, lse, *packed = outputs
    op: AttentionOp = found.again(packed[0]) if isinstance(found, ShardedAttention) else found
    saved = Saved(q, k, v, sinks, out, lse)
    saved = Saved(q, k, v, sinks, out, lse, op.unpack(packed, saved))
    grads = op.backward(saved, OutputGradients.of(saved, grad_out, grad_lse))
    grad_sinks = q.new_empty(0) if grads.sinks is None else grads.sinks.contiguous()
    return grads.q.contiguous(), grads.k.contiguous(), grads.v.contiguous(), grad_sinks


@_attention_backward.register_fake
def _(
    grad_out: Tensor | None,  # noqa: ARG001
    grad_lse: Tensor | None,  # noqa: ARG001
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    handle: Tensor | None,  # noqa: ARG001
    outputs: list[Tensor],  # noqa: ARG001
    mask: str,  # noqa: ARG001
    scale: float | None,  # noqa: ARG001
    kernel: str | None,  # noqa: ARG001
    dropout_p: float,  # noqa: ARG001
    seed: Tensor | None,  # noqa: ARG001
    first_head: int,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, sinks, handle, mask, scale, _, _, kernel, _, _, dropout_p, seed, first_head = inputs
    if len(output) > 2:
        ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sinks, handle, seed, *output)
    ctx.rest = (mask, scale, kernel, dropout_p)
    ctx.first_head = first_head


def _backward(ctx: Any, grads: Any) -> tuple[Any, ...]:
    q, k, v, sinks, handle, seed, *outputs = ctx.saved_tensors
    dq, dk, dv, d_sinks = _attention_backward(
        grads[0], grads[1], q, k, v, sinks, handle, outputs, *ctx.rest, seed, ctx.first_head
    )
    return dq, dk, dv, None if sinks is None else d_sinks, *[None] * 11


_attention.register_autograd(_backward, setup_context=_setup_context)
