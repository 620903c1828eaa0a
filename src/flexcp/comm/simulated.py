"""All ranks in one process: threads that run one at a time and hand over where they would wait.

Whoever waits lets the next rank that can go on run, in order of rank, so every run is the same. If
nobody can go on, that is a deadlock, and everybody gets an error that says who waits for whom. If a
rank fails, the others end too, and the first failure is what the caller sees.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from flexcp.comm.board import MemoryBoard
from flexcp.comm.calls import Calls
from flexcp.comm.collectives import ordered_sum
from flexcp.comm.interface import Messages
from flexcp.comm.labels import CallLabel, PassLabel, RoundLabel
from flexcp.comm.rank_errors import RankError
from flexcp.errors import FlexCPError


class _Stopped(BaseException):
    """Ends a rank because another one has failed."""


@dataclass(eq=False)
class _Waiting:
    """Why a rank can't go on."""

    ready: Callable[[], bool]
    reason: Callable[[], str]
    patient: bool
    """Whether it waits for ever; else until nobody else can go on."""


@dataclass(eq=False)
class World:
    """The ranks, and what is on its way between them."""

    size: int
    mail: dict[tuple[int, int, RoundLabel], list[Tensor]] = field(default_factory=dict)
    """Messages by source, target and label, in the order in which they were sent."""
    bytes_received: list[int] = field(default_factory=list)
    """What every rank has received so far."""
    messages_received: list[int] = field(default_factory=list)
    """How many messages that were."""
    failed: set[str] = field(default_factory=set)
    """Keys of the passes that some rank can't do."""
    board: MemoryBoard = field(default_factory=MemoryBoard)
    """What ranks tell each other when they do something for the first time, or can't."""
    seeds: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Seeds by call: ranks have one generator, from which the first to come draws for all."""

    def __post_init__(self) -> None:
        self.bytes_received = [0] * self.size
        self.messages_received = [0] * self.size
        self._threads: dict[int, int] = {}
        self._lock = threading.Lock()
        # One for each rank: a turn wakes only the thread whose turn it is.
        self._turns = [threading.Condition(self._lock) for _ in range(self.size)]
        self._running = 0
        self._waiting: dict[int, _Waiting] = {}
        self._done: set[int] = set()
        self._error: BaseException | None = None

    def run(self, fn: Callable[[int], Any]) -> list[Any]:
        """Runs fn(rank) for every rank; returns the results by rank."""
        results: list[Any] = [None] * self.size
        grad = torch.is_grad_enabled()

        def work(rank: int) -> None:
            self._threads[rank] = threading.get_ident()
            try:
                self._wait_for_turn(rank)
                with torch.set_grad_enabled(grad):
                    results[rank] = fn(rank)
            except _Stopped:
                pass
            except BaseException as error:
                self._fail(RankError.of(rank, error), error)
            finally:
                self._leave(rank)

        threads = [
            threading.Thread(target=work, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return results

    def require_own_thread(self, rank: int, step: str) -> None:
        """Raises unless the thread is the rank's own: threads take turns, one for each rank."""
        if threading.get_ident() != self._threads[rank]:
            raise FlexCPError(
                f"all calls of simulated rank {rank} in thread 'rank-{rank}', which it is",
                f"{step} in thread {threading.current_thread().name!r}",
                "make all calls in one thread, or give every thread a mesh of its own",
            )

    def wait_until(
        self,
        rank: int,
        ready: Callable[[], bool],
        reason: Callable[[], str],
        *,
        patient: bool = True,
    ) -> None:
        """Lets others run until `ready`; or, if not patient, until nobody else can go on."""
        if ready():
            return
        with self._lock:
            self._waiting[rank] = _Waiting(ready, reason, patient)
            self._hand_over(rank)
        self._wait_for_turn(rank)

    def _wait_for_turn(self, rank: int) -> None:
        with self._lock:
            self._turns[rank].wait_for(lambda: self._running == rank or self._error is not None)
            if self._error is not None:
                raise _Stopped
            self._waiting.pop(rank, None)

    def _hand_over(self, rank: int) -> None:
        """Chooses who runs next; called with the lock held."""
        order = [(rank + step) % self.size for step in range(1, self.size + 1)]
        for other in order:
            if other in self._done:
                continue
            waiting = self._waiting.get(other)
            if waiting is None or waiting.ready():
                self._running = other
                self._turns[other].notify()
                return
        for other in order:
            if other in self._waiting and not self._waiting[other].patient:
                self._running = other
                self._turns[other].notify()
                return
        if len(self._done) < self.size:
            self._end(self._deadlock())

    def _deadlock(self) -> FlexCPError:
        stuck = [f"rank {r} waits for {w.reason()}" for r, w in sorted(self._waiting.items())]
        gone = f"; ranks {sorted(self._done)} have returned" if self._done else ""
        return FlexCPError(
            "every rank to get what it waits for",
            "a deadlock: " + "; ".join(stuck) + gone,
            "make sure that all ranks call the same collectives in the same order",
        )

    def _fail(self, failure: RankError, cause: BaseException) -> None:
        with self._lock:
            failure.__cause__ = cause
            self._end(failure)

    def _end(self, error: BaseException) -> None:
        """Wakes everybody to stop, for the first error that there is; called with the lock held."""
        self._error = self._error or error
        for turn in self._turns:
            turn.notify()

    def _leave(self, rank: int) -> None:
        with self._lock:
            self._done.add(rank)
            self._waiting.pop(rank, None)
            if self._error is None and self._running == rank:
                self._hand_over(rank)


