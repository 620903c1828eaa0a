"""Lanes: process groups of their own for collectives, which gloo matches by nothing but order.

Two ranks that come to a gloo collective in different calls would mix their rows, or end with an
abort if sizes differ. So a rank that comes to one says on the board which, and goes on if nobody
has said otherwise: no waiting, but a look at the store. (NCCL's collectives are not guarded this
way: see `digests.py`.) A rank that has to leave a collective before its end breaks its lane, and
whoever comes to it next makes a new one together with the others.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from flexcp.comm.agreement import Statement
from flexcp.comm.calls import Calls
from flexcp.comm.labels import PassLabel, RoundLabel
from flexcp.errors import PeerError

_GATES = 32
"""Collectives between two uses of one entry of the board; no rank is so far ahead of another."""
_BROKEN = "broken"


@dataclass(eq=False)
class Lane:
    """A group for the collectives of some ranks."""

    group: dist.ProcessGroup
    calls: Calls
    name: str
    """Of its ranks and of how often it was made anew."""
    guarded: bool
    _passed: list[str] = field(default_factory=lambda: [""] * _GATES)
    """What this rank has said at each entry, last."""
    _number: int = 0

    def enter(self, label: RoundLabel) -> bool:
        """Says that this rank comes to a collective; False if the lane is broken.

        Raises if another rank has come to another one.
        """
        if not self.guarded:
            return True
        gate = self._number % _GATES
        said = f"{self._number}|{label.tag}|{label.pass_.key}|{label}"
        key = f"lane/{self.name}/{gate}"
        found = self.calls.board.swap(key, self._passed[gate], said)
        if found == _BROKEN:
            return False
        if found != said:
            failure = self.calls.failure(label.pass_, str(label))
            if failure is not None:
                raise failure  # the others are right to be elsewhere
            _, _, their_pass, their_label = found.split("|", 3)
            self.leave_broken()
            if self.calls.has_failed(their_pass):
                return False  # those who are there still will hear of it
            raise self._in_another(label, their_pass, their_label)
        self._passed[gate] = said
        self._number += 1
        return True

    def leave_broken(self) -> None:
        """Says that a collective of the lane will never end."""
        if self.guarded:
            for gate in range(_GATES):
                self.calls.board.write(f"lane/{self.name}/{gate}", _BROKEN)

    def _in_another(self, label: RoundLabel, their_pass: str, their_label: str) -> PeerError:
        """The error of a rank that comes to another collective; it is told to those who wait."""
        own = f"rank {self.calls.rank} is in {label} while others are in {their_label}"
        self.calls.say(their_pass, Statement(failed=own))
        return PeerError(
            "all ranks to come to the same collective",
            own,
            "make the same calls, forward and backward, in the same order on every rank",
        )


class Lanes:
    """The lanes of one process group, by the ranks that share them."""

    def __init__(
        self, calls: Calls, group: Callable[[], dist.ProcessGroup], seconds: float
    ) -> None:
        self._calls, self._group = calls, group
        self._timeout = datetime.timedelta(seconds=seconds)
        self._lanes: dict[tuple[tuple[int, ...], str], Lane] = {}

    def enter(self, ranks: tuple[int, ...], device: str, guarded: bool, label: RoundLabel) -> Lane:
        """The lane in which some ranks of the group, this one among them, come to a collective."""
        lane = self._lanes.get((ranks, device))
        if lane is not None and lane.enter(label):
            return lane
        generation = 0 if lane is None else int(lane.name.rsplit(".", 1)[1]) + 1
        lane = self._make(ranks, device, guarded, generation, label.pass_)
        self._lanes[ranks, device] = lane
        if not lane.enter(label):
            raise self._broken_again(label)
        return lane

    def _make(
        self,
        ranks: tuple[int, ...],
        device: str,
        guarded: bool,
        generation: int,
        label: PassLabel,
    ) -> Lane:
        calls, group = self._calls, self._group()
        name = f"{device}:{','.join(map(str, ranks))}.{generation}"
        if not guarded and len(ranks) == calls.size:
            return Lane(group, calls, name, guarded)
        self._gather(ranks, f"lane/{name}", label)
        own = dist.new_group(
            [dist.get_global_rank(group, rank) for rank in ranks],
            timeout=self._timeout,
            backend="gloo" if device == "cpu" else "nccl",
            use_local_synchronization=True,
        )
        return Lane(own, calls, name, guarded)

    def _gather(self, ranks: tuple[int, ...], key: str, label: PassLabel) -> None:
        """Waits until all have come to make a lane: they have to make it together."""
        calls, board = self._calls, self._calls.board
        board.write(f"{key}/came/{calls.rank}", "yes")

        def missing() -> list[int]:
            return [rank for rank in ranks if board.read(f"{key}/came/{rank}") is None]

        calls.wait_until(lambda: not missing(), label, missing)

    def _broken_again(self, label: RoundLabel) -> PeerError:
        return PeerError(
            f"all ranks to come to {label}",
            "one that left before the others came",
            "make the same calls in the same order on every rank",
        )
