"""The calls of a process group, and waiting in them: with a limit, and open to news of others."""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from flexcp.caches import Derived
from flexcp.comm.blocked import Waits
from flexcp.comm.board import StoreBoard
from flexcp.comm.calls import Calls
from flexcp.comm.faults import answered, closed_connections, names_of
from flexcp.comm.labels import PassLabel
from flexcp.errors import peer_error
from flexcp.torch_names import process_group_store

SLOW = 1.0
"""Seconds after which a rank that waits looks for what others say of it."""
LOOK = 0.25
"""Seconds between looks."""
_PATIENCE = 3.0
"""Seconds that a rank gives the others to say why a call failed."""
_POLL = (1e-4, 5e-3)
"""Seconds between looks at the board while ranks come to a call: at first, and at most."""
_DEFAULT_TIMEOUT = 1800.0


class ProcessCalls(Calls):
    """The calls of a process group. Ranks are counted within the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        store = process_group_store(group)
        board = StoreBoard(store, "flexcp/")
        super().__init__(group.rank(), group.size(), board)
        self._group = weakref.ref(group)
        self.timeout = _timeout_of(group)
        self.waits = Waits(self.rank, board)
        self.store: Any = store
        self.lanes: dict[Any, Any] = {}
        """Groups for collectives, by their ranks and device; see `lanes.Lane`."""
        self.derived = Derived()
        """What transports over the group share."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, which is there as long as anybody makes calls in it."""
        group = self._group()
        assert group is not None
        return group

    def wait_until(
        self, ready: Callable[[], bool], label: PassLabel, missing: Callable[[], list[int]]
    ) -> None:
        """Returns once `ready`; raises if the missing ranks can't come any more."""
        self.waits.begun.append(_arrival(label))
        pause, longest = _POLL

        def ready_within(seconds: float) -> bool:
            nonlocal pause
            until = time.monotonic() + seconds
            while not ready():
                if time.monotonic() > until:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, longest)
            return True

        def needs() -> Iterable[tuple[int, int]]:
            return [(rank, _arrival(label)) for rank in missing() if rank != self.rank]

        step = f"round 0, in which ranks compare what they are about to do, of {label}"
        with answered(self.group, step):
            if not ready_within(SLOW):
                self.wait(ready_within, label, step, needs)

    def wait_a_while(self, ready: Callable[[], bool]) -> None:
        """Returns once `ready`, or after a few seconds."""
        until = time.monotonic() + _PATIENCE
        while not ready() and time.monotonic() < until:
            time.sleep(_POLL[1])

    def wait(
        self,
        done_within: Callable[[float], bool],
        label: PassLabel,
        step: str,
        needs: Callable[[], Iterable[tuple[int, int]]],
    ) -> None:
        """Returns once done; raises if that is known to be in vain, or takes too long.

        It has taken `SLOW` seconds already.

        Args:
            done_within: Waits for so many seconds at most, and says whether it is done.
            label: The pass in which this rank waits.
            step: What errors call that for which it waits.
            needs: The ranks that it waits for, with the tag of the step that each has to begin.
        """
        began = time.monotonic() - SLOW
        self.waits.begin_wait(step, needs())
        probe = 2 * SLOW
        try:
            while not done_within(LOOK):
                self._look(label, step)
                waited = time.monotonic() - began
                if waited > self.timeout:
                    raise RuntimeError(f"timed out after {self.timeout:g} s")
                if waited > probe:
                    probe *= 2
                    self._require_connected([rank for rank, _ in needs()])
        finally:
            with suppress(RuntimeError):  # the store may have gone with the process that serves it
                self.waits.end_wait()

    def _require_connected(self, ranks: Iterable[int]) -> None:
        closed = closed_connections(self.group, ranks)
        if closed:
            raise RuntimeError(f"connection closed by {names_of(sorted(closed))}")

    def _look(self, label: PassLabel, step: str) -> None:
        error = self.failure(label, step)
        if error is not None:
            raise error
        verdict = self.waits.verdict()
        if verdict is not None:
            self.give_up(label, f"an order of its own: {verdict}")
            raise peer_error(
                "all ranks to make the same calls, forward and backward, in the same order",
                verdict,
                "run the same forward and backward passes in the same order on every rank"
                + (", with the same dropout_seed" if label.call.dropout_seed is not None else ""),
            )


_calls_of: weakref.WeakKeyDictionary[Any, ProcessCalls] = weakref.WeakKeyDictionary()
"""The calls of every process group: all transports of a group count alike."""


def calls_of(group: dist.ProcessGroup) -> ProcessCalls:
    """The calls of a process group, which all meshes and plans over it share."""
    found = _calls_of.get(group)
    if found is None:
        found = _calls_of.setdefault(group, ProcessCalls(group))
    return found


def _arrival(label: PassLabel) -> int:
    """The tag of a rank's coming to a pass, whatever it calls there."""
    return zlib.crc32(label.key.encode())


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which a group gives up."""
    try:
        options: Any = group._get_backend(torch.device("cpu")).options
        return float(options._timeout.total_seconds())
    except (RuntimeError, AttributeError):  # NCCL, which has its own watchdog
        return _DEFAULT_TIMEOUT
