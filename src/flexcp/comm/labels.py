"""Labels of messages: the call, pass and round that they belong to, as data.

Two ranks exchange messages under equal labels, and no message is taken for one of another label.
A call is counted when it begins, in its forward pass, and ranks count alike; its backward passes
carry its number, so that they may run in any order.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Direction = Literal["forward", "backward"]
What = Literal["rows", "gradients", "swap"]
"""KV rows of a round, gradients on their way to the owners, or rows that are swapped for heads."""

_WHATS: tuple[What, ...] = ("rows", "gradients", "swap")
_TAG_BITS = 0x7FFFFFFF
_SPREAD = 0x9E3779B1
"""Odd, so that the tags of one pass differ from each other; large, so that they are spread."""


@dataclass(frozen=True)
class CallLabel:
    """One call that all ranks of a group make together.

    >>> str(CallLabel("attention under mask 'sliding'", b"", 3))
    "call 3, attention under mask 'sliding'"
    """

    what: str
    """What errors call it."""
    digest: bytes
    """16 bytes: of the plan and the kind of call, as ranks have agreed."""
    number: int
    """Which call of the group, from 0 on; a recomputation has the number of the call itself."""
    recomputation: int = 0
    """0 for the call itself, n for its n-th recomputation under activation checkpointing."""
    dropout_seed: int | None = None
    """The seed of the call's dropout, if there is any: what another seed made is not taken."""

    WORDS = 6
    """How many elements `as_tensor` has."""

    def as_tensor(self) -> Tensor:
        """int64 [WORDS] All but the text, to travel through a compiled graph."""
        halves = (self.digest[:8], self.digest[8:])
        words = (int.from_bytes(half, "little", signed=True) for half in halves)
        seed = (0, 0) if self.dropout_seed is None else (1, self.dropout_seed)
        return torch.tensor([self.number, self.recomputation, *seed, *words])

    @classmethod
    def of_tensor(cls, what: str, content: Tensor) -> CallLabel:
        """From what `as_tensor` gave.

        >>> label = CallLabel("attention", b"0123456789abcdef", 3, 1, dropout_seed=-5)
        >>> CallLabel.of_tensor("attention", label.as_tensor()) == label
        True
        """
        number, again, has_seed, seed, *words = (int(n) for n in content.numpy())
        halves = (word.to_bytes(8, "little", signed=True) for word in words)
        return cls(what, b"".join(halves), number, again, seed if has_seed else None)

    def passing(self, direction: Direction, number: int = 0) -> PassLabel:
        """The label of one pass; a call may have several backward passes."""
        return PassLabel(self, direction, number)

    def __str__(self) -> str:
        again = f"recomputation {self.recomputation} of " if self.recomputation else ""
        return f"{again}call {self.number}, {self.what}"


@dataclass(frozen=True)
class PassLabel:
    """One pass of a call.

    >>> call = CallLabel("attention", b"", 3)
    >>> str(call.passing("backward", 1))
    'the backward of attention (call 3, backward pass 1)'
    """

    call: CallLabel
    direction: Direction
    number: int = 0
    """Which backward pass of the call, from 0 on; 0 for the forward pass."""
    part: int = 0
    """Which part of the heads, where they are computed one after the other."""

    @cached_property
    def key(self) -> str:
        """What the pass is called on the board: equal on all ranks, whatever they call."""
        call = self.call
        return f"{call.number}.{call.recomputation}.{self.direction}.{self.number}"

    @cached_property
    def seed(self) -> int:
        """Differs between passes, as good as always, and is the same on all ranks."""
        dropout = "" if self.call.dropout_seed is None else f".{self.call.dropout_seed}"
        part = f".part {self.part}" if self.part else ""
        return zlib.crc32((self.key + dropout + part).encode(), zlib.crc32(self.call.digest))

    def of_part(self, part: int) -> PassLabel:
        """The label of the same pass, for one part of the heads."""
        return replace(self, part=part)

    def round(self, what: What, number: int) -> RoundLabel:
        """The label of one round's messages."""
        return RoundLabel(self, what, number)

    def __str__(self) -> str:
        call = self.call
        details = [f"call {call.number}"]
        if call.recomputation:
            details.append(f"recomputation {call.recomputation}")
        if self.number:
            details.append(f"backward pass {self.number}")
        if self.part:
            details.append(f"part {self.part} of the heads")
        if call.dropout_seed is not None:
            details.append(f"dropout_seed {call.dropout_seed}")
        return f"the {self.direction} of {call.what} ({', '.join(details)})"


@dataclass(frozen=True)
class RoundLabel:
    """The messages of one kind in one round of a pass.

    >>> call = CallLabel("attention under mask 'sliding'", b"", 3)
    >>> str(call.passing("forward").round("rows", 2))
    "round 2 of the forward of attention under mask 'sliding' (call 3)"
    >>> str(call.passing("backward").round("gradients", 0))
    "round 0 of the gradients of attention under mask 'sliding' (call 3)"
    """

    pass_: PassLabel
    what: What
    number: int
    """Of the round, from 0 on."""

    @cached_property
    def tag(self) -> int:
        """31 bits that differ between labels, as good as always, and are the same on all ranks."""
        step = len(_WHATS) * self.number + _WHATS.index(self.what) + 1
        return (self.pass_.seed + step * _SPREAD) & _TAG_BITS

    def __str__(self) -> str:
        named = str(self.pass_)
        if self.what == "gradients":
            named = named.replace("the backward of", "the gradients of", 1)
        if self.what == "swap":
            return f"all-to-all {self.number} of {named}"
        return f"round {self.number} of {named}"
