"""The price of a schedule: its rounds played through, transfers and compute overlapping.

Every rank has one channel for transfers and one for compute. The transfers of a round start when
those of the round before are through, at both ends, and when a buffer is free; the work of a round
starts when its rows are there. In backward, gradients leave when their round's work is done.
Swapping rows for heads (Ulysses) comes before and after; where heads are computed in parts, while
another part is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexcp.plan.machine import Machine
from flexcp.plan.shape import AttentionShape
from flexcp.plan.traffic import elements_per_row
from flexcp.plan.work_profile import WorkProfile
from flexcp.schedule import Pass, Schedule, Tasks, Transfers


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
    of rows for the first part's heads, and of the last part's results for rows."""

    @property
    def seconds(self) -> float:
        """Both passes; to nine digits, so that ties are ties on every machine."""
        return float(f"{self.forward + self.backward:.9g}")


Recorder = Callable[[str, str, int, Tensor, Tensor], None]
"""Is told what happens: "forward" or "backward"; "swap", "receive", "compute" or "return"; the
round, counted on from part to part of the heads; and float64 [groups] when it begins and ends, in
seconds. A group to which nothing happens begins and ends at once."""


def price(
    schedule: Schedule,
    profile: WorkProfile,
    machine: Machine,
    shape: AttentionShape,
    record: Recorder | None = None,
    known: KnownTimes | None = None,
) -> Cost:
    """What a schedule costs on a machine; `record` is told what happens when.

    `known` is what was found of other schedules for the same groups and work.
    """
    known = known or KnownTimes()
    place = _busiest(schedule)
    mine = [slices[place] for slices in schedule.heads_by_part]
    largest = max(mine, key=lambda s: len(s.q))
    parts = [len(s.q) / len(largest.q) for s in mine]
    share = len(largest.q) / shape.num_heads
    row_bytes = shape.kv_bytes(len(largest.kv)) * elements_per_row(schedule, shape)
    links = _Links(schedule, machine, place, row_bytes, known)
    per_pair = shape.flops_per_pair / machine.flops * share
    before, after = swaps(schedule, machine, shape)
    seconds = []
    compute = if_even = 0.0
    for name, what, factor, into, out in (
        ("forward", schedule.forward, 1.0, before[0], after[0]),
        ("backward", schedule.backward, machine.backward, before[1], after[1]),
    ):
        found = None if record else known.passes.get((what, len(parts)))
        if found is None:
            pairs = known.pairs.get((what.work, what.rounds))
            if pairs is None:
                pairs = profile.of_tasks(what.work, what.rounds)
                known.pairs[what.work, what.rounds] = pairs
            work = pairs * (per_pair * factor) + (pairs > 0) * machine.launch
            total = work.sum(0)
            events: list[_Event] = []
            took, moved = _play(what, work, links, events if record else None)
            found = PassTimes(took, moved, float(total.max()), float(total.mean()))
            if record:
                groups = np.zeros(total.shape)
                for kind, i, begin, end in _in_turn(parts, into, out, found, machine, events)[1]:
                    round_times = (torch.from_numpy(groups + x) for x in (begin, end))
                    record(name, kind, i, *round_times)
        known.passes[what, len(parts)] = found
        seconds.append(_in_turn(parts, into, out, found, machine)[0])
        compute += sum(parts) * found.compute
        if_even += sum(parts) * found.mean + parts[0] * into + parts[-1] * out
    return Cost(seconds[0], seconds[1], compute, if_even)


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one pass for the largest part of the heads, without swaps of rows for heads."""

    took: float
    """Until the slowest rank is done."""
    moved: float
    """That the link of the rank that moves most is busy."""
    compute: float
    """Of the work of the rank that has most."""
    mean: float
    """Of the work of a rank on average."""


@dataclass(frozen=True, eq=False)
class KnownTimes:
    """What was found of schedules for the same groups, heads and work, and holds for others too."""

    passes: dict[tuple[Pass, int], PassTimes] = field(default_factory=dict)
    """By the pass, and in how many parts heads are computed."""
    pairs: dict[tuple[Tasks, int], Any] = field(default_factory=dict)
    """float64 [rounds, groups] Pairs of every round, by tasks and rounds."""
    transfers: dict[tuple[Transfers, int], _Transfers] = field(default_factory=dict)
    """By table and rounds."""


def _in_turn(
    parts: Sequence[float],
    into: float,
    out: float,
    each: PassTimes,
    machine: Machine,
    events: Sequence[_Event] = (),
) -> tuple[float, list[_Event]]:
    """Seconds of a pass whose heads are computed in parts; and what happens when.

    `parts` are relative to the largest, of which are `each`, and `into` and `out`: what swapping
    its rows for heads takes, and its results for rows. While a part is computed, the next one is
    swapped, and the results of the former.
    """
    rounds = 1 + max((i for _, i, _, _ in events), default=0)
    computed: list[_Event] = []
    swapped: list[_Event] = []

    def swap(number: int, begin: float, seconds: float) -> float:
        swapped.append(("swap", number * rounds, begin, begin + seconds))
        return begin + seconds

    done, there = 0.0, swap(0, 0.0, parts[0] * into)
    link = there
    for part, size in enumerate(parts):
        begin = max(done, there)
        computed += [
            (x, i + part * rounds, begin + size * a, begin + size * b) for x, i, a, b in events
        ]
        beside = parts[part - 1] * out if part else 0.0
        if part + 1 < len(parts):
            there = link = swap(part + 1, max(link, begin), parts[part + 1] * into)
            beside += parts[part + 1] * into
        slowed = size * each.took + (1.0 - machine.hidden) * beside
        done = begin + max(slowed, size * each.moved + beside)
        link = swap(part + 1, max(link, done), size * out)
    return link, computed + (swapped if into or out else [])


def _busiest(schedule: Schedule) -> int:
    """The place within a group that has the most heads."""
    return max(range(len(schedule.heads)), key=lambda place: len(schedule.heads[place].q))


_Event = tuple[str, int, Any, Any]
"""What happens, in which round, and when it begins and ends: seconds, of all groups or of each."""


def _play(what: Pass, work: Any, links: _Links, note: list[_Event] | None) -> tuple[float, float]:
    """Seconds until the last rank has done all of its work and sent all of its gradients.

    Also how long the busiest link is. What happens is added to `note`.
    """
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
            if note is not None:
                note.append(("receive", i, begin, begin + moving[i]))
        slowed = work[i] + exposed * (moving[i] + returning[i])
        start = np.maximum(done[-1], channel)
        done.append(np.where(work[i] > 0, start + slowed, done[-1]))
        if note is not None:
            note.append(("compute", i, start, np.where(work[i] > 0, start + slowed, start)))
        if i > 0:  # after the next round's rows are on the way
            channel = _send_home(channel, done[-2], returning, returns_at, i - 1, note)
    if what.rounds:
        channel = _send_home(channel, done[-1], returning, returns_at, what.rounds - 1, note)
    moved = float((moving + returning).sum(0).max(initial=0.0))
    return float(np.maximum(channel, done[-1]).max()), moved


def _send_home(
    channel: Any,
    done: Any,
    costs: Any,
    pairs: list[_Ends | None],
    i: int,
    note: list[_Event] | None,
) -> Any:
    """When the channels are free after the gradients of round i have left."""
    if pairs[i] is None:
        return channel
    begin = _both_ends(np.maximum(channel, done), pairs[i])
    if note is not None:
        note.append(("return", i, begin, begin + costs[i]))
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
_Transfers = tuple[Any, Any, list[_Ends | None]]
"""float64 [rounds, groups] Seconds for each byte of a row, and before the first; and the ends."""


class _Links:
    """Seconds of transfers, by link."""

    def __init__(
        self, schedule: Schedule, machine: Machine, place: int, row_bytes: int, known: KnownTimes
    ) -> None:
        ranks = np.arange(schedule.groups.ranks) * schedule.heads_group_size + place
        self._node = ranks // machine.ranks_per_node
        busy = np.flatnonzero([len(s.q) > 0 for s in schedule.heads])
        self._nodes = (ranks[:, None] - place + busy) // machine.ranks_per_node
        self.machine = machine
        self._row_bytes = row_bytes
        self._known = known.transfers

    def times(self, table: Transfers, rounds: int, groups: int) -> _Times:
        """What the transfers of each round take each group."""
        key = (table, rounds)
        if key not in self._known:  # passes share tables
            self._known[key] = self._of(table, rounds, groups)
        of_byte, first, ends = self._known[key]
        return of_byte * self._row_bytes + first, ends

    def _of(self, table: Transfers, rounds: int, groups: int) -> _Transfers:
        # The table is sorted by round, target and source: these change where a message begins.
        columns = [x.numpy() for x in (table.round, table.source, table.target)]
        new = np.zeros(len(table), dtype=bool)
        new[:1] = True
        for column in columns:
            new[1:] |= column[1:] != column[:-1]
        begins = np.flatnonzero(new)
        number, source, target = (column[begins] for column in columns)
        lengths = table.rows.numpy()
        rows = np.add.reduceat(lengths, begins) if begins.size else lengths
        size = rounds * groups
        of_byte = np.zeros(size)
        inter = self._node[source] != self._node[target]
        for far, bandwidth in (
            (False, self.machine.intra_bandwidth),
            (True, self.machine.inter_bandwidth),
        ):
            moved = np.where(inter == far, rows, 0)
            for end in (source, target):
                total = np.bincount(number * groups + end, moved, minlength=size)
                of_byte = np.maximum(of_byte, total / bandwidth)
        if self.machine.node_bandwidth:
            of_byte = np.maximum(of_byte, self._of_nodes(number, source, target, rows, size))
        messages = np.bincount(number * groups + target, minlength=size)
        first = (messages > 0) * self.machine.latency + messages * self.machine.message
        edges = np.searchsorted(number, np.arange(rounds + 1)).tolist()
        by_round = [(source[a:b], target[a:b]) if b > a else None for a, b in pairwise(edges)]
        return of_byte.reshape(rounds, groups), first.reshape(rounds, groups), by_round

    def _of_nodes(self, number: Any, source: Any, target: Any, rows: Any, size: int) -> Any:
        """float64 [rounds * groups] What the links that nodes share take for each byte of a row.

        Every rank of a group that has heads moves its part of them. Whoever uses a link in a round
        is through when all that it carries then is.
        """
        groups, nodes = len(self._nodes), int(self._nodes.max(initial=0)) + 1
        apart = self._nodes[source] != self._nodes[target]  # [messages, ranks with heads]
        found = np.zeros(size)
        for end in (source, target):
            at = number[:, None] * nodes + self._nodes[end]
            carried = np.bincount(at.ravel(), (rows[:, None] * apart).ravel(), minlength=1)
            busy = (carried[at] * apart).max(1, initial=0.0)
            np.maximum.at(found, number * groups + end, busy / self.machine.node_bandwidth)
        return found


def swaps(
    schedule: Schedule, machine: Machine, shape: AttentionShape
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of swapping rows for a part's heads before and after, in forward and backward."""
    if schedule.heads_group_size == 1:
        return (0.0, 0.0), (0.0, 0.0)
    group_size = schedule.heads_group_size
    per_row = elements_per_row(schedule, shape) * schedule.layout.batch_elements
    own = int(schedule.layout.counts.max()) * per_row
    others = int(schedule.groups.counts.max()) * per_row - own
    # Of the part that has most heads.
    slices = max(schedule.heads_by_part, key=lambda part: sum(len(s.q) for s in part))
    mine = max(slices, key=lambda s: len(s.q))
    all_q, all_kv = sum(len(s.q) for s in slices), sum(len(s.kv) for s in slices)
    gather = others * (shape.q_bytes(len(mine.q)) + shape.kv_bytes(len(mine.kv)))
    scatter = own * (shape.q_bytes(all_q) + shape.kv_bytes(all_kv)) * (group_size - 1) // group_size
    q_in = others * shape.q_bytes(len(mine.q))
    out_back = own * shape.out_bytes(all_q) * (group_size - 1) // group_size
    q_out = own * shape.q_bytes(all_q) * (group_size - 1) // group_size
    kv_back = own * shape.kv_bytes(all_kv) * (group_size - 1) // group_size

    busy = sum(len(s.q) > 0 for s in slices)

    def seconds(of_heads: int, of_rows: int) -> float:
        """For what ranks with heads have of all rows, and what all ranks have of all heads."""
        near = min(group_size, machine.ranks_per_node)
        far = (group_size - near) / (group_size - 1)
        size = max(of_heads, of_rows)
        wire = max(size * (1 - far) / machine.intra_bandwidth, size * far / machine.inter_bandwidth)
        if machine.node_bandwidth:
            of_node = max(of_heads * min(near, busy), of_rows * near)
            wire = max(wire, of_node * far / machine.node_bandwidth)
        return wire + machine.latency + (group_size - 1) * machine.message

    before = (seconds(gather, scatter), seconds(q_in, q_out))
    after = (
        seconds(others * shape.out_bytes(len(mine.q)), out_back),
        seconds(gather, q_out + kv_back),
    )
    return before, after
