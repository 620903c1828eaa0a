"""Which rank keeps the others waiting, found out once a transfer has failed.

Torch's message names no rank, and a connection that is closed proves little: a rank that gives up
closes its connections too. But a rank that gives up can say so. Each leaves a report in the group's
store that names the ranks it suspects: the one it waited for, and those whose connections are
closed. Whoever is suspected and has left no report has ended, is stopped, or is elsewhere. The
first rank to report is the judge: it waits for the reports of the others, and leaves the verdict in
the store, so that all of them name the same ranks.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flexcp.errors import FlexCPError, peer_error
from flexcp.torch_names import process_group_store

_REPORT, _REPORTS, _VERDICT = "flexcp/fault/report", "flexcp/fault/reports", "flexcp/fault/verdict"
"""Keys in the store of a process group: of one rank's report, their number, and the verdict."""
_PROBE = 0x51E7
"""Tag of messages that nobody takes: sending one tells whether a connection is open."""
_AFTER_TIMEOUT = 5.0
"""Seconds for the reports of others after a time-out: they began to wait at other times."""
_AFTER_CLOSING = 3.0
"""Seconds for them after a connection was closed: who is alive has seen that at once."""
_POLL = 0.05
"""Seconds between looks into the store."""


def ranks_to_blame(
    group: dist.ProcessGroup, error: BaseException, peer: int | None = None
) -> list[int]:
    """Ranks of a group that others wait for in vain, counted within it; none if that is unknown.

    Args:
        group: The group of the transfer that failed.
        error: What torch raised.
        peer: The rank at the other end, counted within the group; None if it may be any.
    """
    timed_out = "timeout" in str(error).lower() or "timed out" in str(error).lower()
    patience = _AFTER_TIMEOUT if timed_out else _AFTER_CLOSING
    suspects = set() if peer is None else {peer}
    if not timed_out:  # after its own time-out, gloo closes all connections
        suspects |= closed_connections(group, range(group.size()))
    found: list[list[int]] = []

    def look() -> None:
        with suppress(RuntimeError, KeyError):
            found.append(_verdict(group, suspects, patience))
            return
        found.append(sorted(suspects))  # the process that serves the store has ended

    # If the process that serves the store has stopped, so do those that ask it: hence a thread.
    thread = threading.Thread(target=look, name="flexcp-fault", daemon=True)
    thread.start()
    thread.join(2 * patience)
    return found[0] if found else []


def closed_connections(group: dist.ProcessGroup, ranks: Iterable[int]) -> set[int]:
    """Those of some ranks whose connection to this one is closed; known of gloo alone."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:  # NCCL, which can't be asked
        return set()
    found = set()
    for rank in ranks:
        if rank != group.rank():
            try:
                group.send([torch.zeros(1)], rank, _PROBE)
            except RuntimeError:
                found.add(rank)
    return found


def _verdict(group: dist.ProcessGroup, suspects: set[int], patience: float) -> list[int]:
    """Reports whom this rank suspects, and returns what the judge has found."""
    store: Any = process_group_store(group)
    until = time.monotonic() + patience
    store.set(f"{_REPORT}/{group.rank()}", _text(suspects))
    if store.add(_REPORTS, 1) == 1:
        while store.add(_REPORTS, 0) < group.size() and time.monotonic() < until:
            time.sleep(_POLL)
        blamed = _blamed(store, group.size())
        store.set(_VERDICT, _text(blamed))
        return blamed
    while not store.check([_VERDICT]):
        if time.monotonic() > until + patience / 2:
            return []
        time.sleep(_POLL)
    return _ranks(store.get(_VERDICT))


def _blamed(store: Any, size: int) -> list[int]:
    keys = {rank: f"{_REPORT}/{rank}" for rank in range(size)}
    reports = {r: _ranks(store.get(key)) for r, key in keys.items() if store.check([key])}
    suspects = {rank for report in reports.values() for rank in report}
    silent = [rank for rank in range(size) if rank not in reports]
    return [rank for rank in silent if rank in suspects] or silent


def _text(ranks: Iterable[int]) -> str:
    """Ranks as the store keeps them; never empty, which some stores take for nothing."""
    return json.dumps(sorted(ranks))


def _ranks(text: bytes) -> list[int]:
    found: list[int] = json.loads(text)
    return found


@contextmanager
def answered(group: dist.ProcessGroup, label: object) -> Iterator[None]:
    """Says which collective failed and who did not take part: torch's message says only how."""
    try:
        yield
    except RuntimeError as error:
        blamed, own = ranks_to_blame(group, error), group.rank()
        if own in blamed:
            raise too_late(own, label, error) from error
        raise peer_error(
            f"{names_of(blamed) if blamed else f'all {group.size()} ranks'} to take part in "
            f"{label}",
            f"no answer on rank {own}: {reason_of(error)}",
            f"look at the output of {names_of(blamed)}, which ended, raised or stopped before the "
            "others gave up"
            if blamed
            else "look at the output of the other ranks: one has ended, raised, or is not in the "
            "same call",
        ) from error


def too_late(rank: int, label: object, error: BaseException) -> FlexCPError:
    """The error on a rank that the others have given up."""
    return peer_error(
        f"rank {rank}, which is this one, to come to {label} before the others give up",
        f"no answer on rank {rank}: {reason_of(error)}",
        "look at what kept this rank, or give the process group a longer timeout",
    )


def reason_of(error: BaseException) -> str:
    """The first line of torch's message.

    >>> reason_of(RuntimeError("closed by peer\\nat pair.cc")), reason_of(RuntimeError())
    ('closed by peer', 'RuntimeError')
    """
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def names_of(ranks: list[int]) -> str:
    """What to call ranks in an error.

    >>> names_of([1]), names_of([1, 3])
    ('rank 1', 'ranks 1 and 3')
    """
    text = " and ".join(map(str, ranks))
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


class Member(Protocol):
    """A rank of a mesh over a process group, as faults are told to it."""

    group: dist.ProcessGroup
    members: tuple[int, ...]
    """Global rank of each rank of the mesh."""
    rank: int

    @property
    def group_ranks(self) -> tuple[int, ...]:
        """The rank within the group of each rank of the mesh."""
        ...


def lost(own: Member, peer: int, what: str, label: object, error: BaseException) -> FlexCPError:
    """The error for a peer that did not answer, maybe because another rank has stopped.

    `what` was to be done with it: "send", "receive", or "exchange" if it may be any rank.
    """
    found = ranks_to_blame(own.group, error, None if what == "exchange" else own.group_ranks[peer])
    blamed = [own.group_ranks.index(rank) for rank in found if rank in own.group_ranks]
    if own.rank in blamed:
        return too_late(own.rank, label, error)
    verb = {"receive": "send", "send": "take"}.get(what, "exchange")
    who = f"rank {peer}"
    if blamed and blamed != [peer]:
        who, verb = names_of(blamed), "exchange"
    elif what == "exchange" and not blamed:
        who = "all ranks"
    return peer_error(
        f"{who} to {verb} what the plan says in {label}",
        f"no answer on rank {own.rank}: {reason_of(error)}",
        f"look at the output of {who}: it has ended, raised, or is not in the same call",
    )
