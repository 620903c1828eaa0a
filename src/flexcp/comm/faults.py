"""Which ranks are gone, found out once a transfer has failed: torch's message names no rank."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

_NOTE = "flexcp/gone"
"""Where the first rank to notice writes down who is gone."""
_TAG = 0x51E7
"""Of messages that nobody takes: sending one tells whether a connection is open."""


def gone_ranks(group: dist.ProcessGroup) -> list[int]:
    """Ranks of a group that have ended, counted within it; none if that can't be found out.

    A rank that raises because another has ended soon ends too, and closes its connections. So the
    first one to notice leaves a note in the group's store before it raises, and the note counts.
    """
    closed = _closed(group)  # before the note is read: who closes later has left it by then
    with suppress(RuntimeError, KeyError):
        store: Any = _get_process_group_store(group)
        if store.check([_NOTE]):
            return [int(word) for word in store.get(_NOTE).split() if word != b"none"]
        store.set(_NOTE, " ".join(map(str, closed)) or "none")
    return closed


def _closed(group: dist.ProcessGroup) -> list[int]:
    """Ranks that have closed their connection to this one; known of gloo alone."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:  # NCCL, which can't be asked
        return []
    found = []
    for rank in range(group.size()):
        if rank == group.rank():
            continue
        try:
            dist.isend(torch.zeros(1), group=group, group_dst=rank, tag=_TAG)
        except RuntimeError as error:
            if "timeout" not in str(error):  # after its own time-out, gloo closes all of them
                found.append(rank)
    return found


def names_of(ranks: list[int]) -> str:
    """What to call ranks in an error.

    >>> names_of([1]), names_of([1, 3])
    ('rank 1', 'ranks 1 and 3')
    """
    text = " and ".join(map(str, ranks))
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
