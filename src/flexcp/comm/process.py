"""The transport between processes: torch.distributed, pairwise and asynchronous."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.comm.collectives import PairwiseCollectives
from flexcp.comm.faults import names_of, ranks_to_blame, reason_of, too_late
from flexcp.comm.interface import Pending, Receives, Sends
from flexcp.comm.labels import CollectiveName, MessageLabel
from flexcp.errors import FlexCPError


def tag_of(label: MessageLabel) -> int:
    """31 bits that differ between labels, as good as always, and are the same on all ranks."""
    return zlib.crc32(repr(label).encode()) >> 1


@dataclass(eq=False)
class _InFlight:
    """Messages of one round between this rank and others."""

    transport: ProcessTransport
    works: list[tuple[str, int, Any]]
    """"send" or "receive", the peer, and torch's handle."""
    kept: list[Tensor]
    """What is being sent and received; must live until it is."""
    label: MessageLabel

    def wait(self) -> None:
        for what, peer, work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self.transport.lost(peer, what, self.label, error) from error


@dataclass(eq=False)
class ProcessTransport(PairwiseCollectives):
    """How the ranks of a process group reach each other.

    Ranks are counted within `members`, in the order of the mesh. The same calls serve gloo and
    NCCL.
    """

    group: dist.ProcessGroup
    """The group that messages travel in; it holds all members."""
    members: tuple[int, ...]
    """Global rank of each rank of the mesh, row by row."""
    rank: int
    """This rank."""
    moment: ClassVar[float] = 0.5
    bytes_received: int = 0
    """What has come so far."""
    _calls: dict[tuple[CollectiveName, tuple[int, ...]], int] = field(default_factory=dict)
    _notes: list[Pending] = field(default_factory=list)

    @classmethod
    def of_mesh(cls, mesh: Any) -> ProcessTransport:
        """The transport of a DeviceMesh of one or two dimensions, or of such a part of one.

        Two dimensions of three need a group that the mesh does not have yet: it is what
        `mesh._flatten()` makes, once, so all ranks of the larger mesh have to come here together.
        """
        members = tuple(int(r) for r in mesh.mesh.reshape(-1).tolist())
        if mesh.ndim == 1:
            group = mesh.get_group()
        elif len(members) == dist.get_world_size():
            group = dist.group.WORLD
        elif mesh.mesh_dim_names:
            group = mesh._flatten().get_group()
        else:
            raise FlexCPError(
                "a mesh whose dimensions have names, since it does not hold every process",
                f"a mesh of shape {tuple(mesh.shape)} over ranks {members}",
                "make it with init_device_mesh(..., mesh_dim_names=...), and pass a part of it",
            )
        return cls(group, members, members.index(dist.get_rank()))

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return len(self.members)

    @property
    def device(self) -> torch.device:
        """NCCL moves CUDA tensors only."""
        return torch.device("cuda" if dist.get_backend(self.group) == "nccl" else "cpu")

    def exchange(self, sends: Sends, receives: Receives, *, label: MessageLabel) -> _InFlight:
        """Starts the transfers of a round, and returns at once."""
        kept = [x.detach().contiguous() for _, x in sends]
        received = [x for _, x in receives]
        tag = tag_of(label)  # no message of another round matches (but NCCL knows no tags)

        def operation(verb: Any, x: Tensor, peer: int) -> dist.P2POp:
            return dist.P2POp(verb, x, self.members[peer], self.group, tag)

        ops: list[tuple[str, int, Any]] = []
        for (peer, _), buffer in zip(receives, received, strict=True):
            ops.append(("receive", peer, operation(dist.irecv, buffer, peer)))
        for (peer, _), x in zip(sends, kept, strict=True):
            ops.append(("send", peer, operation(dist.isend, x, peer)))
        self.bytes_received += sum(x.numel() * x.element_size() for x in received)
        # A message without elements is not sent: both ends know that it would be empty.
        ops = [op for op in ops if op[2].tensor.numel()]
        works: list[Any] = []
        if ops:
            try:
                works = dist.batch_isend_irecv([op for _, _, op in ops])
            except RuntimeError as error:
                raise self.lost(ops[0][1], "exchange", label, error) from error
        if len(works) == 1 and len(ops) > 1:  # NCCL hands out one handle for the batch
            named = [("exchange", ops[0][1], works[0])]
        else:
            named = [(what, peer, w) for (what, peer, _), w in zip(ops, works, strict=True)]
        return _InFlight(self, named, [*received, *kept], label)

    def lost(self, peer: int, what: str, label: MessageLabel, error: BaseException) -> FlexCPError:
        """The error for a peer that did not answer, maybe because another rank has stopped."""
        blamed = self._blamed(error, None if what == "exchange" else peer)
        if self.rank in blamed:
            return too_late(self.rank, label, error)
        verb = {"receive": "send", "send": "take"}.get(what, "exchange")
        who = f"rank {peer}"
        if blamed and blamed != [peer]:
            who, verb = names_of(blamed), "exchange"
        return FlexCPError(
            f"{who} to {verb} what the plan says in {label}",
            f"no answer on rank {self.rank}: {reason_of(error)}",
            f"look at the output of {who}: it has ended, raised, or is not in the same call",
        )

    def _blamed(self, error: BaseException, peer: int | None) -> list[int]:
        """Ranks of the mesh that others wait for; this one, for `peer`, if that is known."""
        if peer is not None:
            peer = dist.get_group_rank(self.group, self.members[peer])
        found = ranks_to_blame(self.group, error, peer)
        everywhere = [dist.get_global_rank(self.group, rank) for rank in found]
        return [self.members.index(rank) for rank in everywhere if rank in self.members]
