"""What a call of attention expects of its tensors, and what it says if they are different."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.errors import FlexCPError

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def shape_text(x: object) -> str:
    """What to say of something that should have been a tensor of another shape."""
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def check_gradients(gradients: str) -> None:
    """Raises unless it is known what is done with the gradients of the ranks."""
    if gradients not in ("summed", "averaged"):
        raise FlexCPError(
            'gradients to be "summed" or "averaged"',
            repr(gradients),
            "say what your trainer does with the gradients of the ranks",
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    """Raises unless q, k and v fit each other."""
    tensors = {"query": q, "key": k, "value": v}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise FlexCPError(f"{name} to be a tensor", type(x).__name__, "pass a torch.Tensor")
        if x.is_nested:
            raise FlexCPError(
                f"{name} to be a dense tensor", "a nested tensor", "pad it, or pack it as documents"
            )
        if x.dim() != 4:
            raise FlexCPError(
                f"{name} of shape [batch, heads, length, head dim]",
                f"shape {tuple(x.shape)}",
                "add the missing dimensions with unsqueeze",
            )
        if x.dtype not in FLOATS:
            raise FlexCPError(
                f"{name} of dtype float64, float32, bfloat16 or float16",
                f"{x.dtype}",
                f"convert it: {name}.to(torch.float32)",
            )
    for name, x in (("key", k), ("value", v)):
        if x.dtype != q.dtype:
            raise FlexCPError(
                f"{name} of the query's dtype {q.dtype}", f"{x.dtype}", "convert one of them"
            )
        if x.device != q.device:
            raise FlexCPError(
                f"{name} on the query's device {q.device}", f"{x.device}", "move one of them"
            )
    _check_shapes(q, k, v, enable_gqa)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    if k.shape[-1] != q.shape[-1]:
        raise FlexCPError(
            f"key of the query's head dim {q.shape[-1]}",
            f"{k.shape[-1]}",
            "only the value may have another head dim",
        )
    if k.shape[:3] != v.shape[:3]:
        raise FlexCPError(
            "key and value of the same batch size, heads and length",
            f"shapes {tuple(k.shape)} and {tuple(v.shape)}",
            "every key needs a value",
        )
    if k.shape[0] not in (1, q.shape[0]):
        raise FlexCPError(
            f"key and value of batch size {q.shape[0]}, as the query, or 1",
            f"{k.shape[0]}",
            "expand them to the query's batch size",
        )
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads and not enable_gqa:
        raise FlexCPError(
            f"key and value of {heads} heads, as the query",
            f"{kv_heads}",
            "pass enable_gqa=True if query heads share key heads",
        )
    if kv_heads == 0 or heads % kv_heads:
        raise FlexCPError(
            f"a number of key heads that divides the {heads} query heads",
            f"{kv_heads}",
            "query head h reads key head h // (query heads / key heads)",
        )
    for name, x in (("query", q), ("value", v)):
        if x.shape[-1] == 0:
            raise FlexCPError(f"{name} of head dim 1 or more", "0", "drop the call")


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Raises unless there is one floating-point sink per query head, where the query is."""
    if sinks.shape != (q.shape[1],):
        raise FlexCPError(
            f"sinks of shape ({q.shape[1]},): one logit per query head",
            f"shape {tuple(sinks.shape)}",
            "sinks are per query head, also with shared key heads",
        )
    if sinks.dtype not in FLOATS:
        raise FlexCPError("sinks of a floating-point dtype", f"{sinks.dtype}", "convert them")
    if sinks.device != q.device:
        raise FlexCPError(f"sinks on the query's device {q.device}", f"{sinks.device}", "move them")


def check_mask_size(
    q: Tensor, k: Tensor, *, q_len: int, kv_len: int, batch: int, heads: int
) -> None:
    """Raises unless a block mask was made for tensors like these."""
    if (q_len, kv_len) != (q.shape[2], k.shape[2]):
        raise FlexCPError(
            f"a block_mask for q_len={q.shape[2]} and kv_len={k.shape[2]}, as the tensors are",
            f"one made for q_len={q_len} and kv_len={kv_len}",
            "build it for these lengths; it is not cropped or padded",
        )
    for name, have, want in (("batch", batch, q.shape[0]), ("heads", heads, q.shape[1])):
        if have not in (1, want):
            raise FlexCPError(
                f"a block_mask for {name}={want}, as the query, or {name}=1",
                f"{name}={have}",
                f"build it with {name}={want}",
            )
