"""Calls: what the ranks of a group do together, counted alike on every rank.

The first time that a kind of call is made, ranks compare on the board what they are about to do.
Later calls of the kind compare nothing: their messages carry the kind and the number of the call,
so that they match those of no other. What goes wrong is said on the board, under the pass in which
it did, where those who wait in that pass look once they have waited for long.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import torch

from flexcp.comm.agreement import Agreement, Statement, failure_of
from flexcp.comm.board import Board
from flexcp.comm.digests import Digests
from flexcp.comm.labels import CallLabel, PassLabel
from flexcp.comm.recomputed import RecomputedCalls, saved_tensor_hooks
from flexcp.errors import FlexCPError
from flexcp.torch_names import current_backward_pass

_KINDS = 4096
"""Kinds of calls that a group remembers to have agreed on; the oldest are forgotten, by all ranks
alike, and agreed on again."""


class Calls(ABC):
    """The calls of one group, as one rank counts them."""

    def __init__(self, rank: int, size: int, board: Board) -> None:
        self.rank, self.size, self.board = rank, size, board
        self._number = 0
        self._agreed: OrderedDict[bytes, Agreement] = OrderedDict()
        self._backwards: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._last_agreed: PassLabel | None = None
        self._seeds: OrderedDict[int, int] = OrderedDict()
        self._recomputed = RecomputedCalls()
        self._thread = OneThread()
        self.digests = Digests()
        """What came with messages that carry no tags."""

    @abstractmethod
    def wait_until(
        self, ready: Callable[[], bool], label: PassLabel, missing: Callable[[], list[int]]
    ) -> None:
        """Returns once `ready`; raises if the missing ranks can't come any more."""

    @abstractmethod
    def wait_a_while(self, ready: Callable[[], bool]) -> None:
        """Returns once `ready`, or if that takes long."""

    def require_own_thread(self, step: str) -> None:
        """Raises if calls are made by several threads, whose order may differ between ranks."""
        self._thread.require(step)

    @property
    def thread_name(self) -> str:
        """Of the thread that makes the calls; "" for the main one. It is the same on all ranks."""
        return self._thread.name

    def begin(
        self,
        agreement: Agreement,
        *,
        dropout_seed: int | None = None,
        draw_seed: Callable[[], int] | None = None,
    ) -> CallLabel:
        """The label of the next call, once all ranks are known to make the same.

        Raises if it has turned out meanwhile that an earlier one got rows of another.

        Args:
            agreement: What all ranks have to do alike.
            dropout_seed: The seed of the call's dropout; it may differ from call to call, and
                another one is told by the call's messages.
            draw_seed: Draws that seed instead, the same on all ranks.
        """
        if self.digests.pending:
            self.digests.raise_if_different()
        self.require_own_thread(agreement.step)
        digest, thread = agreement.digest, self.thread_name
        if thread:
            digest = hashlib.sha256(digest + thread.encode()).digest()[: len(digest)]
        label = self._next(agreement.step, digest)
        if draw_seed is not None:
            dropout_seed = self._drawn(label, draw_seed)
        if dropout_seed is not None:
            label = replace(label, dropout_seed=dropout_seed)
        if label.digest not in self._agreed:
            self._agree(label.passing("forward"), agreement)
        return label

    def _drawn(self, label: CallLabel, draw: Callable[[], int]) -> int:
        """The seed of a call: a recomputation has that of the call itself, whatever it draws."""
        found = draw()
        if label.recomputation:
            return self._seeds.get(label.number, found)
        self._seeds[label.number] = found
        while len(self._seeds) > _KINDS:
            self._seeds.popitem(last=False)
        return found

    def next_backward(self, label: CallLabel) -> int:
        """Which backward pass of a call comes next, where nothing else remembers the call."""
        key = (label.number, label.recomputation)
        found = self._backwards[key] = self._backwards.pop(key, -1) + 1
        while len(self._backwards) > _KINDS:
            self._backwards.popitem(last=False)
        return found

    def refuse(self, step: str, why: str) -> None:
        """Counts a call that this rank can't make, and tells those who make it; never waits."""
        self.say(self._next(step, b"").passing("forward").key, Statement(refused=why))

    def give_up(self, label: PassLabel, why: str) -> None:
        """Tells those who are in a pass that this rank has left it before its end."""
        self.say(label.key, Statement(failed=why))

    def _mark_failed(self, key: str) -> None:
        self.board.write(f"{key}/trouble", "yes")

    def has_failed(self, key: str) -> bool:
        """Whether some rank said that it can't do a pass, by its key, or does another."""
        return self.board.read(f"{key}/trouble") is not None

    def failure(self, label: PassLabel, where: str) -> FlexCPError | None:
        """The error of a pass that some rank said it can't do, or does differently."""
        if not self.has_failed(label.key):
            return None
        return self._failure(label, self._agreed[label.call.digest], where)

    def _next(self, step: str, digest: bytes) -> CallLabel:
        if current_backward_pass() != -1:  # in a backward pass
            found = self._recomputed.find()
            if found is not None:
                return CallLabel(step, digest, *found)
        number = self._number
        self._number += 1
        if not torch.is_grad_enabled() or saved_tensor_hooks() is not None:
            self._recomputed.remember(number)
        return CallLabel(step, digest, number)

    def _agree(self, label: PassLabel, agreement: Agreement) -> None:
        digest = label.call.digest
        if self.size == 1:
            self._remember(digest, agreement)
            return
        board, key = self.board, label.key
        own = f"{digest.hex()} {label.call.dropout_seed}"
        if board.first(f"{key}/digest", own) != own:
            self._mark_failed(key)
        else:
            board.write(f"{key}/came/{self.rank}", "yes")
            if board.count(f"{key}/came") == self.size:
                board.write(f"{key}/agreed", "yes")

        def settled() -> bool:
            return bool(board.read(f"{key}/agreed") or board.read(f"{key}/trouble"))

        def missing() -> list[int]:
            came = (board.read(f"{key}/came/{r}") for r in range(self.size))
            return [r for r, there in enumerate(came) if not there]

        self.wait_until(settled, label, missing)
        if not board.read(f"{key}/agreed"):
            raise self._failure(label, agreement, str(label))
        self._remember(digest, agreement)
        if self.rank == 0 and self._last_agreed is not None:
            self._erase(self._last_agreed)  # all have left it: they have come here
        self._last_agreed = label

    def _erase(self, label: PassLabel) -> None:
        for what in ("digest", "came", "agreed", *(f"came/{r}" for r in range(self.size))):
            self.board.erase(f"{label.key}/{what}")

    def _remember(self, digest: bytes, agreement: Agreement) -> None:
        self._agreed[digest] = agreement
        while len(self._agreed) > _KINDS:
            self._agreed.popitem(last=False)

    def say(self, key: str, statement: Statement) -> None:
        """Tells those who are in a pass, by its key, why they can't go on."""
        if self.size > 1:
            self.board.write(f"{key}/said/{self.rank}", statement.as_text())
            self._mark_failed(key)

    def _failure(self, label: PassLabel, agreement: Agreement, where: str) -> FlexCPError:
        """Says what this rank does, waits a while for others to say so, and tells what differs."""
        facts = {**agreement.facts, "thread": self.thread_name or "the main one"}
        if label.call.dropout_seed is not None:
            facts["dropout_seed"] = str(label.call.dropout_seed)
        own = Statement(step=agreement.step, facts=facts)
        self.board.write(f"{label.key}/said/{self.rank}", own.as_text())
        said: dict[int, Statement] = {}

        def heard_all() -> bool:
            for rank in range(self.size):
                text = None if rank in said else self.board.read(f"{label.key}/said/{rank}")
                if text is not None:
                    said[rank] = Statement.of(text)
            return len(said) == self.size or any(s.refused or s.failed for s in said.values())

        self.wait_a_while(heard_all)
        return failure_of(said, self.rank, where) or agreement.error(said, self.size)


class OneThread:
    """Lets one thread make the calls of a group: those of two have no order that ranks share."""

    def __init__(self) -> None:
        self._owner: threading.Thread | None = None
        self._intruder: threading.Thread | None = None

    @property
    def name(self) -> str:
        """Of the thread; "" for the main one."""
        owner = self._owner
        return "" if owner is None or owner is threading.main_thread() else owner.name

    def require(self, step: str) -> None:
        """Raises unless this is the only thread that makes calls; a backward pass may run in any.

        Once another one has tried, neither may until one of them has ended.
        """
        thread = threading.current_thread()
        if self._owner is thread and self._intruder is None:
            return
        if current_backward_pass() != -1:
            return
        if self._intruder is not None and not self._intruder.is_alive():
            self._intruder = None
        if self._owner is None or not self._owner.is_alive():
            self._owner = thread
        if self._owner is thread and self._intruder is None:
            return
        if thread is not self._owner:
            self._intruder = thread
        raise FlexCPError(
            f"all calls over one mesh to be made by one thread, as they were by "
            f"{self._owner.name!r}",
            f"{step} in thread {(self._intruder or thread).name!r}, whose order could differ "
            "between ranks",
            "make all calls in one thread, or give every thread a mesh (process group) of its own",
        )
