"""Process groups: that of a mesh, and those that collectives go through.

Gloo matches collectives by nothing but their order. Two ranks that come to one in different calls
would mix their rows, or end with an abort if sizes differ. So collectives have groups of their own,
lanes; a rank that comes to one says in the store which collective it is, and goes on if nobody has
said otherwise: no waiting, but a look at the store. (NCCL's collectives are not guarded this way:
see `digests.py`.) A rank that has to leave a collective before its end breaks its lane, and whoever
comes to it next makes a new one together with the others.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from flexcp.comm.agreement import Statement
from flexcp.comm.faults import answered
from flexcp.comm.labels import PassLabel, RoundLabel
from flexcp.comm.process_calls import ProcessCalls
from flexcp.errors import FlexCPError, peer_error

_GATES = 32
"""Collectives between two uses of one entry of the board; no rank is so far ahead of another."""
_BROKEN = "broken"


@dataclass(eq=False)
class Lane:
    """A group for the collectives of some ranks."""

    group: dist.ProcessGroup
    calls: ProcessCalls
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
        key = f"flexcp/lane/{self.name}/{gate}"
        found: str = self.calls.store.compare_set(key, self._passed[gate], said).decode()
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
                self.calls.store.set(f"flexcp/lane/{self.name}/{gate}", _BROKEN)

    def _in_another(self, label: RoundLabel, their_pass: str, their_label: str) -> FlexCPError:
        """The error of a rank that comes to another collective; it is told to those who wait."""
        own = f"rank {self.calls.rank} is in {label} while others are in {their_label}"
        self.calls.say(their_pass, Statement(failed=own))
        return peer_error(
            "all ranks to come to the same collective",
            own,
            "make the same calls, forward and backward, in the same order on every rank",
        )


def make_lane_group(
    calls: ProcessCalls,
    group: dist.ProcessGroup,
    ranks: tuple[int, ...],
    device: str,
    broken: str | None,
    label: PassLabel,
) -> tuple[str, dist.ProcessGroup]:
    """The name and the group of a lane of some ranks of a group, which make it together.

    Args:
        calls: The calls of the group.
        group: The group itself, which NCCL's lane of all its ranks is.
        ranks: Who shares the lane, counted within the group.
        device: "cpu" or "cuda".
        broken: The name of the lane that it replaces, if there is one.
        label: The pass in which it is made.
    """
    generation = 0 if broken is None else int(broken.rsplit(".", 1)[1]) + 1
    name = f"{device}:{','.join(map(str, ranks))}.{generation}"
    if device != "cpu" and len(ranks) == calls.size:
        return name, group
    _wait_for_all(calls, ranks, f"lane/{name}/{label.key}", label)
    with answered(group, f"making a group for the collectives of {label}"):
        made = dist.new_group(
            [dist.get_global_rank(group, rank) for rank in ranks],
            timeout=datetime.timedelta(seconds=calls.timeout),
            backend="gloo" if device == "cpu" else "nccl",
            use_local_synchronization=True,
        )
    return name, made


def _wait_for_all(calls: ProcessCalls, ranks: tuple[int, ...], key: str, label: PassLabel) -> None:
    """Returns once all have come to make a lane, in the same pass."""
    calls.board.write(f"{key}/came/{calls.rank}", "yes")

    def missing() -> list[int]:
        return [rank for rank in ranks if calls.board.read(f"{key}/came/{rank}") is None]

    calls.wait_until(lambda: not missing(), label, missing)
    failure = calls.failure(label, str(label))
    if failure is not None:  # one of them has left again
        raise failure


def group_of_mesh(mesh: Any) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    """The group of a DeviceMesh of one or two dimensions, and the global rank of each rank.

    Two dimensions of three need a group that the mesh does not have yet: it is what
    `mesh._flatten()` makes, once, so all ranks of the larger mesh have to come here together.
    """
    members = tuple(int(r) for r in mesh.mesh.reshape(-1).tolist())
    if mesh.ndim == 1:
        return mesh.get_group(), members
    if len(members) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world, members
    if mesh.mesh_dim_names:
        return mesh._flatten().get_group(), members
    raise FlexCPError(
        "a mesh whose dimensions have names, since it does not hold every process",
        f"a mesh of shape {tuple(mesh.shape)} over ranks {members}",
        "make it with init_device_mesh(..., mesh_dim_names=...), and pass a part of it",
    )
