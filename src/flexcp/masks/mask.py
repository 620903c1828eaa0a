"""Mask: which (query, key) pairs may attend, as a function of global positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.graph_handles import new_graph_handle
from flexcp.masks.trace import MaskMod, describe


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask_mod with set algebra: `&` (both), `|` (either), `~` (not).

    Any FlexAttention `mask_mod` becomes a Mask, and wherever flexcp takes a Mask it takes the
    plain function as well. Indices are global positions, whatever a layout does with the tokens.

    >>> from flexcp import masks
    >>> recent = Mask(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 2)
    >>> m = masks.causal() & recent
    >>> import torch
    >>> i = torch.arange(4)
    >>> m.mask_mod(torch.tensor(0), torch.tensor(0), i[:, None], i[None, :]).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 1, 1, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """

    mask_mod: MaskMod
    """The function of (b, h, q_idx, kv_idx); torch's FlexAttention accepts it as it is."""
    name: str = ""
    """What to call it in tables and error messages."""
    graph_handle: Tensor | None = field(init=False, repr=False)
    """Stands for this mask in compiled graphs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "graph_handle", new_graph_handle(self))
        if isinstance(self.mask_mod, Mask):
            object.__setattr__(self, "name", self.name or self.mask_mod.name)
            object.__setattr__(self, "mask_mod", self.mask_mod.mask_mod)
        if not callable(self.mask_mod):
            raise FlexCPError(
                "a mask_mod: a function of (b, h, q_idx, kv_idx)",
                f"{self.mask_mod!r} of type {type(self.mask_mod).__name__}",
                "pass a function, or a mask from flexcp.masks",
            )
        if not self.name:
            given = getattr(self.mask_mod, "__name__", "mask")
            object.__setattr__(self, "name", "mask_mod" if given == "<lambda>" else given)

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, graph_handle=new_graph_handle(self))

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Makes a Mask a mask_mod itself."""
        return self.mask_mod(b, h, q_idx, kv_idx)

    def __and__(self, other: Mask | MaskMod) -> Mask:
        left, right = self.mask_mod, as_mask(other).mask_mod

        def both(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return left(b, h, q_idx, kv_idx) & right(b, h, q_idx, kv_idx)

        return Mask(both, f"{_operand(self)} & {_operand(as_mask(other))}")

    def __or__(self, other: Mask | MaskMod) -> Mask:
        left, right = self.mask_mod, as_mask(other).mask_mod

        def either(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return left(b, h, q_idx, kv_idx) | right(b, h, q_idx, kv_idx)

        return Mask(either, f"{_operand(self)} | {_operand(as_mask(other))}")

    def __rand__(self, other: MaskMod) -> Mask:
        return as_mask(other) & self

    def __ror__(self, other: MaskMod) -> Mask:
        return as_mask(other) | self

    def __invert__(self) -> Mask:
        inner = self.mask_mod

        def negation(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return ~inner(b, h, q_idx, kv_idx)

        return Mask(negation, f"~{_operand(self)}")

    def __bool__(self) -> NoReturn:
        raise FlexCPError(
            "masks to be combined with `&`, `|` and `~`",
            f"Python's `and`, `or`, `not` or `if` on the mask {self.name!r}",
            "write `a & b`, `a | b` or `~a`: the Python words would keep one mask and drop the "
            "other without a sign",
        )

    def __repr__(self) -> str:
        return f"Mask({self.name})"

    def transposed(self) -> Mask:
        """The mask with the roles of query and key exchanged."""
        inner = self.mask_mod

        def swapped(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return inner(b, h, kv_idx, q_idx)

        return Mask(swapped, f"transposed({self.name})")

    def shifted(self, q_start: int, kv_start: int) -> Mask:
        """The mask for rows and columns counted from `q_start` and `kv_start`."""
        if q_start == 0 and kv_start == 0:
            return self
        inner = self.mask_mod

        def moved(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return inner(b, h, q_idx + q_start, kv_idx + kv_start)

        return Mask(moved, f"shifted({self.name}, {q_start}, {kv_start})")


def as_mask(mask: Mask | MaskMod) -> Mask:
    """A Mask from a Mask or from a plain mask_mod."""
    if isinstance(mask, Mask):
        return mask
    if not callable(mask):
        raise FlexCPError(
            "a mask: a flexcp Mask or a function of (b, h, q_idx, kv_idx)",
            f"{mask!r} of type {type(mask).__name__}",
            "wrap a function in flexcp.Mask, or take one from flexcp.masks",
        )
    return Mask(mask, getattr(mask, "__qualname__", "") and describe(mask).split(" (")[0])


def _operand(mask: Mask) -> str:
    return f"({mask.name})" if " & " in mask.name or " | " in mask.name else mask.name
