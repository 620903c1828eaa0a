"""The transport between processes: torch.distributed, asynchronous.

Gloo's messages carry tags; NCCL's carry digests behind the rows (`digests.py`). Collectives are
torch's own, in lanes (`lanes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor

from flexcp.comm.faults import names_of, ranks_to_blame, reason_of, too_late
from flexcp.comm.interface import Messages, Pending
from flexcp.comm.labels import RoundLabel
from flexcp.comm.lanes import Lane
from flexcp.comm.process_calls import ProcessCalls, calls_of
from flexcp.comm.waiting import TransferError
from flexcp.errors import FlexCPError, PeerError

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(eq=False)
class _Nothing:
    """A round without messages."""

    def wait(self) -> None:
        """Returns at once."""


@dataclass(eq=False)
class _InFlight:
    """Messages between this rank and others, which a thread waits for."""

    transport: ProcessTransport
    works: Sequence[tuple[tuple[str, int], Any]]
    """"send", "receive" or "exchange" with the peer, and torch's handle."""
    kept: Sequence[Tensor]
    """Memory that the transfers use."""
    label: RoundLabel
    lane: Lane | None = None

    def __post_init__(self) -> None:
        self._waiting = self.transport.calls.waiters.wait_for(self.works)

    def wait(self) -> None:
        """Returns once all has arrived; raises if it never will."""
        calls, label = self.transport.calls, self.label
        try:
            calls.wait(self._waiting.done_within, label.pass_, str(label), self._needs)
        except TransferError as failure:
            what, peer = failure.blame
            error = failure.__cause__ or failure
            with suppress(RuntimeError):  # the store may have gone with the process that serves it
                told = calls.failure(label.pass_, str(label))
                if told is not None:
                    raise told from error
            raise self.transport.lost(peer, what, label, error) from error
        except PeerError:
            self._break()
            raise
        except RuntimeError as error:
            self._break()
            what, peer = self.works[0][0]
            raise self.transport.lost(peer, what, label, error) from error

    def _break(self) -> None:
        if self.lane is not None:
            self.lane.leave_broken()

    def _needs(self) -> list[tuple[int, int]]:
        if self.lane is not None:
            members = dist.get_process_group_ranks(self.lane.group)
            ranks = {dist.get_group_rank(self.transport.group, rank) for rank in members}
        else:
            ranks = {self.transport.group_ranks[peer] for (_, peer), _ in self.works}
        return [(rank, self.label.tag) for rank in ranks if rank != self.transport.calls.rank]


@dataclass(eq=False)
class _OnStream:
    """Messages of NCCL: the current stream waits for them, and the host does not."""

    works: Sequence[Any]
    after: Callable[[], None]
    kept: Sequence[Tensor]
    """Memory that the transfers use."""

    def wait(self) -> None:
        """Makes the current stream wait, and what came be compared behind it."""
        for work in self.works:
            work.wait()
        self.after()


