"""Mask: which (query, key) pairs may attend, as a function of global positions."""

from __future__ import annotations

import inspect
import operator
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from flexcp.caches import Derived
from flexcp.errors import FlexCPError, require, told, whole_number
from flexcp.graph_handles import GraphOwner, new_graph_handle
from flexcp.masks.recipe import (
    Recipe,
    TensorValue,
    depth_of,
    hash_of,
    made_alike,
    operands_first,
)
from flexcp.masks.trace import MaskMod, describe


@dataclass(frozen=True, eq=False)
class Mask(GraphOwner):
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
    recipe: Recipe | None = field(repr=False, default=None)
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
                told(self.mask_mod),
                "pass a function, or a mask from flexcp.masks",
            )
        require("name", self.name, str, "pass a word for tables and messages")
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
        return made_alike(self, other)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash_of(self)

    @cached_property
    def derived(self) -> Derived:
        """What later stages work out from this mask object, such as its grids; dies with it."""
        return Derived()

    @property
    def compares_by_recipe(self) -> bool:
        """Whether all there is to know of it is its recipe; a subclass may do anything else."""
        return self.recipe is not None and type(self) is Mask

    @cached_property
    def is_value(self) -> bool:
        """Whether another mask, made alike, would be equal: all of it comes from the catalogue."""
        return all(mask.compares_by_recipe for mask in operands_first(self))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensors that the mask holds, those of a function's closure included.

        >>> import torch
        >>> from flexcp import masks
        >>> (masks.causal() & masks.document(torch.tensor([0, 0, 1]))).nbytes
        24
        """
        return sum(tensor.nbytes for mask in operands_first(self) for tensor in mask._own_tensors())

    def _own_tensors(self) -> list[Tensor]:
        """The tensors of this mask, without those of masks that it is made of."""
        if self.recipe is not None:
            return [a.tensor for a in self.recipe.arguments if isinstance(a, TensorValue)]
        if not inspect.isfunction(self.mask_mod):
            return []
        captured = inspect.getclosurevars(self.mask_mod).nonlocals
        return [x for x in captured.values() if isinstance(x, Tensor)]

    def __copy__(self) -> Mask:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Mask:
        """The mask itself: it can't be changed, and a copy of a function is no equal mask."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Mask], tuple[Any, ...]]:
        if self.recipe is None:
            _require_picklable(self)
            return type(self), (self.mask_mod, self.name)
        if type(self) is not Mask:
            return type(self), (Mask(self, self.name), self.name)
        return _made_again, (_steps(self),)

    def transposed(self) -> Mask:
        """The mask with the roles of query and key exchanged."""
        return transposition(self)

    def shifted(self, q_start: int, kv_start: int) -> Mask:
        """The mask for rows and columns counted from `q_start` and `kv_start`."""
        fix = "pass positions of the sequence"
        q_start = whole_number("q_start", q_start, at_least=-(2**62), fix=fix, at_most=2**62)
        kv_start = whole_number("kv_start", kv_start, at_least=-(2**62), fix=fix, at_most=2**62)
        return self if q_start == 0 and kv_start == 0 else shift(self, q_start, kv_start)


def as_mask(mask: Mask | MaskMod) -> Mask:
    """A Mask from a Mask or from a plain mask_mod."""
    if isinstance(mask, Mask):
        return mask
    if not callable(mask):
        raise FlexCPError(
            "a mask: a flexcp Mask or a function of (b, h, q_idx, kv_idx)",
            told(mask),
            "wrap a function in flexcp.Mask, or take one from flexcp.masks",
        )
    return Mask(mask, getattr(mask, "__qualname__", "") and describe(mask).split(" (")[0])


def made_by(
    maker: Callable[..., Mask], *arguments: int | Mask | Tensor, mask_mod: MaskMod, name: str
) -> Mask:
    """A mask that is a value: `maker(*arguments)` makes an equal one.

    Tensors among the arguments must be copies that nobody else can change.
    """
    if torch.compiler.is_compiling():
        return Mask(mask_mod, name)  # without a graph handle; nothing will ask how it was made
    values = tuple(TensorValue(a) if isinstance(a, Tensor) else a for a in arguments)
    return Mask(mask_mod, name, Recipe(maker, values, name))


