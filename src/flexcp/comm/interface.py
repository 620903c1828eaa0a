"""What a transport does, whether its ranks are processes or threads of one.

Every call is made by all ranks that take part, in the same order. Tensors are contiguous. Receives
are given the shape that will come: both ends know it from the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from flexcp.comm.agreement import Agreement
from flexcp.comm.labels import MessageLabel

Sends = Sequence[tuple[int, Tensor]]
"""Messages of a round that this rank sends: to which rank, and what."""
Receives = Sequence[tuple[int, Sequence[int]]]
"""Messages of a round that this rank gets: from which rank, and of which shape."""


class Pending(Protocol):
    """Transfers on their way."""

    def wait(self) -> list[Tensor]:
        """Returns once all have arrived: the received tensors, in the order of the receives."""
        ...


@runtime_checkable
class Transport(Protocol):
    """How the ranks of one mesh reach each other."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks."""
        ...

    def exchange(
        self, sends: Sends, receives: Receives, *, like: Tensor, label: MessageLabel
    ) -> Pending:
        """Starts the transfers of a round, and returns at once.

        Args:
            sends: Rank and tensor of each message.
            receives: Rank and shape of each message to come.
            like: A tensor with the type and device of what comes.
            label: Names the round; messages only match within one label.
        """
        ...

    def all_gather(self, x: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """The tensors of all ranks, by rank; `shapes` are theirs."""
        ...

    def all_to_all(
        self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Sequence[int]
    ) -> list[Tensor]:
        """One tensor to each of `ranks`, one from each; `shapes` are of those that come."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, added up in order of rank."""
        ...

    def compare(self, agreement: Agreement) -> None:
        """Raises on every rank if what the ranks are about to do differs; before data moves."""
        ...

    def refuse(self, why: str) -> None:
        """Tells the ranks that compare next that this one can't do what they do; does not wait."""
        ...

    def refusals(self, ranks: Sequence[int]) -> list[str]:
        """Why these ranks refused, after their bytes were `flexcp.comm.agreement.REFUSED`."""
        ...

    def all_agree(self, text: str) -> list[str]:
        """The texts of all ranks, by rank: to find out who differs before data moves."""
        ...

    def barrier(self) -> None:
        """Returns once all ranks have come here."""
        ...
