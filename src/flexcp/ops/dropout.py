"""Seeds of dropout: drawn, and as part of a compiled graph."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.eager import outside_of_transforms, tensors_to_keep
from flexcp.kernels.dropout import Dropout
from flexcp.ops.arguments import Seed

_DRAWN_BELOW = 1 << 62


def drawn_seed() -> int:
    """A seed from the CPU's default generator, which activation checkpointing restores."""
    with outside_of_transforms(), tensors_to_keep():
        return int(torch.randint(_DRAWN_BELOW, (1,), dtype=torch.int64, device="cpu"))


def traced_seed(seed: Seed | None) -> Tensor:
    """int64 [1] A seed as a graph has it: another one runs in the same graph."""
    if seed is None:
        return torch.randint(_DRAWN_BELOW, (1,), dtype=torch.int64, device="cpu")
    if isinstance(seed, Tensor):
        return seed.reshape(1).to(torch.int64)
    return torch.full((1,), seed, dtype=torch.int64, device="cpu")


def traced_kept(dropout: Dropout, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """`dropout.kept` as one op of a graph: a compiler would write it out for each block."""
    assert isinstance(dropout.seed, Tensor)
    kept: Tensor = _kept(
        dropout.seed, dropout.p, b + dropout.first_batch, h + dropout.first_head, q, kv
    )
    return kept


@torch.library.custom_op("flexcp::kept_weights", mutates_args=())
def _kept(seed: Tensor, p: float, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return Dropout(p, int(seed)).kept(b, h, q, kv)


@_kept.register_fake
def _(seed: Tensor, p: float, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:  # noqa: ARG001
    shape = torch.broadcast_shapes(b.shape, h.shape, q.shape, kv.shape)
    return q.new_empty(shape, dtype=torch.bool)
