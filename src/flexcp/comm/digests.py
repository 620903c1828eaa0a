"""Digests that travel with the rows, where the backend's messages carry no tags.

NCCL matches messages by their order alone. So each message is followed by the tag of its label, in
the same launch, and the receiver compares it on the device. Nobody waits for that: what it found is
copied to the host behind the work that follows, and raised at the next call that finds it there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexcp.comm.labels import RoundLabel
from flexcp.errors import peer_error


@dataclass(frozen=True, eq=False)
class _DigestsThatCame:
    """What came with the messages of one round, on its way to the host."""

    label: RoundLabel
    peers: Sequence[int]
    differs: Any
    """bool [peers], in memory that the host reads as it is."""
    event: Any
    """Says whether it has arrived; None if it is there at once."""
    kept: Tensor
    """Keeps that memory."""


class Digests:
    """The comparisons of one rank."""

    def __init__(self) -> None:
        self.pending: deque[_DigestsThatCame] = deque()
        """What was not looked at yet, in order."""

    def of(self, label: RoundLabel, like: Tensor) -> Tensor:
        """int64 [1] What is sent after every message of a round."""
        return torch.full((1,), label.tag, dtype=torch.int64, device=like.device)

    def compare(self, came: Tensor, label: RoundLabel, peers: Sequence[int]) -> None:
        """Compares what came after the messages of some peers, int64 [peers]; does not wait."""
        differs = came != label.tag
        if differs.is_cuda:
            host = torch.empty(differs.shape, dtype=torch.bool, pin_memory=True)
            host.copy_(differs, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            host, event = differs, None
        self.pending.append(_DigestsThatCame(label, tuple(peers), host.numpy(), event, host))

    def raise_if_different(self) -> None:
        """Raises if some message was one of another call; looks at what has arrived, no more."""
        while self.pending and (self.pending[0].event is None or self.pending[0].event.query()):
            found = self.pending.popleft()
            if found.differs.any():
                self.pending.clear()
                ranks = [p for p, wrong in zip(found.peers, found.differs, strict=True) if wrong]
                call = found.label.pass_.call
                raise peer_error(
                    f"rows of {found.label} from ranks {ranks}, under the plan and kind of call "
                    f"{call.digest.hex()}",
                    "rows of another call: what was computed from them is wrong",
                    "make the same calls, forward and backward, in the same order on every rank",
                )
