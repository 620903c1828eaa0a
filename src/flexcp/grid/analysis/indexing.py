"""Indexing of one-dimensional tensors on one thread, and indices in parts of bounded size."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def order_of(keys: Tensor) -> Tensor:
    """`torch.argsort(keys, stable=True)` for whole numbers of one dimension, in less time.

    Small numbers are sorted by their digits, in a tenth of it; those that all differ in half.

    >>> order_of(torch.tensor([7, 0, 7, 3]))
    tensor([1, 3, 0, 2])
    >>> order_of(torch.tensor([1 << 40, -5, 1 << 40, 3]))
    tensor([1, 3, 0, 2])
    """
    numbers = keys.numpy()
    if numbers.size == 0 or (numbers.min() >= 0 and numbers.max() < 1 << 16):
        return torch.from_numpy(np.argsort(numbers.astype(np.uint16), kind="stable"))
    order = np.argsort(numbers)
    ascending = numbers[order]
    if (ascending[1:] == ascending[:-1]).any():
        order = np.argsort(numbers, kind="stable")
    return torch.from_numpy(order)


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
