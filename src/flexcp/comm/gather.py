"""Gathering rows of a sharded tensor from all ranks, differentiably."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexcp.comm.collectives import gather_parts
from flexcp.comm.interface import Transport
from flexcp.comm.labels import CallLabel


def gather_shards(
    x: Tensor, dim: int, counts: Sequence[int], transport: Transport, call: CallLabel
) -> tuple[Tensor, ...]:
    """The parts of all ranks, by rank; the gradient of the own part is the own gradient.

    Every rank gets the same parts, and is taken to do the same with them: as if the tensor had
    never been sharded.

    Args:
        x: This rank's part.
        dim: The dimension along which parts differ in length; not negative.
        counts: The length of every rank's part.
        transport: How to reach the other ranks.
        call: What the ranks have agreed to do.
    """
    parts: tuple[Tensor, ...] = _GatherShards.apply(x, dim, counts, transport, call)  # type: ignore[no-untyped-call]
    return parts


class _GatherShards(torch.autograd.Function):
    """An all-gather whose backward keeps the gradient of this rank's own part."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        counts: Sequence[int],
        transport: Transport,
        call: CallLabel,
    ) -> tuple[Tensor, ...]:
        ctx.rank = transport.rank
        rows = x.detach().movedim(dim, 0)
        parts = gather_parts(transport, rows, counts, call.passing("forward"))
        return tuple(
            x.clone() if r == ctx.rank else part.movedim(0, dim) for r, part in enumerate(parts)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[ctx.rank], None, None, None, None
