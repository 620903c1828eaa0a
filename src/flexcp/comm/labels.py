"""Labels of messages: the step that they belong to, as data; text where a person reads it.

Two ranks exchange messages under equal labels, and no message is taken for one of another label.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MessageLabel(ABC):
    """Names the messages of one step. Labels are equal by value, on every rank alike."""

    @property
    def is_forward(self) -> bool:
        """Whether the messages bring KV rows in a forward pass."""
        return False

    @abstractmethod
    def __str__(self) -> str:
        """What errors call the step."""


@dataclass(frozen=True)
class CallLabel:
    """One call that all ranks make.

    >>> call = CallLabel("attention under mask 'sliding'", b"", 7)
    >>> str(call.passing("forward").round("rows", 3))
    "round 3 of the forward of attention under mask 'sliding'"
    """

    what: str
    """What errors call it."""
    digest: bytes
    """Of the plan and the kind of call."""
    number: int
    """Which call of the group, from 0 on."""
    recomputation: int = 0
    """0, or which recomputation of it (activation checkpointing)."""

    def passing(self, direction: Literal["forward", "backward"], number: int = 0) -> PassLabel:
        """One pass of the call; `number` says which backward of it."""
        return PassLabel(self, direction, number)


@dataclass(frozen=True)
class PassLabel:
    """One pass of a call."""

    call: CallLabel
    direction: Literal["forward", "backward"]
    number: int

    def round(self, what: Literal["rows", "gradients", "swap"], number: int) -> RoundLabel:
        """The messages of one round."""
        return RoundLabel(self, what, number)


@dataclass(frozen=True)
class RoundLabel(MessageLabel):
    """One round of a pass: KV rows, gradients on their way to the owners, or rows for heads."""

    pass_: PassLabel
    what: Literal["rows", "gradients", "swap"]
    number: int
    """Of the round, from 0 on."""

    @property
    def is_forward(self) -> bool:
        """Whether the messages bring KV rows in a forward pass."""
        return self.what == "rows" and self.pass_.direction == "forward"

    def __str__(self) -> str:
        names = {"rows": self.pass_.direction, "gradients": "gradients", "swap": "all_to_all"}
        return f"round {self.number} of the {names[self.what]} of {self.pass_.call.what}"


CollectiveName = Literal["all_gather", "all_to_all", "all_reduce", "barrier", "compare"]
"""Collectives that are made of pairwise messages; "compare" is what ranks do before a call."""


@dataclass(frozen=True)
class CollectiveLabel(MessageLabel):
    """One call of a collective.

    >>> str(CollectiveLabel("all_to_all", 2, ranks=(0, 3)))
    'all_to_all of ranks 0,3 #2'
    """

    name: CollectiveName
    """Which collective."""
    number: int
    """Which of its calls, from 1 on; ranks count alike."""
    ranks: tuple[int, ...] = ()
    """Who takes part; all, if empty."""
    is_reason: bool = False
    """Whether the message says why a rank refused, after a comparison."""

    def __str__(self) -> str:
        name: str = self.name
        if name == "compare":
            name = "round 0, in which ranks compare what they are about to do,"
        ranks = f" of ranks {','.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{name}{ranks} #{self.number}{' and why' if self.is_reason else ''}"