@dataclass(eq=False)
class ProcessTransport:
    """How the ranks of a process group reach each other.

    Ranks are counted within `members`, in the order of the mesh.
    """

    group: dist.ProcessGroup
    """The group that messages travel in; it holds all members."""
    members: tuple[int, ...]
    """Global rank of each rank of the mesh, row by row."""
    rank: int
    """This rank."""

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

    @cached_property
    def calls(self) -> ProcessCalls:
        """What the ranks of the group do together, counted alike on all of them."""
        return calls_of(self.group)

    @cached_property
    def group_ranks(self) -> tuple[int, ...]:
        """The rank within the group of each rank of the mesh."""
        return tuple(dist.get_group_rank(self.group, member) for member in self.members)

    def exchange(self, sends: Messages, receives: Messages, *, label: RoundLabel) -> Pending:
        """Starts the transfers of a round between pairs of ranks, and returns at once."""
        # A message without elements is not sent: both ends know that it would be empty.
        sends = [(peer, x.detach()) for peer, x in sends if x.numel()]
        receives = [(peer, x) for peer, x in receives if x.numel()]
        calls, tag, ranks = self.calls, label.tag, self.group_ranks
        calls.waits.begin_step(tag)
        if not sends and not receives:
            return _Nothing()
        if not self.carries_tags((sends or receives)[0][1]):
            return self._exchange_on_stream(sends, receives, label)
        works: list[tuple[tuple[str, int], Any]] = []
        peer = self.rank
        try:
            for peer, x in receives:
                works.append((("receive", peer), self.group.recv([x], ranks[peer], tag)))
            for peer, x in sends:
                works.append((("send", peer), self.group.send([x], ranks[peer], tag)))
        except RuntimeError as error:
            raise self.lost(peer, "exchange", label, error) from error
        return _InFlight(self, works, [x for _, x in (*sends, *receives)], label)

    def carries_tags(self, x: Tensor) -> bool:
        """Whether messages of such tensors match by tags: gloo's do, NCCL's do not."""
        return not x.is_cuda

    def _exchange_on_stream(
        self, sends: Messages, receives: Messages, label: RoundLabel
    ) -> Pending:
        digests, like = self.calls.digests, (sends or receives)[0][1]
        own = digests.of(label, like)
        came = own.new_empty(len(receives))
        ops = []
        for i, (peer, x) in enumerate(receives):
            for y in (x, came[i : i + 1]):
                ops.append(dist.P2POp(dist.irecv, y, self.members[peer], self.group))
        for peer, x in sends:
            for y in (x, own):
                ops.append(dist.P2POp(dist.isend, y, self.members[peer], self.group))
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self.lost(ops[0].peer, "exchange", label, error) from error
        peers = [peer for peer, _ in receives]
        kept = [own, *(x for _, x in (*sends, *receives))]
        return _OnStream(works, lambda: digests.compare(came, label, peers), kept)

    def all_gather(self, out: Tensor, x: Tensor, *, label: RoundLabel) -> Pending:
        """Starts to gather tensors of one shape: out [ranks, *x.shape], by rank."""

        def start(group: dist.ProcessGroup) -> Any:
            return _all_gather(out.view(-1), x.view(-1), group=group, async_op=True)

        return self._collective(range(self.world_size), (out, x), label, start)

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

        def start(group: dist.ProcessGroup) -> Any:
            return dist.all_to_all_single(
                out, x, list(takes), list(gives), group=group, async_op=True
            )

        return self._collective(ranks, (out, x), label, start)

    def _collective(
        self,
        ranks: Sequence[int],
        tensors: tuple[Tensor, Tensor],
        label: RoundLabel,
        start: Callable[[dist.ProcessGroup], Any],
    ) -> Pending:
        """A collective of some ranks, in the order of their lane."""
        out, x = tensors
        places = tuple(self.group_ranks[rank] for rank in ranks)
        assert list(places) == sorted(places), "collectives go by the order of the group"
        lane = self.calls.lanes.enter(places, x.device.type, self.carries_tags(x), label)
        self.calls.waits.begin_step(label.tag)
        try:
            work = start(lane.group)
        except RuntimeError as error:
            raise self.lost(self.rank, "exchange", label, error) from error
        if lane.guarded:
            return _InFlight(self, [(("exchange", self.rank), work)], tensors, label, lane)
        # A tiny all-gather behind it says whose rows they were.
        digests = self.calls.digests
        own = digests.of(label, out)
        came = own.new_empty(len(places))
        behind = _all_gather(came, own, group=lane.group, async_op=True)
        return _OnStream([work, behind], lambda: digests.compare(came, label, ranks), [out, x, own])

    def lost(self, peer: int, what: str, label: RoundLabel, error: BaseException) -> PeerError:
        """The error for a peer that did not answer, maybe because another rank has stopped."""
        blamed = self._blamed(error, None if what == "exchange" else peer)
        if self.rank in blamed:
            return too_late(self.rank, label, error)
        verb = {"receive": "send", "send": "take"}.get(what, "exchange")
        who = f"rank {peer}"
        if blamed and blamed != [peer]:
            who, verb = names_of(blamed), "exchange"
        elif what == "exchange" and not blamed:
            who = "all ranks"
        return PeerError(
            f"{who} to {verb} what the plan says in {label}",
            f"no answer on rank {self.rank}: {reason_of(error)}",
            f"look at the output of {who}: it has ended, raised, or is not in the same call",
        )

    def _blamed(self, error: BaseException, peer: int | None) -> list[int]:
        """Ranks of the mesh that others wait for; this one, for `peer`, if that is known."""
        if peer is not None:
            peer = self.group_ranks[peer]
        found = ranks_to_blame(self.group, error, peer)
        everywhere = [dist.get_global_rank(self.group, rank) for rank in found]
        return [self.members.index(rank) for rank in everywhere if rank in self.members]
