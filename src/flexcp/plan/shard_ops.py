"""Sharding and unsharding inside torch.compile: ops that find their plan by its handle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexcp.graph_handles import owner_of, require_compiled_for


def _with_rows(x: Tensor, dim: int, rows: int) -> Tensor:
    return x.new_empty((*x.shape[:dim], rows, *x.shape[dim + 1 :]))


def _with_that_many(x: Tensor, dim: int, rows: int) -> Tensor:
    """The tensor, if it has as many rows as the graph was told that it would."""
    require_compiled_for("rows", rows, x.shape[dim])
    return x.contiguous()


@torch.library.custom_op("flexcp::shard", mutates_args=())
def shard(x: Tensor, handle: Tensor, dim: int, rank: int, batch_dim: int, rows: int) -> Tensor:
    """A rank's `rows` rows of a full tensor."""
    plan: Any = owner_of(handle, keep=True)
    plan.unapplied_styles.require_applied("plan.shard")
    return _with_that_many(plan.layout.shard(x, dim, rank=rank, batch_dim=batch_dim), dim, rows)


@shard.register_fake
def _(x: Tensor, handle: Tensor, dim: int, rank: int, batch_dim: int, rows: int) -> Tensor:  # noqa: ARG001
    return _with_rows(x, dim, rows)


@torch.library.custom_op("flexcp::scatter", mutates_args=())
def scatter(x: Tensor, handle: Tensor, dim: int, rank: int, batch_dim: int, rows: int) -> Tensor:
    """The gradient of `shard`: a rank's rows where they belong among `rows`, zeros elsewhere."""
    plan: Any = owner_of(handle, keep=True)
    counts = plan.layout.counts.tolist()
    parts = [x if r == rank else _with_rows(x, dim, n).zero_() for r, n in enumerate(counts)]
    return _with_that_many(plan.layout.unshard(parts, dim, batch_dim=batch_dim), dim, rows)


@scatter.register_fake
def _(x: Tensor, handle: Tensor, dim: int, rank: int, batch_dim: int, rows: int) -> Tensor:  # noqa: ARG001
    return _with_rows(x, dim, rows)


@torch.library.custom_op("flexcp::unshard", mutates_args=())
def unshard(x: Tensor, handle: Tensor, dim: int, rank: int, batch_dim: int, rows: int) -> Tensor:  # noqa: ARG001
    """All `rows` rows, from those of every rank."""
    plan: Any = owner_of(handle, keep=True)
    found: Tensor = plan.unshard(x, dim, batch_dim=batch_dim)
    return found.contiguous()


@unshard.register_fake
def _(x: Tensor, handle: Tensor, dim: int, rank: int, batch_dim: int, rows: int) -> Tensor:  # noqa: ARG001
    return _with_rows(x, dim, rows)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001
    x, handle, dim, rank, batch_dim, _ = inputs
    ctx.save_for_backward(handle)
    ctx.rest = (dim, rank, batch_dim, x.shape[dim])


def _shard_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return scatter(grad, ctx.saved_tensors[0], *ctx.rest), None, None, None, None, None


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return shard(grad, ctx.saved_tensors[0], *ctx.rest), None, None, None, None, None


shard.register_autograd(_shard_backward, setup_context=_setup_context)
unshard.register_autograd(_unshard_backward, setup_context=_setup_context)
