"""Masks and score functions that the kernels are tried on, with the tensors that they capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexcp import Mask, masks
from flexcp.kernels.reference import DenseResult, dense_attention, dense_mask

SIZE = 700
"""Positions that the captured tensors below cover."""


def documents(length: int) -> Tensor:
    return (torch.arange(SIZE) * 7 // 300)[:length]


_NOISE = torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(1)) > 0.6

MASKS: dict[str, Callable[[], Mask]] = {
    "full": masks.full,
    "causal": masks.causal,
    "inverse causal": lambda: Mask(lambda b, h, q, kv: q <= kv),
    "window": lambda: masks.sliding_window(50),
    "two-sided window": lambda: masks.sliding_window(40, 30),
    "documents": lambda: masks.causal() & masks.document(documents(SIZE)),
    "bidirectional documents": lambda: masks.document(documents(SIZE)),
    "prefix": lambda: masks.prefix_lm(101),
    "chunked": lambda: masks.chunked(90),
    "shared prefix": lambda: masks.shared_prefix(100, [200, 150, 250]),
    "block causal": lambda: Mask(lambda b, h, q, kv: q // 64 >= kv // 64),
    "noise": lambda: Mask(lambda b, h, q, kv: _NOISE[q, kv]),
    "dilated": lambda: Mask(lambda b, h, q, kv: (q - kv) % 5 == 0),
    "by head": lambda: Mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 40 * (h + 1))),
    "by batch": lambda: Mask(lambda b, h, q, kv: q >= kv + 60 * b),
    "by batch and head": lambda: Mask(lambda b, h, q, kv: (q >= kv) & ((b + h) % 3 != 1)),
    "fully masked rows": lambda: Mask(lambda b, h, q, kv: (q >= kv + 100) & (q % 7 != 3)),
    "nothing": lambda: Mask(lambda b, h, q, kv: q < 0),
    "steep": lambda: Mask(lambda b, h, q, kv: kv < 3 * q),
    "backwards": lambda: Mask(lambda b, h, q, kv: q + kv < 300),
}


@dataclass
class Problem:
    """Tensors of one attention call."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    captured: list[Tensor] = field(default_factory=list)

    @property
    def inputs(self) -> list[Tensor]:
        own = [self.q, self.k, self.v] + ([] if self.sinks is None else [self.sinks])
        return own + self.captured

    def expected(
        self, mask: Mask | None, score_mod: object = None, scale: float | None = None
    ) -> DenseResult:
        allowed = None
        if mask is not None:
            rows, keys = torch.arange(self.q.shape[2]), torch.arange(self.k.shape[2])
            batch, heads = self.q.shape[:2]
            allowed = dense_mask(mask.mask_mod, rows, keys, batch=batch, heads=heads)
        return dense_attention(
            self.q, self.k, self.v, allowed=allowed, score_mod=score_mod, sinks=self.sinks,
            scale=scale,
        )  # fmt: skip


def problem(
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    q_len: int = 333,
    kv_len: int | None = None,
    dim: int = 8,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float64,
    sinks: bool = False,
) -> Problem:
    kv_len = q_len if kv_len is None else kv_len
    value_dim = dim if value_dim is None else value_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    return Problem(
        random(batch, heads, q_len, dim),
        random(batch, kv_heads, kv_len, dim),
        random(batch, kv_heads, kv_len, value_dim),
        random(heads) if sinks else None,
    )


def loss(out: Tensor, lse: Tensor | None = None) -> Tensor:
    """A number that depends on every output in its own way; rows that see nothing don't count."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).cos()
    total = (out * weights).sum()
    if lse is not None:
        slopes = torch.linspace(0, 3, lse.numel(), dtype=lse.dtype).view(lse.shape).sin()
        total = total + (lse.masked_fill(lse == -torch.inf, 0.0) * slopes).sum()
    return total


def wide(*tensors: Tensor) -> list[Tensor]:
    """Tensors in float64, of which gradients are asked."""
    return [x.detach().to(torch.float64).requires_grad_() for x in tensors]


__all__ = ["MASKS", "SIZE", "Problem", "documents", "loss", "problem", "wide"]
