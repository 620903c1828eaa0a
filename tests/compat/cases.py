"""Tensors and comparisons for the tests of `context_parallel`."""

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, noop_mask

from flexcp.comm.rank_errors import RankError
from flexcp.testing.processes import spawn

TOLERANCE = 1e-10
CROPS_TO_ANY_LENGTH = create_block_mask(noop_mask, 1, 1, 8, 8, "cpu", 4)._adjust(
    5, 5
).seq_lengths == (5, 5)
"""Whether `BlockMask._adjust` gives the lengths that it was asked for: whole blocks before 2.13."""


def qkvg(length, batch=2, heads=4, kv_heads=2, dim=8):
    """q, k, v and the gradient of the output."""
    return [
        torch.randn(batch, h, length, dim, dtype=torch.float64)
        for h in (heads, kv_heads, kv_heads, heads)
    ]


def one_process(q, k, v, g, is_causal):
    """The output and gradients of torch's own attention."""
    x = [t.clone().requires_grad_() for t in (q, k, v)]
    out = functional.scaled_dot_product_attention(*x, is_causal=is_causal, enable_gqa=True)
    out.backward(g)
    return [out.detach(), *(t.grad for t in x)]


def is_close(found, wanted):
    """Whether tensors are equal but for rounding."""
    return all(
        a.shape == b.shape and float((a - b).abs().max()) < TOLERANCE
        for a, b in zip(found, wanted, strict=True)
    )


def fails(rank, ranks=2):
    """The error that a rank raises."""
    with pytest.raises(RankError) as caught:
        spawn(rank, ranks, timeout=20)
    return caught.value.__cause__
