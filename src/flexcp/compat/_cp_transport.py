"""Transports whose traffic tools that count collectives see as PyTorch's own.

Collectives are functional ones, as in PyTorch's context parallelism, and the rounds of a ring are
all-to-alls. All ranks take part in each, so rings in which a rank has no tokens travel pairwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.comm.faults import answered
from flexcp.comm.interface import Messages, Pending
from flexcp.comm.labels import RoundLabel
from flexcp.comm.process import ProcessTransport
from flexcp.comm.process_calls import ProcessCalls
from flexcp.errors import FlexCPError
from flexcp.torch_names import functional_collectives as funcol


@dataclass(eq=False)
class _RoundOnItsWay:
    """An all-to-all that brings the messages of a round."""

    pending: Pending
    parts: Sequence[Tensor]
    receives: Messages

    def wait(self) -> None:
        """Puts what came where it belongs."""
        self.pending.wait()
        for peer, buffer in self.receives:
            buffer.copy_(self.parts[peer].view(buffer.shape))


@dataclass(eq=False)
class _FunctionalWork:
    """A functional collective, whose result is put where it is wanted."""

    moving: Tensor
    out: Tensor

    def wait(self, _: object = None) -> None:
        """Returns once the result is there."""
        with torch.no_grad():
            self.out.copy_(torch.ops._c10d_functional.wait_tensor(self.moving))


class FunctionalTransport(ProcessTransport):
    """A transport whose collectives are torch's functional ones."""

    swaps_in_pairs = False

    def start_all_gather(self, out: Tensor, x: Tensor, group: dist.ProcessGroup) -> _FunctionalWork:
        """A functional all-gather."""
        size, name = group.size(), group.group_name
        moving = torch.ops._c10d_functional.all_gather_into_tensor(x, size, name)
        return _FunctionalWork(moving, out)

    def start_all_to_all(
        self, out: Tensor, x: Tensor, takes: list[int], gives: list[int], group: dist.ProcessGroup
    ) -> _FunctionalWork:
        """A functional all-to-all."""
        moving = torch.ops._c10d_functional.all_to_all_single(x, takes, gives, group.group_name)
        return _FunctionalWork(moving, out)


@dataclass(eq=False)
class CollectiveTransport:
    """Rounds as collectives of torch; everything else as its pairwise transport does it."""

    pairs: ProcessTransport
    backward_calls: int = 0
    """How many backward passes have been prepared."""

    def next_backward(self) -> int:
        """The number of a backward pass that will follow."""
        self.backward_calls += 1
        return self.backward_calls - 1

    @property
    def rank(self) -> int:
        """This rank."""
        return self.pairs.rank

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return self.pairs.world_size

    @property
    def calls(self) -> ProcessCalls:
        """What the ranks do together, counted alike on all of them."""
        return self.pairs.calls

    def exchange(self, sends: Messages, receives: Messages, *, label: RoundLabel) -> Pending:
        """Starts the transfers of a round, and returns at once."""
        if not sends and not receives:
            return self.pairs.exchange([], [], label=label)
        to, come, everyone = dict(sends), dict(receives), range(self.world_size)
        like = (sends or receives)[0][1]
        whole = torch.cat([to[r].detach().reshape(-1) for r in everyone if r in to])
        gives = [to[r].numel() if r in to else 0 for r in everyone]
        takes = [come[r].numel() if r in come else 0 for r in everyone]
        out = like.new_empty(sum(takes))
        pending = self.pairs.all_to_all(out, whole, takes, gives, everyone, label=label)
        return _RoundOnItsWay(pending, out.split(takes), receives)

    def all_gather(self, out: Tensor, x: Tensor, *, label: RoundLabel) -> Pending:
        """Starts to gather tensors of one shape: out [ranks, *x.shape], by rank."""
        return self.pairs.all_gather(out, x, label=label)

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
        """Starts to send a part of x to each of `ranks`, this one included, and to fill out."""
        return self.pairs.all_to_all(out, x, takes, gives, ranks, label=label)


def backward_in_step(out: Tensor, transport: CollectiveTransport) -> Tensor:
    """`out` itself; before its gradient moves anything, ranks compare which backward it is.

    PyTorch's ring has one more all-to-all in its backward pass than ours needs: this is it.
    """
    number = transport.next_backward()
    stepped: Tensor = _InStep.apply(out, transport, number)  # type: ignore[no-untyped-call]
    return stepped


def compare_backward_passes(
    transport: CollectiveTransport, number: int, device: torch.device
) -> None:
    """Raises unless all ranks are about to run the same backward pass."""
    own = torch.full((transport.world_size,), number, device=device)
    ones = [1] * transport.world_size
    group = transport.pairs.group
    with answered(group, f"the beginning of backward pass {number}"):
        moving = funcol.all_to_all_single(own, ones, ones, group)
        numbers = funcol.wait_tensor(moving).tolist()
    if len(set(numbers)) > 1:
        raise FlexCPError(
            "all ranks to run the backward pass of the same attention",
            f"the calls {numbers} by rank, counted from the first",
            "run the same backward passes in the same order on every rank",
        )


class _InStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, transport: CollectiveTransport, number: int) -> Tensor:
        ctx.transport, ctx.number = transport, number
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        compare_backward_passes(ctx.transport, ctx.number, grad.device)
        return grad, None, None
