"""Recipes: how a mask was made, by which it compares, hashes and pickles as a value."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flexcp.masks.mask import Mask


@dataclass(frozen=True, eq=False)
class TensorValue:
    """A tensor that compares and hashes by its device, type, shape and numbers.

    >>> TensorValue(torch.tensor([1, 2])) == TensorValue(torch.tensor([1, 2]))
    True
    """

    tensor: Tensor
    """Nobody else may change it."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorValue):
            return NotImplemented
        a, b = self.tensor, other.tensor
        if a is b:
            return True
        alike = (a.device, a.dtype, a.shape) == (b.device, b.dtype, b.shape)
        return alike and torch.equal(a, b)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((tuple(self.tensor.shape), tensor_bytes(self.tensor)))


@dataclass(frozen=True)
class Recipe:
    """A function of the catalogue or of mask algebra and its arguments: called, they make the mask.

    Two masks made by the same function from equal arguments allow the same pairs.
    """

    maker: Callable[..., Mask]
    """A function at the top level of its module, so that it pickles by name."""
    arguments: tuple[int | Mask | TensorValue, ...]

    def make(self) -> Mask:
        """The mask, made again."""
        return self.maker(*(a.tensor if isinstance(a, TensorValue) else a for a in self.arguments))


def tensor_bytes(x: Tensor) -> bytes:
    """The memory of a tensor's elements, in order.

    >>> tensor_bytes(torch.tensor([1, 2], dtype=torch.uint8))
    b'\\x01\\x02'
    """
    x = x.detach().cpu().contiguous()
    return ctypes.string_at(x.data_ptr(), x.numel() * x.element_size()) if x.numel() else b""
