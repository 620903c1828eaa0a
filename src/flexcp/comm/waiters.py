"""Threads that wait for gloo's transfers, whose handles can be neither polled nor cancelled."""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

_FOREVER = datetime.timedelta(days=365)


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

        After that it must not be asked again. A thread that is never asked again stays with its
        transfers until they end.
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
        self.blame = blame
        """What was to be done, and the peer."""


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
