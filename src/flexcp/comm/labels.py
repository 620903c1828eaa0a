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
class RoundLabel(MessageLabel):
    """One round of attention under a plan.

    >>> str(RoundLabel("forward", "sliding", 3))
    "round 3 of the forward of attention under mask 'sliding'"
    >>> RoundLabel("forward", "", 3).is_forward
    True
    """

    what: Literal["forward", "backward", "gradients"]
    """KV rows of the forward or of the backward pass, or gradients on their way to the owners."""
    mask: str
    """The name of the plan's mask; "" if it has one only."""
    number: int
    """Of the round, from 0 on."""

    @property
    def is_forward(self) -> bool:
        """Whether the messages bring KV rows in a forward pass."""
        return self.what == "forward"

    def __str__(self) -> str:
        mask = f" under mask {self.mask!r}" if self.mask else ""
        return f"round {self.number} of the {self.what} of attention{mask}"


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
