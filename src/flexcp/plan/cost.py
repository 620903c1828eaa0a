"""The price of a schedule: its rounds played through, transfers and compute overlapping.

Every rank has one channel for transfers and one for compute. The transfers of a round start when
those of the round before are through, at both ends, and when a buffer is free; the work of a round
starts when its rows are there. In backward, gradients leave when their round's work is done.
Swapping rows for heads (Ulysses) comes before and after, and overlaps with nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexcp.plan.machine import Machine
from flexcp.plan.shape import AttentionShape
from flexcp.plan.traffic import elements_per_row
from flexcp.plan.work_profile import WorkProfile
from flexcp.schedule import Pass, Schedule, Transfers


@dataclass(frozen=True)
class Cost:
    """Predicted seconds."""

    forward: float
    """Of the forward pass, until the slowest rank is done."""
    backward: float
    """Of the backward pass, until the slowest rank is done."""
    compute: float
    """What the slowest rank would take for its work alone, both passes."""
    if_even: float
    """What all would take if their work were the same and no transfer were waited for but the swaps
    of rows for heads."""

    @property
    def seconds(self) -> float:
        """Both passes; to nine digits, so that ties are ties on every machine."""
        return float(f"{self.forward + self.backward:.9g}")


Recorder = Callable[[str, str, int, Tensor, Tensor], None]
"""Is told what happens: "forward" or "backward"; "receive", "compute" or "return"; the round; and
float64 [groups] when it begins and ends, in seconds after the pass's first swap of rows for heads.
A group to which nothing happens begins and ends at once."""


def price(
    schedule: Schedule,
    profile: WorkProfile,
    machine: Machine,
    shape: AttentionShape,
    record: Recorder | None = None,
    known: dict[Pass, tuple[float, float, float]] | None = None,
) -> Cost:
    """What a schedule costs on a machine; `record` is told what happens when.

    `known` has what passes took that other schedules for the same groups and work have too.
    """
    slices, place = schedule.heads, _busiest(schedule)
    share = len(slices[place].q) / shape.num_heads
    row_bytes = shape.kv_bytes(len(slices[place].kv)) * elements_per_row(schedule, shape)
    links = _Links(schedule, machine, place, row_bytes)
    per_pair = shape.flops_per_pair / machine.flops * share
    before, after = swaps(schedule, machine, shape)
    seconds = []
    compute = if_even = 0.0
    pairs: Any = None
    for name, what, factor in (
        ("forward", schedule.forward, 1.0),
        ("backward", schedule.backward, machine.backward),
    ):
        found = known.get(what) if known else None
        if found is None:
            if pairs is None or what.work is not schedule.forward.work or what.rounds != len(pairs):
                pairs = profile.of_tasks(what.work, what.rounds)
            work = pairs * (per_pair * factor) + (pairs > 0) * machine.launch
            total = work.sum(0)
            took = _play(what, work, links, partial(_noted, record, name) if record else None)
            found = took, float(total.max()), float(total.mean())
        if known is not None:
            known[what] = found
        seconds.append(found[0])
        compute += found[1]
        if_even += found[2]
    forward, backward = (a + b + c for a, b, c in zip(before, seconds, after, strict=True))
    return Cost(forward, backward, compute, if_even + sum(before) + sum(after))


def _busiest(schedule: Schedule) -> int:
    """The place within a group that has the most heads."""
    return max(range(len(schedule.heads)), key=lambda place: len(schedule.heads[place].q))


_Note = Callable[[str, int, Any, Any], None]


def _noted(record: Recorder, name: str, kind: str, i: int, begin: Any, end: Any) -> None:
    record(name, kind, i, torch.from_numpy(begin.copy()), torch.from_numpy(end.copy()))


def _play(what: Pass, work: Any, links: _Links, note: _Note | None) -> float:
    """Seconds until the last rank has done all of its work and sent all of its gradients."""
    groups = work.shape[1]
    moving, moves_at = links.times(what.moves, what.rounds, groups)
    returning, returns_at = links.times(what.returns, what.rounds, groups)
    exposed = 1.0 - links.machine.hidden
    channel = np.zeros(groups)
    done = [np.zeros(groups)] * 2
    for i in range(what.rounds):
        if moves_at[i] is not None:
            # Two buffers: what is computed, and what arrives meanwhile.
            begin = np.maximum(channel, done[-2]) if i > 1 else channel
            begin = _both_ends(begin, moves_at[i])
            channel = np.where(moving[i] > 0, begin + moving[i], channel)
            if note:
                note("receive", i, begin, begin + moving[i])
        slowed = work[i] + exposed * (moving[i] + returning[i])
        start = np.maximum(done[-1], channel)
        done.append(np.where(work[i] > 0, start + slowed, done[-1]))
        if note:
            note("compute", i, start, np.where(work[i] > 0, start + slowed, start))
        if i > 0:  # after the next round's rows are on the way
            channel = _send_home(channel, done[-2], returning, returns_at, i - 1, note)
    if what.rounds:
        channel = _send_home(channel, done[-1], returning, returns_at, what.rounds - 1, note)
    return float(np.maximum(channel, done[-1]).max())


def _send_home(
    channel: Any, done: Any, costs: Any, pairs: list[_Ends | None], i: int, note: _Note | None
) -> Any:
    """When the channels are free after the gradients of round i have left."""
    if pairs[i] is None:
        return channel
    begin = _both_ends(np.maximum(channel, done), pairs[i])
    if note:
        note("return", i, begin, begin + costs[i])
    return np.where(costs[i] > 0, begin + costs[i], channel)


def _both_ends(begin: Any, pairs: _Ends | None) -> Any:
    """A transfer begins when both its ends are free."""
    assert pairs is not None
    (source, target), begin = pairs, begin.copy()
    np.maximum.at(begin, target, begin[source])
    return begin


_Ends = tuple[Any, Any]
"""int64 [n] Sources and targets of the messages of a round."""
_Times = tuple[Any, list[_Ends | None]]
"""float64 [rounds, groups] Seconds; and the ends of each round that has any."""


class _Links:
    """Seconds of transfers, by link."""

    def __init__(self, schedule: Schedule, machine: Machine, place: int, row_bytes: int) -> None:
        ranks = np.arange(schedule.groups.ranks) * schedule.heads_group_size + place
        self._node = ranks // machine.ranks_per_node
        self.machine = machine
        self._row_bytes = row_bytes
        self._known: dict[tuple[Transfers, int], _Times] = {}

    def times(self, table: Transfers, rounds: int, groups: int) -> _Times:
        """What the transfers of each round take each group."""
        key = (table, rounds)
        if key not in self._known:  # passes share tables
            self._known[key] = self._times(table, rounds, groups)
        return self._known[key]

    def _times(self, table: Transfers, rounds: int, groups: int) -> _Times:
        # The table is sorted by round, target and source: these change where a message begins.
        columns = [x.numpy() for x in (table.round, table.source, table.target)]
        new = np.zeros(len(table), dtype=bool)
        new[:1] = True
        for column in columns:
            new[1:] |= column[1:] != column[:-1]
        first = np.flatnonzero(new)
        number, source, target = (column[first] for column in columns)
        lengths = table.rows.numpy()
        rows = np.add.reduceat(lengths, first) if first.size else lengths
        size = rounds * groups
        seconds = np.zeros(size)
        inter = self._node[source] != self._node[target]
        for far, bandwidth in (
            (False, self.machine.intra_bandwidth),
            (True, self.machine.inter_bandwidth),
        ):
            moved = np.where(inter == far, rows, 0)
            for end in (source, target):
                total = np.bincount(number * groups + end, moved, minlength=size)
                seconds = np.maximum(seconds, total * (self._row_bytes / bandwidth))
        messages = np.bincount(number * groups + target, minlength=size)
        seconds += (messages > 0) * self.machine.latency + messages * self.machine.message
        edges = np.searchsorted(number, np.arange(rounds + 1)).tolist()
        by_round = [(source[a:b], target[a:b]) if b > a else None for a, b in pairwise(edges)]
        return seconds.reshape(rounds, groups), by_round


def swaps(
    schedule: Schedule, machine: Machine, shape: AttentionShape
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of swapping rows for heads before and after the rounds, in forward and backward."""
    if schedule.heads_group_size == 1:
        return (0.0, 0.0), (0.0, 0.0)
    group_size = schedule.heads_group_size
    per_row = elements_per_row(schedule, shape) * schedule.layout.batch_elements
    own = int(schedule.layout.counts.max()) * per_row
    others = int(schedule.groups.counts.max()) * per_row - own
    mine = schedule.heads[_busiest(schedule)]
    all_kv = sum(len(s.kv) for s in schedule.heads)
    gather = others * (shape.q_bytes(len(mine.q)) + shape.kv_bytes(len(mine.kv)))
    scatter = (
        own
        * (shape.q_bytes(shape.num_heads) + shape.kv_bytes(all_kv))
        * (group_size - 1)
        // group_size
    )
    q_in = others * shape.q_bytes(len(mine.q))
    out_back = own * shape.out_bytes(shape.num_heads) * (group_size - 1) // group_size
    q_out = own * shape.q_bytes(shape.num_heads) * (group_size - 1) // group_size
    kv_back = own * shape.kv_bytes(all_kv) * (group_size - 1) // group_size

    def seconds(received: int, sent: int) -> float:
        near = min(group_size, machine.ranks_per_node)
        far = (group_size - near) / (group_size - 1)
        size = max(received, sent)
        wire = max(size * (1 - far) / machine.intra_bandwidth, size * far / machine.inter_bandwidth)
        return wire + machine.latency + (group_size - 1) * machine.message

    before = (seconds(gather, scatter), seconds(q_in, q_out))
    after = (
        seconds(out_back, others * shape.out_bytes(len(mine.q))),
        seconds(q_out + kv_back, gather),
    )
    return before, after
