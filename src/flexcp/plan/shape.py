"""AttentionShape: heads, head dimension, element size and batch, and the bytes that they make."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionShape:
    """What a row of Q, K, V and the output weighs."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key-value heads; K and V travel unrepeated."""
    head_dim: int
    """Elements of a head."""
    dtype: torch.dtype
    """Type of Q, K, V and the output; lse is float32, or float64 if that is float64."""
    batch: int
    """Batch elements."""

    def kv_bytes(self, heads: int) -> int:
        """K and V of one token of one batch element, for some kv heads."""
        return 2 * heads * self.head_dim * self.dtype.itemsize

    def q_bytes(self, heads: int) -> int:
        """Q, dQ or dO of one token of one batch element, for some query heads."""
        return heads * self.head_dim * self.dtype.itemsize

    def out_bytes(self, heads: int) -> int:
        """Output and its lse, of one token of one batch element, for some query heads."""
        return self.q_bytes(heads) + max(4, self.dtype.itemsize) * heads

    @property
    def flops_per_pair(self) -> int:
        """Of the forward pass, for one head: two products of 2 * head_dim each."""
        return 4 * self.head_dim
