"""The rounds of a ring as all-to-alls, so that tools which count collectives see the traffic.

All ranks take part in every collective, so plans in which a rank has no tokens travel pairwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.comm.interface import Messages, Pending
from flexcp.comm.labels import RoundLabel
from flexcp.comm.process import ProcessTransport
from flexcp.comm.process_calls import ProcessCalls


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
class CollectiveTransport:
    """Rounds as collectives of torch; everything else as its pairwise transport does it."""

    pairs: ProcessTransport

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
