"""Recipes: how a mask was made, by which it compares, hashes and pickles as a value."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flexcp.packing import reduce_packed, tensor_bytes

if TYPE_CHECKING:
    from flexcp.masks.mask import Mask


@dataclass(frozen=True, eq=False)
class TensorValue:
    """A tensor that compares and hashes by its device, type, shape and numbers.

    >>> import torch
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
        return alike and not a.is_meta and self.digest == other.digest

    def __hash__(self) -> int:
        return hash((self.tensor.shape, b"" if self.tensor.is_meta else self.digest))

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_packed(self)

    @cached_property
    def digest(self) -> bytes:
        """256 bits that tell the numbers from any others, read from the device once."""
        return hashlib.blake2b(tensor_bytes(self.tensor), digest_size=32).digest()


@dataclass(frozen=True, eq=False)
class Recipe:
    """A function of the catalogue or of mask algebra and its arguments: called, they make the mask.

    Two masks made by the same function from equal arguments allow the same pairs.
    """

    maker: Callable[..., Mask]
    """A function at the top level of its module, so that it pickles by name."""
    arguments: tuple[int | Mask | TensorValue, ...]
    name: str = ""
    """What the function calls the mask; a user may call it something else."""
    operands: tuple[Mask, ...] = field(init=False)
    """The masks among the arguments."""
    depth: int = field(init=False)
    """How many masks of masks lie on the longest way to a mask that is made of none."""

    def __post_init__(self) -> None:
        operands = tuple(a for a in self.arguments if not isinstance(a, (int, TensorValue)))
        object.__setattr__(self, "operands", operands)
        depth = 1 + max((depth_of(mask) for mask in operands), default=-1)
        object.__setattr__(self, "depth", depth)

    def make(self) -> Mask:
        """The mask, made again."""
        return self.maker(*(a.tensor if isinstance(a, TensorValue) else a for a in self.arguments))


def depth_of(mask: Mask) -> int:
    """The depth of a mask's recipe; 0 for a function of the user's own."""
    return 0 if mask.recipe is None else mask.recipe.depth


def operands_first(mask: Mask, beyond: int = -1) -> list[Mask]:
    """All masks that a mask was made of and itself, each once and after its operands.

    Masks of a depth up to `beyond` are left out. There may be thousands, one inside the other:
    hence no function that calls itself.
    """
    found: dict[int, Mask] = {}
    pending = [(mask, False)]
    while pending:
        some, ready = pending.pop()
        if ready:
            found.setdefault(id(some), some)
        elif id(some) not in found and depth_of(some) > beyond:
            pending.append((some, True))
            if some.recipe is not None:
                pending.extend((operand, False) for operand in reversed(some.recipe.operands))
    return list(found.values())


def hash_of(mask: Mask) -> int:
    """Equal for masks that were made alike."""
    known: dict[int, int] = {}
    for some in operands_first(mask):
        recipe = some.recipe
        if recipe is None or not some.compares_by_recipe:
            known[id(some)] = object.__hash__(some)
        else:
            arguments = tuple(known[id(a)] if id(a) in known else hash(a) for a in recipe.arguments)
            known[id(some)] = hash((recipe.maker, arguments))
    return known[id(mask)]


def made_alike(a: Mask, b: Mask) -> bool:
    """Whether two masks were made by the same functions from equal numbers and tensors."""
    seen: set[tuple[int, int]] = set()
    pending = [(a, b)]
    while pending:
        one, other = pending.pop()
        if one is other or (id(one), id(other)) in seen:
            continue
        seen.add((id(one), id(other)))
        mine, its = one.recipe, other.recipe
        if mine is None or its is None or one.name != other.name:
            return False
        if not (one.compares_by_recipe and other.compares_by_recipe):
            return False
        if mine.maker is not its.maker or len(mine.arguments) != len(its.arguments):
            return False
        for x, y in zip(mine.arguments, its.arguments, strict=True):
            if isinstance(x, (int, TensorValue)) or isinstance(y, (int, TensorValue)):
                if x != y:
                    return False
            else:
                pending.append((x, y))
    return True
