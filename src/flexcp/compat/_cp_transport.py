"""The rounds of a plan as collectives, so that tools which count collectives see the traffic.

A ring's round becomes one all-to-all, and gathering K and V becomes one all-gather. All ranks take
part in every collective, so plans in which a rank has no tokens travel pairwise instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed import ProcessGroup

from flexcp.comm.faults import gone_ranks, names_of
from flexcp.comm.interface import Pending
from flexcp.comm.process import ProcessTransport
from flexcp.errors import FlexCPError


@contextmanager
def answered(group: ProcessGroup, label: str) -> Iterator[None]:
    """Says which collective failed and who is gone, if one does: torch's message says only how."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        gone = gone_ranks(group)
        raise FlexCPError(
            f"{names_of(gone) if gone else f'all {group.size()} ranks'} to take part in {label}",
            f"no answer on rank {group.rank()}: {reason}",
            f"look at the output of {names_of(gone)}, which ended before the others"
            if gone
            else "look at the output of the other ranks: one has ended, raised, or is not in the "
            "same call",
        ) from error


@dataclass(eq=False)
class _ArrivingCollective:
    """A collective on its way."""

    moving: Tensor
    sizes: list[int]
    shapes: list[Sequence[int]]
    pairs: ProcessTransport
    label: str

    def wait(self) -> list[Tensor]:
        """The received tensors, in the order of the receives."""
        with answered(self.pairs.group, self.label):
            whole = funcol.wait_tensor(self.moving)
        parts = whole.split(self.sizes)
        return [
            part[: _elements(s)].view(*s) for part, s in zip(parts, self.shapes, strict=True) if s
        ]


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

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Sequence[int]]],
        *,
        like: Tensor,
        label: str,
    ) -> Pending:
        """Starts the transfers of a round, and returns at once."""
        if not sends and not receives:
            return self.pairs.exchange([], [], like=like, label=label)
        to, came = dict(sends), dict(receives)
        everyone = range(self.world_size)
        empty = like.new_empty(0)
        whole = torch.cat([to[r].detach().reshape(-1) if r in to else empty for r in everyone])
        given = [to[r].numel() if r in to else 0 for r in everyone]
        taken = [_elements(came[r]) if r in came else 0 for r in everyone]
        with answered(self.pairs.group, label):
            moving = funcol.all_to_all_single(whole, taken, given, self.pairs.group)
        shapes = [came.get(r, ()) for r in everyone]
        return _ArrivingCollective(moving, taken, shapes, self.pairs, label)

    def all_gather(self, x: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """The tensors of all ranks, by rank."""
        return self.pairs.all_gather(x, shapes)

    def all_to_all(
        self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Sequence[int]
    ) -> list[Tensor]:
        """One tensor to each of `ranks`, one from each."""
        return self.pairs.all_to_all(parts, shapes, ranks)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, added up in order of rank."""
        return self.pairs.all_reduce(x)

    def all_bytes(self, mine: bytes) -> list[bytes]:
        """Bytes of all ranks, by rank."""
        return self.pairs.all_bytes(mine)

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


@dataclass(eq=False)
class GatheringTransport(CollectiveTransport):
    """As above, but a round in which everybody gets the same is one all-gather."""

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Sequence[int]]],
        *,
        like: Tensor,
        label: str,
    ) -> Pending:
        """Starts the transfers of a round, and returns at once."""
        if " of the forward of " not in label or not sends:
            return super().exchange(sends, receives, like=like, label=label)
        own = sends[0][1].detach().reshape(-1)
        came = dict(receives)
        most = max(own.numel(), *(_elements(shape) for shape in came.values()))
        padded = torch.cat([own, own.new_zeros(most - own.numel())])
        with answered(self.pairs.group, label):
            moving = funcol.all_gather_single(padded, 0, self.pairs.group)
        shapes = [came.get(r, ()) for r in range(self.world_size)]
        return _ArrivingCollective(moving, [most] * self.world_size, shapes, self.pairs, label)


def backward_in_step(out: Tensor, transport: CollectiveTransport) -> Tensor:
    """The same tensor; before its gradient moves anything, ranks compare which one it is."""
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


def _elements(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
