"""Indexing of one-dimensional tensors on one thread, and indices in parts of bounded size."""

from __future__ import annotations

from torch import Tensor


def take(values: Tensor, at: Tensor) -> Tensor:
    """`values[at]` for a tensor of one dimension.

    torch spreads even small indexing over its threads, which on a busy machine wait for each other
    a thousand times as long as the work takes; `index_select` does not.

    >>> import torch
    >>> take(torch.tensor([3, 4, 5]), torch.tensor([[2], [0]]))
    tensor([[5],
            [3]])
    """
    return values.index_select(0, at.reshape(-1)).view(at.shape)


def in_parts(indices: Tensor, size: int) -> tuple[Tensor, ...]:
    """Indices in parts of at most `size`; no part at all if there are none."""
    return indices.split(max(1, size)) if indices.numel() else ()
