"""Mask: which (query, key) pairs may attend, as a function of global positions."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from flexcp.caches import Derived
from flexcp.errors import FlexCPError
from flexcp.graph_handles import new_graph_handle
from flexcp.masks.recipe import Recipe, TensorValue
from flexcp.masks.trace import MaskMod, describe


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask_mod with set algebra: `&` (both), `|` (either), `~` (not).

    Any FlexAttention `mask_mod` becomes a Mask, and wherever flexcp takes a Mask it takes the
    plain function as well. Indices are global positions, whatever a layout does with the tokens.

    Masks of the catalogue, and sets of them, are values: made alike, they are equal, and they
    pickle with their tensors. A mask of a function of your own is equal to itself alone, since
    nobody can tell what the function reads.

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
    >>> m == masks.causal() & recent, m == masks.causal()
    (True, False)
    """

    mask_mod: MaskMod
    """The function of (b, h, q_idx, kv_idx); torch's FlexAttention accepts it as it is."""
    name: str = ""
    """What to call it in tables and error messages."""
    recipe: Recipe | None = field(init=False, repr=False, default=None)
    """How it was made; None for a function of the user's own."""
    graph_handle: Tensor | None = field(init=False, repr=False)
    """Stands for this mask in compiled graphs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "graph_handle", new_graph_handle(self))
        if isinstance(self.mask_mod, Mask):
            object.__setattr__(self, "name", self.name or self.mask_mod.name)
            object.__setattr__(self, "recipe", self.mask_mod.recipe)
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

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Makes a Mask a mask_mod itself."""
        return self.mask_mod(b, h, q_idx, kv_idx)

    def __and__(self, other: Mask | MaskMod) -> Mask:
        return intersection(self, as_mask(other))

    def __or__(self, other: Mask | MaskMod) -> Mask:
        return union(self, as_mask(other))

    def __rand__(self, other: MaskMod) -> Mask:
        return intersection(as_mask(other), self)

    def __ror__(self, other: MaskMod) -> Mask:
        return union(as_mask(other), self)

    def __invert__(self) -> Mask:
        return complement(self)

    def __bool__(self) -> NoReturn:
        raise FlexCPError(
            "masks to be combined with `&`, `|` and `~`",
            f"Python's `and`, `or`, `not` or `if` on the mask {self.name!r}",
            "write `a & b`, `a | b` or `~a`: the Python words would keep one mask and drop the "
            "other without a sign",
        )

    def __repr__(self) -> str:
        return f"Mask({self.name})"

    def __eq__(self, other: object) -> bool:
        """Whether both were made alike, from equal numbers and tensors on the same device."""
        if self is other:
            return True
        if not isinstance(other, Mask):
            return NotImplemented
        if self.recipe is None or other.recipe is None or self.name != other.name:
            return False
        return self.recipe == other.recipe

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return object.__hash__(self) if self.recipe is None else hash(self.recipe)

    @cached_property
    def derived(self) -> Derived:
        """What later stages work out from this mask object, such as its grids; dies with it."""
        return Derived()

    @cached_property
    def is_value(self) -> bool:
        """Whether another mask, made alike, would be equal: all of it comes from the catalogue."""
        return self.recipe is not None and all(
            a.is_value for a in self.recipe.arguments if isinstance(a, Mask)
        )

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensors that the mask holds, those of a function's closure included.

        >>> import torch
        >>> from flexcp import masks
        >>> (masks.causal() & masks.document(torch.tensor([0, 0, 1]))).nbytes
        24
        """
        if self.recipe is None:
            captured = (
                inspect.getclosurevars(self.mask_mod).nonlocals
                if inspect.isfunction(self.mask_mod)
                else {}
            )
            return sum(x.nbytes for x in captured.values() if isinstance(x, Tensor))
        return sum(
            a.nbytes if isinstance(a, Mask) else a.tensor.nbytes
            for a in self.recipe.arguments
            if isinstance(a, (Mask, TensorValue))
        )

    def __copy__(self) -> Mask:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Mask:
        """The mask itself: it can't be changed, and a copy of a function is no equal mask."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Mask], tuple[Any, ...]]:
        if self.recipe is not None:
            return _made_again, (self.recipe.maker, self.recipe.arguments, self.name)
        _require_picklable(self)
        return Mask, (self.mask_mod, self.name)

    def transposed(self) -> Mask:
        """The mask with the roles of query and key exchanged."""
        return transposition(self)

    def shifted(self, q_start: int, kv_start: int) -> Mask:
        """The mask for rows and columns counted from `q_start` and `kv_start`."""
        return self if q_start == 0 and kv_start == 0 else shift(self, q_start, kv_start)


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


