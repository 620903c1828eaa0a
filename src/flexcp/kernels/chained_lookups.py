"""Lookups in steps, `bias[h][q_idx, kv_idx]`, as one: so a score_mod may be called on a whole tile.

On one score, `bias[h]` leaves a tensor with the dimensions that are not looked up yet. On a tile it
would have those of the tile besides, and the next index would be taken for one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def joined_lookups(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with captured tensors looked up once all of their dimensions have an index.

    >>> table = torch.arange(6.0).view(2, 3)
    >>> given = torch.tensor([[0], [1]]), torch.tensor([[2, 0]])
    >>> joined_lookups(lambda h, q: table[h][q])(*given)
    tensor([[2., 0.],
            [5., 3.]])
    """

    def joined(*given: Tensor) -> Any:
        with _JoinedLookups(given):
            return function(*given)

    return joined


class _Rows:
    """What is left of a captured tensor after its first dimensions were looked up."""

    def __init__(self, table: Tensor, indices: tuple[Any, ...], mode: _JoinedLookups) -> None:
        self._table, self._indices, self._mode = table, indices, mode

    def __getitem__(self, index: Any) -> Any:
        more = index if isinstance(index, tuple) else (index,)
        if not self._mode.are_plain(more):
            raise TypeError("what is left of a captured tensor can only be looked up further")
        indices = (*self._indices, *more)
        if len(indices) < self._table.dim():
            return _Rows(self._table, indices, self._mode)
        return self._table[indices]


class _JoinedLookups(TorchFunctionMode):
    """Follows what is made of the arguments, and puts off lookups by it that leave dimensions."""

    def __init__(self, given: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._of_tile = {id(x): x for x in given}  # kept, so that no id is used twice

    def are_plain(self, indices: tuple[Any, ...]) -> bool:
        """Whether each is a number, or one for each score."""
        return all(type(x) is int or self._is_index(x) for x in indices)

    def _is_index(self, x: object) -> bool:
        if id(x) not in self._of_tile or not isinstance(x, Tensor):
            return False
        return x.dtype != torch.bool and not x.is_floating_point()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and id(args[0]) not in self._of_tile:
            table, index = args
            indices = index if isinstance(index, tuple) else (index,)
            leaves_some = len(indices) < table.dim() and any(map(self._is_index, indices))
            if leaves_some and self.are_plain(indices):
                return _Rows(table, indices, self)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and self._depends((*args, *(kwargs or {}).values())):
            self._of_tile[id(result)] = result
        return result

    def _depends(self, given: Any) -> bool:
        if isinstance(given, (tuple, list)):
            return any(map(self._depends, given))
        return id(given) in self._of_tile
