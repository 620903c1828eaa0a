"""The few step types that every schedule consists of, as tables.

A schedule runs in rounds. In each, some rows of K and V move from one rank to another, and every
rank then computes all of its queries against some rows of K and V. In the backward pass, partial
gradients of those rows move afterwards. Each row of a table is one transfer: who sends, who
receives, which rows of K and V. So every send has its receive.

With heads split over the ranks of a group (`heads_group_size` > 1), the tables speak of groups.
Rank `g * heads_group_size + u` runs what they say of group g, for its own slice of heads, with the
ranks of the same u.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from flexcp.grid.analysis.indexing import order_of, take
from flexcp.layout import Layout
from flexcp.packing import reduce_packed
from flexcp.schedule.heads import HeadSlice
from flexcp.schedule.own_rows import reads_both

_MOST_PADDING = 2
"""Rows that an all-gather moves, padding included, over those that it has to: with more, messages
between pairs of ranks move less."""


def _none() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Transfers:
    """Rows that move, sorted by round, target, source, start."""

    round: Tensor
    """int64 [N] When."""
    source: Tensor
    """int64 [N] From whom."""
    target: Tensor
    """int64 [N] To whom."""
    start: Tensor
    """int64 [N] First row."""
    stop: Tensor
    """int64 [N] Row after the last."""

    @classmethod
    def none(cls) -> Transfers:
        """No transfers."""
        return cls(_none(), _none(), _none(), _none(), _none())

    @classmethod
    def ordered(
        cls, round_: Tensor, source: Tensor, target: Tensor, start: Tensor, stop: Tensor
    ) -> Transfers:
        """Sorts transfers, and joins those whose rows continue each other."""
        if round_.numel() == 0:
            return cls(round_, source, target, start, stop)
        ranks = int(torch.maximum(source, target).max()) + 1
        key = ((round_ * ranks + target) * ranks + source) * (int(start.max()) + 1) + start
        order = order_of(key)
        columns = [take(x, order) for x in (round_, source, target, start, stop)]
        opens = torch.ones(order.numel(), dtype=torch.bool)
        opens[1:] = columns[3][1:] != columns[4][:-1]
        for column in columns[:3]:
            opens[1:] |= column[1:] != column[:-1]
        first = opens.nonzero().view(-1)
        if first.numel() == opens.numel():
            return cls(*columns)
        last = torch.cat([first[1:], torch.tensor([opens.numel()])]) - 1
        round_, source, target, start = (take(c, first) for c in columns[:4])
        return cls(round_, source, target, start, take(columns[4], last))

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_packed(self)

    def __len__(self) -> int:
        return self.round.numel()

    @property
    def rows(self) -> Tensor:
        """int64 [N] How many rows each transfer moves."""
        return self.stop - self.start

    def received(self, ranks: int) -> Tensor:
        """int64 [ranks] Rows that each rank receives."""
        return torch.zeros(ranks, dtype=torch.int64).index_add_(0, self.target, self.rows)

    def reversed(self) -> Transfers:
        """Each transfer in the other direction: what was received is sent back."""
        return Transfers.ordered(self.round, self.target, self.source, self.start, self.stop)


@dataclass(frozen=True, eq=False)
class Tasks:
    """What is computed: all queries that a rank holds against some rows, as the mask allows."""

    round: Tensor
    """int64 [N] When, never falling."""
    rank: Tensor
    """int64 [N] By whom."""
    start: Tensor
    """int64 [N] First row of keys."""
    stop: Tensor
    """int64 [N] Row after the last."""

    @classmethod
    def of_layout(cls, layout: Layout, round_: int = 0) -> Tasks:
        """Every rank against its own rows."""
        sets = layout.owned
        return cls(torch.full_like(sets.rank, round_), sets.rank, sets.start, sets.stop)

    @classmethod
    def after(cls, moves: Transfers, *before: Tasks) -> Tasks:
        """Each row as soon as it has arrived, after what comes before."""
        tables = [*before, cls(moves.round, moves.target, moves.start, moves.stop)]
        round_ = torch.cat([t.round for t in tables])
        order = order_of(round_)
        rest = (torch.cat([getattr(t, n) for t in tables]) for n in ("rank", "start", "stop"))
        return cls(take(round_, order), *(take(x, order) for x in rest))

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_packed(self)

    def __len__(self) -> int:
        return self.round.numel()


@dataclass(frozen=True, eq=False)
class Pass:
    """The forward or the backward pass."""

    rounds: int
    """How many rounds."""
    moves: Transfers
    """K and V rows; they arrive before the work of their round."""
    work: Tasks
    """What is computed."""
    returns: Transfers = field(default_factory=Transfers.none)
    """dK and dV rows; they leave after the work of their round. The source sends all that it has
    gathered for these rows, and forgets it; the target adds it to its own."""


@dataclass(frozen=True, eq=False)
class Step:
    """One round as one rank sees it. Peers are ranks, rows are (start, stop) pairs."""

    receives: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """K and V rows, by peer in ascending order; rows of one peer come in one message."""
    sends: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """K and V rows to send, by peer in ascending order; rows for one peer go in one message."""
    work: tuple[tuple[int, int], ...]
    """Rows of K and V that the rank's queries are computed against now, ascending."""
    returns_in: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """dK and dV rows to receive and add, after the work."""
    returns_out: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """dK and dV rows to send, after the work."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Who needs what, and when it moves; the same for every rank."""

    name: str
    """What made it."""
    layout: Layout
    """Where tokens live outside of attention."""
    groups: Layout
    """Which rows each group computes the queries of; the layout itself if groups are ranks."""
    heads_group_size: int
    """Ranks of a group, among which the heads are split."""
    heads: tuple[HeadSlice, ...]
    """Query and kv heads of each rank of a group."""
    forward: Pass
    """Between groups."""
    backward: Pass
    """Between groups."""
    outer_schedule: str = "exchange"
    """What runs between groups: exchange, ring, allgather, or nothing ("ulysses")."""
    keeps_kv: bool = False
    """Whether the rows that forward received are kept for backward, which then moves none."""
    head_parts: int = 1
    """Parts of a rank's heads that are computed one after the other, each as the tables say: while
    one is, the next one's rows are swapped for heads, and the former's results for rows."""

    def __repr__(self) -> str:
        rounds, transfers = self.forward.rounds, len(self.forward.moves)
        shared = f", heads shared by {self.heads_group_size}" if self.heads_group_size > 1 else ""
        return (
            f"Schedule({self.name}: {self.ranks} ranks{shared}, {transfers} transfers in "
            f"{rounds} round{'' if rounds == 1 else 's'} forward)"
        )

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return self.layout.ranks

    @cached_property
    def heads_by_part(self) -> tuple[tuple[HeadSlice, ...], ...]:
        """Query and kv heads of each rank of a group, by part."""
        if self.head_parts == 1:
            return (self.heads,)
        num_heads = max(s.q.stop for s in self.heads)
        num_kv_heads = max(s.kv.stop for s in self.heads)
        cut = [s.cut(self.head_parts, num_heads, num_kv_heads) for s in self.heads]
        return tuple(zip(*cut, strict=True))

    def group_of(self, rank: int) -> tuple[int, int]:
        """Group of a rank, and its place there."""
        return rank // self.heads_group_size, rank % self.heads_group_size

    def members(self, rank: int) -> range:
        """The ranks of the group of a rank: they swap rows for heads before and after."""
        first = rank // self.heads_group_size * self.heads_group_size
        return range(first, first + self.heads_group_size)

    @cached_property
    def gathers_all(self) -> bool:
        """Whether KV rows move in one all-gather of all ranks, and gradients in one all-to-all.

        Parts are padded to the longest. Every rank decides this alike, from the schedule alone.
        """
        counts = self.layout.counts
        if self.outer_schedule != "allgather" or self.heads_group_size > 1 or self.ranks == 1:
            return False
        padded = int(counts.max()) * self.ranks
        return bool((counts > 0).all()) and padded <= _MOST_PADDING * int(counts.sum())

    @property
    def longest_part(self) -> int:
        """Rows of each rank's part of an all-gather, padding included."""
        return int(self.layout.counts.max()) * self.layout.batch_elements

    def kept_rows(self, group: int) -> int:
        """KV rows that are kept for the backward pass, in one tensor.

        Where a round needs own rows beside others, they are in it as well.
        """
        if not self.keeps_kv:
            return 0
        if self.gathers_all:
            return self.ranks * self.longest_part
        received = int(self.forward.moves.received(self.groups.ranks)[group])
        own = int(self.groups.counts[group]) * self.groups.batch_elements
        return received + (own if self.own_arrive["forward"][group] else 0)

    @cached_property
    def own_arrive(self) -> Mapping[str, Tensor]:
        """Bool [groups] By pass: whether own rows are put among those that arrive.

        They are where both are read together. What is kept stays where it is for backward.
        """
        if self.gathers_all:  # own rows come back with the others'
            return dict.fromkeys(("forward", "backward"), torch.zeros(self.ranks, dtype=torch.bool))
        forward = reads_both(self.forward, self.groups)
        backward = forward if self.keeps_kv else reads_both(self.backward, self.groups)
        return {"forward": forward, "backward": backward}

    def with_kept_kv(self) -> Schedule:
        """A schedule that keeps the KV rows that forward received: backward then moves none.

        It takes the rounds in the other order, so that gradients of others' rows are on their way
        home while a rank computes its own.
        """
        what, last = self.backward, self.backward.rounds - 1
        order = order_of(last - what.work.round)
        work = Tasks(
            (last - what.work.round)[order],
            *(take(x, order) for x in (what.work.rank, what.work.start, what.work.stop)),
        )
        home = what.returns
        returns = Transfers.ordered(
            last - home.round, home.source, home.target, home.start, home.stop
        )
        backward = Pass(what.rounds, Transfers.none(), work, returns)
        return replace(self, backward=backward, keeps_kv=True)

    def steps(self, rank: int, direction: Literal["forward", "backward"]) -> tuple[Step, ...]:
        """What one rank does, round by round."""
        what = self.forward if direction == "forward" else self.backward
        group, place = self.group_of(rank)
        tables = (
            _by_round(what.moves, what.moves.target == group, what.moves.source),
            _by_round(what.moves, what.moves.source == group, what.moves.target),
            _by_round(what.returns, what.returns.target == group, what.returns.source),
            _by_round(what.returns, what.returns.source == group, what.returns.target),
        )
        own = what.work.rank == group
        work: dict[int, list[tuple[int, int]]] = {}
        for i, a, b in zip(
            *(x[own].tolist() for x in (what.work.round, what.work.start, what.work.stop)),
            strict=True,
        ):
            work.setdefault(i, []).append((a, b))

        def messages(
            table: dict[int, dict[int, list[tuple[int, int]]]], i: int
        ) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
            peers = sorted(table.get(i, {}).items())
            return tuple(
                (peer * self.heads_group_size + place, tuple(rows)) for peer, rows in peers
            )

        receives, sends, back_in, back_out = tables
        return tuple(
            Step(
                messages(receives, i),
                messages(sends, i),
                tuple(sorted(work.get(i, []))),
                messages(back_in, i),
                messages(back_out, i),
            )
            for i in range(what.rounds)
        )


def _by_round(
    table: Transfers, chosen: Tensor, peer: Tensor
) -> dict[int, dict[int, list[tuple[int, int]]]]:
    found: dict[int, dict[int, list[tuple[int, int]]]] = {}
    columns = (x[chosen].tolist() for x in (table.round, peer, table.start, table.stop))
    for i, p, a, b in zip(*columns, strict=True):
        found.setdefault(i, {}).setdefault(p, []).append((a, b))
    return found
