"""The contract of attention as one differentiable step: what every way of running it offers.

An `AttentionOp` is everything about a call that is not a differentiable tensor. `local.py` has one
for a single device, `sharded.py` one for a plan; `autograd.py` and `compiled.py` wrap either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flexcp.kernels.score import ScoreMod


@dataclass(frozen=True, eq=False)
class Saved:
    """What a call was given and what it computed: its results, and all that its gradient needs."""

    q: Tensor
    """[B, H, L, D]"""
    k: Tensor
    """[B, G, Lkv, D]"""
    v: Tensor
    """[B, G, Lkv, Dv]"""
    sinks: Tensor | None
    """[H] Logits that joined each row's denominator."""
    out: Tensor
    """[B, H, L, Dv] The output, in the type of q."""
    lse: Tensor
    """[B, H, L] Natural logarithm of the denominators, in the accumulation type."""
    extras: tuple[Tensor, ...] = ()
    """What else the op itself makes use of, in an order that it knows."""


@dataclass(frozen=True, eq=False)
class OutputGradients:
    """Gradients of a call's results, ready for kernels."""

    out: Tensor
    """[B, H, L, Dv], in the type of the output."""
    lse: Tensor | None
    """[B, H, L] in the accumulation type, 0 in fully masked rows; None if nothing depends on it."""

    @classmethod
    def of(cls, saved: Saved, out: Tensor | None, lse: Tensor | None) -> OutputGradients:
        """From what autograd gives: None for a result that nothing depends on."""
        out = torch.zeros_like(saved.out) if out is None else out.to(saved.out.dtype)
        if lse is not None:
            lse = lse.to(saved.lse.dtype).masked_fill(saved.lse == -torch.inf, 0.0)
        return cls(out, lse)


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of what a call was given, each in the type of its tensor."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    captured: Sequence[Tensor] = ()
    """One for each tensor that the score function captures."""


class AttentionOp(Protocol):
    """Attention with everything decided but the tensors."""

    @property
    def name(self) -> str:
        """What to call it in errors."""
        ...

    @property
    def score_mod(self) -> ScoreMod | None:
        """What is done to scores, and which tensors that takes."""
        ...

    @property
    def replaces_inputs(self) -> bool:
        """Whether the extras hold q, k and v as the kernel got them, and the given ones can go."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Saved:
        """The results, and what their gradients need."""
        ...

    def backward(self, saved: Saved, grads: OutputGradients) -> Gradients:
        """The gradients of the inputs; `saved` is what `forward` returned."""
        ...

    def pack(self, saved: Saved) -> list[Tensor]:
        """The extras as new, contiguous tensors, as many for every plan of the same kind."""
        ...

    def unpack(self, packed: Sequence[Tensor], saved: Saved) -> tuple[Tensor, ...]:
        """The extras of a call again, from what `pack` made of them."""
        ...
