"""The transport between processes: torch.distributed, asynchronous.

Gloo's messages carry tags; NCCL's carry digests behind the rows (`digests.py`). Collectives are
torch's own, in lanes (`lanes.py`), but for gloo's all-to-all.

Gloo's handles can neither be asked whether they are done nor told to give up, and one that is
waited for too long closes every connection of the group. So each is waited for by a thread without
a limit, and the rank waits for the thread: with a limit, and open to news of other ranks.
"""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Self

import torch.distributed as dist
from torch import Tensor

from flexcp.comm import process_calls
from flexcp.comm.faults import lost
from flexcp.comm.interface import Messages, Pending
from flexcp.comm.labels import RoundLabel
from flexcp.comm.lanes import Lane, group_of_mesh, make_lane_group
from flexcp.comm.process_calls import ProcessCalls, calls_of
from flexcp.errors import FlexCPError, peer_error

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_FOREVER = datetime.timedelta(days=365)


class _Nothing:
    def wait(self) -> None:
        """Returns at once: it is a round without messages."""


class Waiters:
    """Idle threads that wait for transfers; one more is started if all are waiting."""

    def __init__(self) -> None:
        self.idle: deque[_Waiter] = deque()

    def wait_for(self, works: Sequence[tuple[tuple[str, int], Any]]) -> Waiting:
        """Begins to wait for torch's handles; each comes with what to blame if it fails."""
        try:
            waiter = self.idle.pop()
        except IndexError:
            waiter = _Waiter()
        waiter.start(works)
        return Waiting(self, waiter)


class Waiting:
    """Some transfers that a thread waits for."""

    def __init__(self, waiters: Waiters, waiter: _Waiter) -> None:
        self._waiters, self._waiter = waiters, waiter

    def done_within(self, seconds: float) -> bool:
        """Whether all have arrived; raises `TransferError` if one has failed.

        After that it must not be asked again. A thread stays with its transfers until they end.
        """
        waiter = self._waiter
        if not waiter.done.acquire(timeout=seconds):
            return False
        failure, waiter.failure = waiter.failure, None
        self._waiters.idle.append(waiter)
        if failure is not None:
            raise failure
        return True


class TransferError(Exception):
    """A transfer that has failed: torch's error is the cause."""

    def __init__(self, blame: tuple[str, int]) -> None:
        super().__init__(f"{blame[0]}, rank {blame[1]}")
        self.blame = blame  # what was to be done, and the peer


