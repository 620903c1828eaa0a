"""PyTorch's own ring attention, to compare with; on CPU its templates, with the fused CPU ops.

PyTorch's context parallelism refuses CPU tensors, but the loops underneath it take any attention
op. Two thin functions adapt the CPU ops: the templates pass everything by keyword, and expect a
contiguous logsumexp. Nothing else is changed: rotation, load balancing (head-tail, for causal) and
merging are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

ROTATIONS = ("alltoall", "allgather")
"""How K and V go round."""


def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, is_causal)
    return out, lse.contiguous()


def _backward(
    *, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
    logsumexp: Tensor, is_causal: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found: tuple[Tensor, ...] = op(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)
    return found


@contextmanager
def _options(rotation: str, causal: bool) -> Iterator[None]:
    """PyTorch's settings of its ring, put back afterwards."""
    options: Any = torchs._cp_options
    before = options.enable_load_balance, options.rotate_method
    torchs.set_rotate_method(rotation)
    options.enable_load_balance = causal
    try:
        yield
    finally:
        options.enable_load_balance, options.rotate_method = before


def ring_passes(
    rotation: str,
    *,
    causal: bool,
    forward: Callable[..., tuple[Tensor, Tensor]] = _forward,
    backward: Callable[..., tuple[Tensor, ...]] = _backward,
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, ...]]]:
    """(q, k, v) -> (output, lse), and (gradient, q, k, v, output, lse) -> (dq, dk, dv)."""
    group: Any = dist.group.WORLD

    def run_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with _options(rotation, causal):
            out, lse = torchs._templated_ring_attention(
                group, 2, forward, q, k, v, is_causal=causal
            )
        return out, lse

    def run_backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        with _options(rotation, causal):
            grads = torchs._templated_ring_attention_backward(
                group, 2, backward, grad, "grad_out", q, k, v, out, lse, is_causal=causal
            )
        return tuple(grads[:3])

    return run_forward, run_backward


def ring_attention(
    rotation: str, *, causal: bool, mesh: Any = None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    """(q, k, v, gradient of the output) of this rank -> (output, dq, dk, dv).

    On a GPU it is PyTorch's own pair of functions, over the ranks of `mesh`.
    """
    if mesh is not None and mesh.device_type == "cuda":
        return _ring_on_gpus(rotation, causal, mesh)
    forward, backward = ring_passes(rotation, causal=causal)

    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        out, lse = forward(q, k, v)
        return out, *backward(grad, q, k, v, out, lse)

    return run


def _ring_on_gpus(
    rotation: str, causal: bool, mesh: Any
) -> Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        with _options(rotation, causal):
            found: tuple[Any, ...] = torchs._scaled_dot_product_ring_flash_attention(
                mesh, q, k, v, 0.0, causal
            )
            out, lse, cum_q, cum_k, most_q, most_k, seed, offset = found[:8]
            grads = torchs._scaled_dot_product_ring_flash_attention_backward(
                mesh, grad, q, k, v, out, lse, cum_q, cum_k, most_q, most_k, 0.0, causal, seed,
                offset,
            )  # fmt: skip
        return out, *grads[:3]

    return run


def bytes_received(ranks: int, kv_bytes: int) -> int:
    """What a rank receives, by PyTorch's code and with either rotation.

    In each pass K and V of every other rank, and as many gradients as there are ranks: they go all
    the way round.
    """
    return 2 * (ranks - 1) * kv_bytes + ranks * kv_bytes
