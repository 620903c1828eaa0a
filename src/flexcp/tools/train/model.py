"""ByteTransformer: a decoder that leaves attention to its caller.

The model never asks where its tokens live. It computes on the rows it is given, at the positions
it is given, and calls `attend` where rows have to see each other. Legend: B batch, L rows of this
rank, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attend(Protocol):
    """Attention over the whole sequence, for a layer of some kind: "full" or "sliding"."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
        """[B, H, L, D] from q [B, H, L, D] and k, v [B, G, L, D]."""
        ...


class ByteTransformer(nn.Module):
    """RMSNorm, rotary positions, grouped queries, SwiGLU, tied embeddings.

    Args:
        vocabulary: Tokens that it can read and predict.
        dim: Width.
        layers: Number of layers.
        heads: Query heads H.
        kv_heads: Key-value heads G.
        sliding: Whether every other layer is of kind "sliding".

    >>> import flexcp
    >>> model = ByteTransformer(256, dim=32, layers=2, heads=4, kv_heads=2)
    >>> def attend(q, k, v, kind):
    ...     return flexcp.flex_attention(
    ...         q, k, v, block_mask=flexcp.masks.causal(), enable_gqa=True)
    >>> model(torch.arange(10)[None], torch.arange(10)[None], attend).shape
    torch.Size([1, 10, 256])
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        dim: int,
        layers: int,
        heads: int,
        kv_heads: int,
        sliding: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        kinds = ["sliding" if sliding and n % 2 == 0 else "full" for n in range(layers)]
        self.layers = nn.ModuleList(Layer(dim, heads, kv_heads, kind) for kind in kinds)
        self.norm = nn.RMSNorm(dim)
        self.head_dim = dim // heads
        self._initialise(layers)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits [B, L, vocabulary] of tokens [B, L] at positions [B, L]."""
        x = self.embedding(tokens)
        rotation = rotary(positions, self.head_dim, x.dtype)
        for layer in self.layers:
            x = layer(x, rotation, attend)
        return functional.linear(self.norm(x), self.embedding.weight)

    def _initialise(self, layers: int) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last_of_branch = name.endswith(("out.weight", "down.weight"))
                scale = (2 * layers) ** -0.5 if last_of_branch else 1.0
                nn.init.normal_(weight, std=0.02 * scale)


class Layer(nn.Module):
    """Attention and a gated feed-forward network, each added to its input."""

    def __init__(self, dim: int, heads: int, kv_heads: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.head_dim = dim // heads
        hidden = -(-8 * dim // 3 // 16) * 16
        self.attention_norm = nn.RMSNorm(dim)
        self.q = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=False)
        self.feed_norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[B, L, dim] from the same; `rotation` is what `rotary` returns."""
        y = self.attention_norm(x)
        q, k, v = (self._heads(project(y)) for project in (self.q, self.k, self.v))
        seen = attend(rotate(q, rotation), rotate(k, rotation), v, self.kind)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        y = self.feed_norm(x)
        out: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """[B, heads, L, D] from [B, L, heads * D]."""
        return torch.unflatten(x, 2, (-1, self.head_dim)).transpose(1, 2)


def rotary(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, 1, L, D / 2] of positions [B, L]."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64)
    angle = positions[:, None, :, None] * 10_000.0 ** (-exponent / head_dim)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turns pairs of elements of [B, heads, L, D] by angles that grow with the position."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
