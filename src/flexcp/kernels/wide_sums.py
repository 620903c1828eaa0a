"""Lookups in captured half-precision tensors, whose gradients are summed in float32.

The gradient of a lookup is a sum over all scores that read an entry. In bfloat16 such a sum stops
growing after a few hundred terms. So entries are read from a float32 copy, and handed out in the
type that the function expects; where it goes on to compute with wider numbers, what it is given
is the copy's entry itself, which has the same value, and its gradient is not rounded on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_HALF = (torch.bfloat16, torch.float16)
_WIDENING = frozenset({"to", "float", "double", "type_as"})
"""Methods of tensors that may change their type."""
_PROMOTING = frozenset(
    {
        "add", "sub", "mul", "div", "true_divide", "truediv", "rsub", "__add__", "__sub__",
        "__mul__", "__truediv__", "__radd__", "__rsub__", "__rmul__", "__rtruediv__", "__rdiv__",
    }
)  # fmt: skip
"""Functions of two operands, which are computed in the wider type of both."""
_CHANGING = frozenset(name for name in dir(Tensor) if name[-1] == "_" != name[-2]) | {
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__",
}  # fmt: skip
"""Functions that change a tensor in place; a set, since Dynamo can't look into their names."""


class WideEntries:
    """What was read of float32 copies, beside what the function was given for it."""

    def __init__(self) -> None:
        self._read: list[tuple[Tensor, Tensor]] = []

    def forget(self) -> None:
        """All of it: from here on, what a function is given counts for itself."""
        self._read.clear()

    def narrow(self, entries: Tensor, dtype: torch.dtype) -> Tensor:
        """Entries of a copy in the type of the tensor that it is a copy of."""
        given = entries.to(dtype)
        self._read.append((given, entries))
        return given

    def forget_if_changed(self, func: Any, kwargs: dict[str, Any]) -> None:
        """Before a function of torch: one that changes a tensor, or a view of it, parts them."""
        if getattr(func, "__name__", "") in _CHANGING or kwargs.get("out") is not None:
            self.forget()

    def of(self, given: Any) -> Any:
        """The entries that were narrowed to `given`; None if there are none."""
        for narrowed, entries in self._read:
            if narrowed is given:
                return entries
        return None

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of torch, on float32 entries where that gives the same value."""
        if not self._read:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _WIDENING:
            entries = self.of(args[0])
            if entries is not None:
                found = func(entries, *args[1:], **kwargs)
                return func(*args, **kwargs) if found.dtype in _HALF else found
        elif name in _PROMOTING and len(args) == 2:
            left, right = args
            if _widens(right, left):
                left = self._wide(left)
            elif _widens(left, right):
                right = self._wide(right)
            return func(left, right, **kwargs)
        return func(*args, **kwargs)

    def _wide(self, given: Any) -> Any:
        entries = self.of(given)
        return given if entries is None else entries


class WideSums(TorchFunctionMode):
    """Reads captured half-precision tensors by way of float32 copies, which get the gradients.

    >>> table = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    >>> with WideSums([table]) as wide:
    ...     read = table[torch.zeros(1000, dtype=torch.int64)]
    >>> read.dtype, float(torch.autograd.grad(read.sum(), wide.copies)[0])
    (torch.bfloat16, 1000.0)
    """

    def __init__(self, captured: Sequence[Tensor]) -> None:
        super().__init__()
        self._tables = [x for x in captured if is_half(x)]
        self.copies = [x.detach().float().requires_grad_() for x in self._tables]
        """Of the half-precision tensors among those captured, in order."""
        self._entries = WideEntries()

    def __enter__(self) -> Self:
        self._entries.forget()  # of the strip before
        found: Self = super().__enter__()  # type: ignore[no-untyped-call]
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._entries.forget_if_changed(func, kwargs or {})
        if func is Tensor.__getitem__:
            table, index = args
            copy = self._entries.of(table)
            for known, of_known in zip(self._tables, self.copies, strict=True):
                copy = of_known if known is table else copy
            if copy is not None:
                return self._entries.narrow(copy[index], table.dtype)
        return self._entries.call(func, args, kwargs or {})

    def of_copies(self, captured: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        """Those of some values, one for each captured tensor, that belong to the copies."""
        return [x for table, x in zip(captured, values, strict=True) if is_half(table)]


def _widens(other: Any, x: Any) -> bool:
    """Whether a function of both is computed in the type of `other`, which is wider."""
    if not isinstance(other, Tensor) or not isinstance(x, Tensor) or not is_half(x):
        return False
    is_wider = other.is_floating_point() and not is_half(other)
    return is_wider and (other.dim() > 0 or x.dim() == 0)


def is_half(x: Tensor) -> bool:
    """Whether sums in the tensor's type are far from what they are in float32."""
    return x.dtype in _HALF