def made_by(
    maker: Callable[..., Mask], *arguments: int | Mask | Tensor, mask_mod: MaskMod, name: str
) -> Mask:
    """A mask that is a value: `maker(*arguments)` makes an equal one.

    Tensors among the arguments must be copies that nobody else can change.
    """
    mask = Mask(mask_mod, name)
    if torch.compiler.is_compiling():
        return mask  # without a graph handle; nothing will ask how it was made
    values = tuple(TensorValue(a) if isinstance(a, Tensor) else a for a in arguments)
    object.__setattr__(mask, "recipe", Recipe(maker, values))
    return mask


def intersection(a: Mask, b: Mask) -> Mask:
    """The pairs that both masks allow: `a & b`."""
    left, right = a.mask_mod, b.mask_mod

    def both(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return left(b, h, q_idx, kv_idx) & right(b, h, q_idx, kv_idx)

    return made_by(intersection, a, b, mask_mod=both, name=f"{_operand(a)} & {_operand(b)}")


def union(a: Mask, b: Mask) -> Mask:
    """The pairs that either mask allows: `a | b`."""
    left, right = a.mask_mod, b.mask_mod

    def either(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return left(b, h, q_idx, kv_idx) | right(b, h, q_idx, kv_idx)

    return made_by(union, a, b, mask_mod=either, name=f"{_operand(a)} | {_operand(b)}")


def complement(mask: Mask) -> Mask:
    """The pairs that a mask forbids: `~mask`."""
    inner = mask.mask_mod

    def negation(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~inner(b, h, q_idx, kv_idx)

    return made_by(complement, mask, mask_mod=negation, name=f"~{_operand(mask)}")


def transposition(mask: Mask) -> Mask:
    """The mask with the roles of query and key exchanged."""
    inner = mask.mask_mod

    def swapped(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return inner(b, h, kv_idx, q_idx)

    return made_by(transposition, mask, mask_mod=swapped, name=f"transposed({mask.name})")


def shift(mask: Mask, q_start: int, kv_start: int) -> Mask:
    """The mask for rows and columns counted from `q_start` and `kv_start`."""
    inner = mask.mask_mod

    def moved(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return inner(b, h, q_idx + q_start, kv_idx + kv_start)

    name = f"shifted({mask.name}, {q_start}, {kv_start})"
    return made_by(shift, mask, q_start, kv_start, mask_mod=moved, name=name)


def _operand(mask: Mask) -> str:
    return f"({mask.name})" if " & " in mask.name or " | " in mask.name else mask.name


def _made_again(
    maker: Callable[..., Mask], arguments: tuple[int | Mask | TensorValue, ...], name: str
) -> Mask:
    """What a pickled mask of the catalogue, or set of masks, is read back by."""
    mask = Recipe(maker, arguments).make()
    return mask if mask.name == name else Mask(mask, name)


def _require_picklable(mask: Mask) -> None:
    if {"cloudpickle", "dill"} & sys.modules.keys():
        return  # they write functions that plain pickle can't, and it is not known who asks
    try:
        pickle.dumps(mask.mask_mod)
    except Exception as error:
        raise FlexCPError(
            "a mask whose function pickles: one at the top level of a module",
            f"{describe(mask.mask_mod)} in the mask {mask.name!r} ({error})",
            "move the function to the top level of a module, or compose the mask of flexcp.masks",
        ) from error