class _Waiter:
    def __init__(self) -> None:
        self._begin = threading.Lock()
        self._begin.acquire()
        self.done = threading.Lock()
        self.done.acquire()
        self.failure: TransferError | None = None
        self._works: Sequence[tuple[tuple[str, int], Any]] = ()
        threading.Thread(target=self._run, name="flexcp-waiter", daemon=True).start()

    def start(self, works: Sequence[tuple[tuple[str, int], Any]]) -> None:
        self._works = works
        self._begin.release()

    def _run(self) -> None:
        while True:
            self._begin.acquire()
            blame = ("exchange", -1)
            try:
                for blame, work in self._works:  # noqa: B007
                    work.wait(_FOREVER)
            except BaseException as error:
                self.failure = TransferError(blame)
                self.failure.__cause__ = error
            self._works = ()
            self.done.release()


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
        self._waiting = self.transport.waiters.wait_for(self.works)

    def wait(self) -> None:
        """Returns once all has arrived; raises if it never will."""
        calls, label, done_within = self.transport.calls, self.label, self._waiting.done_within
        try:
            if not done_within(process_calls.SLOW):
                calls.wait(done_within, label.pass_, str(label), self._needs)
        except TransferError as failure:
            what, peer = failure.blame
            error = failure.__cause__ or failure
            with suppress(RuntimeError):  # the store may have gone with the process that serves it
                told = calls.failure(label.pass_, str(label))
                if told is not None:
                    raise told from error
            raise lost(self.transport, peer, what, label, error) from error
        except FlexCPError:
            self._break()
            raise
        except RuntimeError as error:
            self._break()
            what, peer = self.works[0][0]
            raise lost(self.transport, peer, what, label, error) from error

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

    swaps_in_pairs: ClassVar[bool] = True
    """Whether an all-to-all of gloo is messages between pairs. Gloo's own asks for what it is to
    receive only behind what it sends, so that a slow link carries one direction after the other."""

    @classmethod
    def of_mesh(cls, mesh: Any) -> Self:
        """The transport of a DeviceMesh of one or two dimensions, or of such a part of one."""
        group, members = group_of_mesh(mesh)
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
    def waiters(self) -> Waiters:
        """Of all plans over the group: there may be a new one for every step."""
        return self.calls.derived.once(Waiters, Waiters)

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
        calls.waits.begun.append(tag)
        if not (sends or receives):
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
            raise lost(self, peer, "exchange", label, error) from error
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
            raise lost(self, ops[0].peer, "exchange", label, error) from error
        peers = [peer for peer, _ in receives]
        kept = [own, *(x for _, x in (*sends, *receives))]
        return _OnStream(works, lambda: digests.compare(came, label, peers), kept)

    def all_gather(self, out: Tensor, x: Tensor, *, label: RoundLabel) -> Pending:
        """Starts to gather tensors of one shape: out [ranks, *x.shape], by rank."""
        flat = (out.view(-1), x.view(-1))
        start = partial(self.start_all_gather, *flat)
        return self._collective(range(self.world_size), flat, label, start)

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
        if self.swaps_in_pairs and self.carries_tags(x):
            to = dict(zip(ranks, x.detach().split(list(gives)), strict=True))
            come = dict(zip(ranks, out.detach().split(list(takes)), strict=True))
            come.pop(self.rank).copy_(to.pop(self.rank))
            nearest = sorted(to, key=lambda peer: (peer - self.rank) % self.world_size)
            sends, receives = ([(peer, x[peer]) for peer in nearest] for x in (to, come))
            return self.exchange(sends, receives, label=label)
        start = partial(self.start_all_to_all, out, x, list(takes), list(gives))
        return self._collective(ranks, (out, x), label, start)

    def start_all_gather(self, out: Tensor, x: Tensor, group: dist.ProcessGroup) -> Any:
        """Torch's handle of an all-gather."""
        return _all_gather(out, x, group=group, async_op=True)

    def start_all_to_all(
        self, out: Tensor, x: Tensor, takes: list[int], gives: list[int], group: dist.ProcessGroup
    ) -> Any:
        """Torch's handle of an all-to-all."""
        return dist.all_to_all_single(out, x, takes, gives, group=group, async_op=True)

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
        lane = self._enter_lane(places, x, label)
        self.calls.waits.begun.append(label.tag)
        try:
            work = start(lane.group)
        except RuntimeError as error:
            raise lost(self, self.rank, "exchange", label, error) from error
        if lane.guarded:
            return _InFlight(self, [(("exchange", self.rank), work)], tensors, label, lane)
        # A tiny all-gather behind it says whose rows they were.
        digests = self.calls.digests
        own = digests.of(label, out)
        came = own.new_empty(len(places))
        behind = _all_gather(came, own, group=lane.group, async_op=True)
        return _OnStream([work, behind], lambda: digests.compare(came, label, ranks), [out, x, own])

    def _enter_lane(self, ranks: tuple[int, ...], x: Tensor, label: RoundLabel) -> Lane:
        """The lane in which some ranks of the group come to a collective; made if need be."""
        calls, key = self.calls, (ranks, x.device.type)
        lane: Lane | None = calls.lanes.get(key)
        if lane is not None and lane.enter(label):
            return lane
        name, group = make_lane_group(
            calls, self.group, *key, None if lane is None else lane.name, label.pass_
        )
        lane = calls.lanes[key] = Lane(group, calls, name, self.carries_tags(x))
        if not lane.enter(label):
            raise peer_error(
                f"all ranks to come to {label}",
                "one that left before the others came",
                "make the same calls in the same order on every rank",
            )
        return lane
