"""What a transport does, whether its ranks are processes or threads of one.

Every call is made by all ranks that take part. Tensors are contiguous. Both ends of a message know
its size from the plan, and its label from the call that they are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from flexcp.comm.calls import Calls
from flexcp.comm.labels import RoundLabel

Messages = Sequence[tuple[int, Tensor]]
"""Of a round: to or from which rank, and the tensor that is sent or filled."""


class Pending(Protocol):
    """Transfers on their way."""

    def wait(self) -> None:
        """Returns once all has arrived, and what was sent may be overwritten.

        On a GPU it returns at once: it is the current stream that waits.
        """
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

    @property
    def calls(self) -> Calls:
        """What the ranks do together, counted alike on all of them."""
        ...

    def exchange(self, sends: Messages, receives: Messages, *, label: RoundLabel) -> Pending:
        """Starts the transfers of a round between pairs of ranks, and returns at once."""
        ...

    def all_gather(self, out: Tensor, x: Tensor, *, label: RoundLabel) -> Pending:
        """Starts to gather tensors of one shape: out [ranks, *x.shape], by rank."""
        ...

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        takes: Sequence[int],
        gives: Sequence[int],
        ranks: Sequence[int],
        *,
        label: RoundLabel,
    ) -> Pending:
        """Starts to send a part of x to each of `ranks`, this one included, and to fill out.

        Both tensors are flat, with the parts in the order of the ranks; `takes` and `gives` are
        their numbers of elements.
        """
        ...
