"""The rounds of a plan as collectives, so that tools which count collectives see the traffic.

A ring's round becomes one all-to-all, and gathering K and V becomes one all-gather. All ranks take
part in every collective, so plans in which a rank has no tokens travel pairwise instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from flexcp.comm.agreement import Agreement
from flexcp.comm.faults import answered
from flexcp.comm.interface import Pending, Receives, Sends
from flexcp.comm.labels import MessageLabel
from flexcp.comm.process import ProcessTransport
from flexcp.errors import FlexCPError


@dataclass(eq=False)
class _CollectiveReceives:
    """A collective on its way."""

    moving: Tensor
    sizes: list[int]
    buffers: list[Tensor | None]
    pairs: ProcessTransport
    label: MessageLabel

    def wait(self) -> None:
        """Puts what has come into its buffers."""
        with answered(self.pairs.group, self.label):
            whole = funcol.wait_tensor(self.moving)
        for part, buffer in zip(whole.split(self.sizes), self.buffers, strict=True):
            if buffer is not None:
                buffer.view(-1).copy_(part)


@dataclass(eq=False)
class CollectiveTransport:
    """Rounds as collectives of torch; everything else as its pairwise transport does it."""

    pairs: ProcessTransport
    backward_calls: int = field(default=0)
    """How many backward passes have begun."""

    @property
    def rank(self) -> int:
        """This rank."""
        return self.pairs.rank

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return self.pairs.world_size

    def exchange(self, sends: Sends, receives: Receives, *, label: MessageLabel) -> Pending:
        """Starts the transfers of a round, and returns at once."""
        if not sends and not receives:
            return self.pairs.exchange([], [], label=label)
        to, came = dict(sends), dict(receives)
        everyone = range(self.world_size)
        empty = next(iter([*to.values(), *came.values()])).new_empty(0)
        whole = torch.cat([to[r].detach().reshape(-1) if r in to else empty for r in everyone])
        given = [to[r].numel() if r in to else 0 for r in everyone]
        taken = [came[r].numel() if r in came else 0 for r in everyone]
        with answered(self.pairs.group, label):
            moving = funcol.all_to_all_single(whole, taken, given, self.pairs.group)
        buffers = [came.get(r) for r in everyone]
        return _CollectiveReceives(moving, taken, buffers, self.pairs, label)

    def all_gather(self, out: Tensor, x: Tensor, *, label: MessageLabel) -> Pending:
        """Starts to gather the tensors of all ranks."""
        with answered(self.pairs.group, label):
            moving = funcol.all_gather_single(x.reshape(-1), 0, self.pairs.group)
        return _CollectiveReceives(moving, [out.numel()], [out], self.pairs, label)

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
        """Starts to swap parts of flat tensors."""
        if len(ranks) < self.world_size:
            return self.pairs.all_to_all(out, x, takes, gives, ranks, label=label)
        with answered(self.pairs.group, label):
            moving = funcol.all_to_all_single(x, list(takes), list(gives), self.pairs.group)
        return _CollectiveReceives(moving, [out.numel()], [out], self.pairs, label)

    def gather_parts(self, x: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """The tensors of all ranks, by rank."""
        return self.pairs.gather_parts(x, shapes)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, added up in order of rank."""
        return self.pairs.all_reduce(x)

    def compare(self, agreement: Agreement) -> None:
        """Raises on every rank if what the ranks are about to do differs."""
        self.pairs.compare(agreement)

    def refuse(self, why: str) -> None:
        """Tells the ranks that compare next that this one can't do what they do."""
        self.pairs.refuse(why)

    def refusals(self, ranks: Sequence[int]) -> list[str]:
        """Why these ranks refused."""
        return self.pairs.refusals(ranks)

    def all_agree(self, text: str) -> list[str]:
        """The texts of all ranks, by rank."""
        return self.pairs.all_agree(text)

    def barrier(self) -> None:
        """Returns once all ranks have come here."""
        self.pairs.barrier()


def backward_in_step(out: Tensor, transport: CollectiveTransport) -> Tensor:
    """`out` itself; before its gradient moves anything, ranks compare which backward it is."""
    number = transport.backward_calls
    transport.backward_calls += 1
    stepped: Tensor = _InStep.apply(out, transport, number)  # type: ignore[no-untyped-call]
    return stepped


class _InStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, transport: CollectiveTransport, number: int) -> Tensor:
        ctx.transport, ctx.number = transport, number
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        transport: CollectiveTransport = ctx.transport
        own = torch.full((transport.world_size,), ctx.number, device=grad.device)
        ones = [1] * transport.world_size
        group = transport.pairs.group
        with answered(group, f"the beginning of backward pass {ctx.number}"):
            moving = funcol.all_to_all_single(own, ones, ones, group)
            numbers = funcol.wait_tensor(moving).tolist()
        if len(set(numbers)) > 1:
            raise FlexCPError(
                "all ranks to run the backward pass of the same attention",
                f"the calls {numbers} by rank, counted from the first",
                "run the same backward passes in the same order on every rank",
            )
        return grad, None, None