class SimulatedCalls(Calls):
    """The calls of one simulated rank."""

    def __init__(self, rank: int, world: World) -> None:
        super().__init__(rank, world.size, world.board)
        self._world, self._seeds = world, world.seeds

    @property
    def thread_name(self) -> str:
        """Nothing: every simulated rank has a thread of its own."""
        return ""

    def require_own_thread(self, step: str) -> None:
        """Raises unless the thread is the rank's own."""
        self._world.require_own_thread(self.rank, step)

    def wait_until(
        self, ready: Callable[[], bool], label: PassLabel, missing: Callable[[], list[int]]
    ) -> None:
        """Lets others run until `ready`."""

        def reason() -> str:
            ranks = " and ".join(map(str, missing()))
            return f"rank {ranks} to send what it is about to do in {label}"

        self._world.wait_until(self.rank, ready, reason)

    def _drawn(self, label: CallLabel, draw: Callable[[], int]) -> int:
        known = self._seeds.get(label.number)
        return super()._drawn(label, draw) if known is None else known

    def _mark_failed(self, key: str) -> None:
        super()._mark_failed(key)
        self._world.failed.add(key)

    def wait_a_while(self, ready: Callable[[], bool]) -> None:
        """Lets others run until `ready`, or until nobody else can go on."""
        self._world.wait_until(self.rank, ready, lambda: "what others say", patient=False)


@dataclass(eq=False)
class _SimulatedReceives:
    """Messages that were asked for."""

    transport: SimulatedTransport
    receives: Messages
    label: RoundLabel

    def wait(self) -> None:
        """Lets others run until all have come, or one that sends them says that it can't."""
        for source, buffer in self.receives:
            self._take(source, buffer)

    def _take(self, source: int, buffer: Tensor) -> None:
        world, rank, label = self.transport.world, self.transport.rank, self.label
        calls, mail = self.transport.calls, world.mail
        calls.require_own_thread(str(label))
        key = (source, rank, label)
        world.wait_until(
            rank,
            lambda: bool(mail.get(key)) or label.pass_.key in world.failed,
            lambda: f"rank {source} to send in {label}",
        )
        if not mail.get(key):
            error = calls.failure(label.pass_, str(label))
            assert error is not None
            raise error
        found = mail[key].pop(0)
        if not mail[key]:
            del mail[key]
        if found.shape != buffer.shape or found.dtype != buffer.dtype:
            raise FlexCPError(
                f"{buffer.dtype} of shape {tuple(buffer.shape)} from rank {source} in {label}",
                f"{found.dtype} of shape {tuple(found.shape)}",
                "make the same plan, with tensors of the same shape and type, on every rank",
            )
        buffer.copy_(found)
        world.bytes_received[rank] += found.numel() * found.element_size()
        world.messages_received[rank] += 1


@dataclass(eq=False)
class SimulatedTransport:
    """The transport of one simulated rank: all its collectives are made of pairwise messages."""

    world: World
    rank: int

    def __post_init__(self) -> None:
        self.calls = SimulatedCalls(self.rank, self.world)

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return self.world.size

    def exchange(
        self, sends: Messages, receives: Messages, *, label: RoundLabel
    ) -> _SimulatedReceives:
        """Sends copies at once; what is received is fetched when it is waited for."""
        self.calls.require_own_thread(str(label))
        for target, x in sends:
            if x.numel():
                self._post(target, x, label)
        return _SimulatedReceives(self, [(r, x) for r, x in receives if x.numel()], label)

    def all_gather(self, out: Tensor, x: Tensor, *, label: RoundLabel) -> _SimulatedReceives:
        """Starts to gather tensors of one shape: out [ranks, *x.shape], by rank."""
        out[self.rank].copy_(x.detach())
        others = [r for r in range(self.world_size) if r != self.rank]
        return self.exchange([(r, x) for r in others], [(r, out[r]) for r in others], label=label)

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        takes: Sequence[int],
        gives: Sequence[int],
        ranks: Sequence[int],
        *,
        label: RoundLabel,
    ) -> _SimulatedReceives:
        """Starts to send a part of x to each of `ranks`, this one included, and to fill out."""
        to = dict(zip(ranks, x.detach().split(list(gives)), strict=True))
        come = dict(zip(ranks, out.split(list(takes)), strict=True))
        come.pop(self.rank).copy_(to.pop(self.rank))
        return self.exchange(list(to.items()), list(come.items()), label=label)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, for code that would call `dist.all_reduce` on real ones."""
        return ordered_sum(self, x)

    def _post(self, target: int, x: Tensor, label: RoundLabel) -> None:
        if not 0 <= target < self.world_size or target == self.rank:
            raise FlexCPError(
                f"another rank of {self.world_size} to send to", str(target), "see the schedule"
            )
        mail = self.world.mail.setdefault((self.rank, target, label), [])
        with torch.no_grad():
            mail.append(x.clone())


@dataclass(frozen=True, eq=False)
class SimulatedMesh:
    """Stands for a DeviceMesh within `testing.simulate`."""

    shape: tuple[int, ...]
    """Ranks along each dimension."""
    transport: SimulatedTransport
    """How this rank reaches the others."""

    @property
    def ndim(self) -> int:
        """How many dimensions."""
        return len(self.shape)

    @property
    def device_type(self) -> str:
        """Always "cpu"."""
        return "cpu"

    def size(self, mesh_dim: int | None = None) -> int:
        """Ranks along a dimension, or of the whole mesh."""
        return prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]

    def get_rank(self) -> int:
        """This rank."""
        return self.transport.rank

    def get_coordinate(self) -> list[int]:
        """Where this rank is along each dimension."""
        place, rest = [], self.transport.rank
        for n in reversed(self.shape):
            place.append(rest % n)
            rest //= n
        return place[::-1]

    def get_local_rank(self, mesh_dim: int = 0) -> int:
        """Where this rank is along one dimension."""
        return self.get_coordinate()[mesh_dim]