def intersection(a: Mask, b: Mask) -> Mask:
    """The pairs that both masks allow: `a & b`."""
    left, right = a.mask_mod, b.mask_mod

    def both(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return left(b, h, q_idx, kv_idx) & right(b, h, q_idx, kv_idx)

    name = f"{_operand(a)} & {_operand(b)}"
    mask_mod = _without_nested_calls(intersection, a, b) if _is_deep(a, b) else both
    return made_by(intersection, a, b, mask_mod=mask_mod, name=name)


def union(a: Mask, b: Mask) -> Mask:
    """The pairs that either mask allows: `a | b`."""
    left, right = a.mask_mod, b.mask_mod

    def either(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return left(b, h, q_idx, kv_idx) | right(b, h, q_idx, kv_idx)

    name = f"{_operand(a)} | {_operand(b)}"
    mask_mod = _without_nested_calls(union, a, b) if _is_deep(a, b) else either
    return made_by(union, a, b, mask_mod=mask_mod, name=name)


def complement(mask: Mask) -> Mask:
    """The pairs that a mask forbids: `~mask`."""
    inner = mask.mask_mod

    def negation(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~inner(b, h, q_idx, kv_idx)

    mask_mod = _without_nested_calls(complement, mask) if _is_deep(mask) else negation
    return made_by(complement, mask, mask_mod=mask_mod, name=f"~{_operand(mask)}")


_OPERATORS: dict[Callable[..., Mask], Callable[..., Tensor]] = {
    intersection: operator.and_,
    union: operator.or_,
    complement: operator.invert,
}
_DEEPEST_CALLS = 64
"""Masks of masks up to this depth call each other, which torch.compile can follow; Python itself
allows about a thousand calls inside each other."""


def _is_deep(*operands: Mask) -> bool:
    return any(depth_of(mask) >= _DEEPEST_CALLS for mask in operands)


def _without_nested_calls(maker: Callable[..., Mask], *operands: Mask) -> MaskMod:
    """The mask_mod of a set of masks that is thousands of masks deep: a loop over all of them."""

    def combined(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        known: dict[int, Tensor] = {}

        def value(mask: Mask) -> Tensor:
            found = known.get(id(mask))
            return mask.mask_mod(b, h, q_idx, kv_idx) if found is None else found

        for operand in operands:
            for mask in operands_first(operand, beyond=_DEEPEST_CALLS):
                recipe = mask.recipe
                if recipe is not None and recipe.maker in _OPERATORS and id(mask) not in known:
                    known[id(mask)] = _OPERATORS[recipe.maker](*map(value, recipe.operands))
        return _OPERATORS[maker](*map(value, operands))

    return combined


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


_LONGEST_NAME = 500
"""Characters of an operand's name that are told; the rest of a set of many masks is left out."""


def _operand(mask: Mask) -> str:
    name = mask.name
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME // 2]} ... {name[-_LONGEST_NAME // 2 :]}"
    recipe = mask.recipe
    if recipe is None or recipe.name != mask.name:
        return name
    return f"({name})" if recipe.maker in (intersection, union) else name


@dataclass(frozen=True)
class _MakingStep:
    """How a mask is made from those of earlier steps."""

    maker: Callable[..., Mask]
    arguments: tuple[int | TensorValue | _MadeEarlier, ...]
    name: str


@dataclass(frozen=True)
class _MadeEarlier:
    """The mask that an earlier step made."""

    step: int


def _steps(mask: Mask) -> list[_MakingStep | Mask]:
    """How to make a mask again, flat; masks that have no recipe are there themselves."""
    masks = operands_first(mask)
    place = {id(some): _MadeEarlier(step) for step, some in enumerate(masks)}
    steps: list[_MakingStep | Mask] = []
    for some in masks:
        if some.recipe is None or not some.compares_by_recipe:
            steps.append(some)
            continue
        arguments = (place[id(a)] if isinstance(a, Mask) else a for a in some.recipe.arguments)
        steps.append(_MakingStep(some.recipe.maker, tuple(arguments), some.name))
    return steps


def _made_again(steps: list[_MakingStep | Mask]) -> Mask:
    """What a pickled mask of the catalogue, or set of masks, is read back by."""
    made: list[Mask] = []
    for step in steps:
        if isinstance(step, Mask):
            made.append(step)
            continue
        arguments = (made[a.step] if isinstance(a, _MadeEarlier) else a for a in step.arguments)
        mask = Recipe(step.maker, tuple(arguments)).make()
        made.append(mask if mask.name == step.name else Mask(mask, step.name))
    return made[-1]


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
