"""What a transport does, whether its ranks are processes or threads of one.

Tensors are contiguous. What comes is put into given buffers: both ends know its size from the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from flexcp.comm.agreement import Agreement
from flexcp.comm.labels import MessageLabel

Sends = Sequence[tuple[int, Tensor]]
"""Messages of a round that this rank sends: to which rank, and what."""
Receives = Sequence[tuple[int, Tensor]]
"""Messages of a round that this rank gets: from which rank, and where to."""


class Pending(Protocol):
    """Transfers on their way."""

    def wait(self) -> None:
        """Returns once all has arrived in its buffer, and what is sent may be overwritten."""
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

    def exchange(self, sends: Sends, receives: Receives, *, label: MessageLabel) -> Pending:
        """Starts the transfers of a round, and returns at once.

        Args:
            sends: Rank and tensor of each message.
            receives: Rank and buffer of each message to come.
            label: Names the round; messages only match within one label.
        """
        ...

    def all_gather(self, out: Tensor, x: Tensor, *, label: MessageLabel) -> Pending:
        """Starts to gather the tensors of all ranks, of equal shapes, into [ranks, *x.shape]."""
        ...

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        takes: Sequence[int],
        gives: Sequence[int],
        ranks: Sequence[int],
        *,
        label: MessageLabel,
    ) -> Pending:
        """Starts to swap parts of flat tensors: so many elements from and to each of `ranks`."""
        ...

    def gather_parts(self, x: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """The tensors of all ranks, by rank; `shapes` are theirs."""
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
