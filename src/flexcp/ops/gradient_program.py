"""GradientProgram: what becomes of the gradients of K and V in a backward pass, worked out once.

Gradients come in pieces: what the work of a round finds, and what peers return. Each row of a piece
has one place in a tensor of sums: that of the rank's own row, or that of the next message which
takes the row's gradient away. So a piece is added by one operation, and a message is a part of the
sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexcp.ops.places import Places, arranged, rows_of_spans
from flexcp.schedule import Schedule
from flexcp.schedule.tables import Step


@dataclass(frozen=True, eq=False)
class Add:
    """Rows of a piece that are added to the sums."""

    source: Places
    """Which rows of the piece."""
    target: Places
    """Where they go: no place twice."""
    writes: bool
    """Whether nothing is there yet."""
    clears: Places
    """What has to be set to 0 before, since only some of the places have something."""

    def on(self, device: torch.device) -> Add:
        """The same, with indices on a device."""
        source, target, clears = (x.on(device) for x in (self.source, self.target, self.clears))
        return Add(source, target, self.writes, clears)

    @property
    def launches(self) -> int:
        """What it takes at most: some places are cleared; rows are picked, cast, and added."""
        picked, scattered = self.source.index is not None, self.target.index is not None
        return 1 + (self.clears.rows > 0) + picked + scattered


@dataclass(frozen=True, eq=False)
class RowSums:
    """What peers have returned, in one step: new values of sums, each of rows in a fixed order."""

    source: Tensor
    """int64 [n] The rows that are summed: of the sums, and behind them those that came."""
    starts: Tensor
    """int64 [targets + 1] Where the rows of each target begin in `source`."""
    target: Places | None
    """Where the values go; None if they are those of all own rows, which the pass returns."""

    def on(self, device: torch.device) -> RowSums:
        """The same, with indices on a device."""
        target = None if self.target is None else self.target.on(device)
        return RowSums(self.source.to(device), self.starts.to(device), target)

    @property
    def launches(self) -> int:
        """What it takes at most: rows are cast, summed and put back."""
        return 2 if self.target is None else 3


@dataclass(frozen=True, eq=False)
class GradientRound:
    """What happens after the work of a round."""

    work: tuple[Add, ...]
    """Where the gradients of each piece of work go."""
    clears: Places
    """What is sent though nothing was added to it: set to 0."""
    sends: tuple[tuple[int, Places], ...]
    """To whom, and which sums; messages stand side by side."""
    receives: tuple[tuple[int, Places], ...]
    """From whom, and where to in a piece of what comes."""
    alike: int
    """If not 0, that many peers return the same rows: they are summed over peers, in order."""
    returned: tuple[Add, ...]
    """Where what comes goes, after the work of the next round, in as many parts as a row comes
    times; nothing if it is summed instead."""
    summed: RowSums | None
    """What becomes of it, if that takes less than parts."""

    def on(self, device: torch.device) -> GradientRound:
        """The same, with indices on a device."""
        return replace(
            self,
            work=tuple(add.on(device) for add in self.work),
            clears=self.clears.on(device),
            returned=tuple(add.on(device) for add in self.returned),
            summed=None if self.summed is None else self.summed.on(device),
        )

    @property
    def sent(self) -> Places:
        """All that is sent."""
        first = self.sends[0][1].first if self.sends else 0
        return Places(first, sum(places.rows for _, places in self.sends))

    @property
    def came(self) -> int:
        """Rows that come."""
        return sum(places.rows for _, places in self.receives)


@dataclass(frozen=True, eq=False)
class GradientProgram:
    """All rounds of a backward pass, as the rank sums gradients."""

    rounds: tuple[GradientRound, ...]
    rows: int
    """Places of the sums. The first are the rank's own rows."""
    clears: Places
    """Own rows that nothing is added to."""
    all_to_all: bool
    """Whether all ranks return gradients to all, at once."""

    def on(self, device: torch.device) -> GradientProgram:
        """The same, with indices on a device."""
        rounds = tuple(round_.on(device) for round_ in self.rounds)
        return replace(self, rounds=rounds, clears=self.clears.on(device))


def gradient_program(
    schedule: Schedule,
    rank: int,
    steps: Sequence[Step],
    own: Tensor,
    work: Sequence[Sequence[tuple[int, int]]],
) -> GradientProgram:
    """How gradients are summed.

    Args:
        schedule: What is run.
        rank: Whose part.
        steps: The rank's part of its backward pass.
        own: int64 The rank's own rows.
        work: The first row, and how many, of each round's pieces, in rows of its work.
    """
    sent = [_nonempty(step.returns_out) for step in steps]
    came = [_nonempty(step.returns_in) for step in steps]
    if schedule.gathers_all:  # one all-to-all, in which a rank has a part for itself
        for table in (sent, came):
            table[0] = sorted([*table[0], (rank, own.sort().values)], key=lambda x: x[0])
    sums = _Sums(schedule.layout.rows, own, sent)
    pieces: list[list[Tensor]] = []
    returned: list[list[Tensor]] = []
    for i in reversed(range(len(steps))):
        returned.insert(0, [sums.place[rows] for _, rows in came[i]])
        sums.send(i)
        rows = rows_of_spans(steps[i].work)
        pieces.insert(0, [sums.place[rows[a : a + n]] for a, n in work[i]])
    for i in range(len(steps)):
        sums.note(i, pieces[i])
        sums.note(i + 1, returned[i])
    sums.arrange()
    found, adds, unsent = [], [], []
    for i in range(len(steps)):
        found.append(tuple(sums.add(torch.arange(at.numel()), at) for at in pieces[i]))
        if i:
            adds.append(sums.returned(returned[i - 1]))
        unsent.append(sums.unwritten(sums.message_places(i)))
    adds += [sums.returned(targets, last=True) for targets in returned[-1:]]
    rounds = [
        GradientRound(
            found[i],
            unsent[i],
            sums.messages(i),
            _side_by_side((peer, rows.numel()) for peer, rows in came[i]),
            _alike(returned[i]),
            *adds[i],
        )
        for i in range(len(steps))
    ]
    unwritten = sums.unwritten(torch.arange(own.numel()))
    return GradientProgram(tuple(rounds), sums.rows, unwritten, schedule.gathers_all)


class _Sums:
    """Who has which place of the sums, when; and what has been written."""

    def __init__(
        self, rows: int, own: Tensor, messages: Sequence[Sequence[tuple[int, Tensor]]]
    ) -> None:
        self._own = own.numel()
        self.place = torch.full((rows,), -1)
        """int64 [rows] Where each gradient goes: numbers, to which `arrange` gives places."""
        self.place[own] = torch.arange(self._own)
        self._messages = messages
        counts = [sum(rows.numel() for _, rows in messages) for messages in self._messages]
        starts = torch.tensor([self._own, *counts]).cumsum(0).tolist()
        self._starts, total = starts[:-1], starts[-1]
        self._born = list(range(len(messages)))
        self._round_of = torch.repeat_interleave(torch.tensor(counts, dtype=torch.int64))
        self._counts = counts
        self._at = torch.arange(total)
        self._written = torch.zeros(0, dtype=torch.bool)
        self.rows = 0

    def send(self, i: int) -> None:
        """From round i backwards, gradients of what it sends go to its messages."""
        at = self._starts[i]
        for _, rows in self._messages[i]:
            self.place[rows] = torch.arange(at, at + rows.numel())
            at += rows.numel()

    def note(self, round_: int, targets: Sequence[Tensor]) -> None:
        """Something is added to these numbers in a round, before its messages are sent."""
        for at in targets:
            assert not bool((at < 0).any()), "a gradient has nowhere to go"
            for j in self._round_of[at[at >= self._own] - self._own].unique().tolist():
                self._born[j] = min(self._born[j], round_)

    def arrange(self) -> None:
        """Gives places to messages: from the first addition until the message has been sent."""
        order = sorted(range(len(self._counts)), key=lambda j: self._born[j])
        last = len(self._counts) + 1
        offsets, self.rows = arranged(
            [self._own, *(self._counts[j] for j in order)],
            [-1, *(self._born[j] for j in order)],
            [last, *(j + 1 for j in order)],
        )
        first = dict(zip(order, offsets[1:], strict=True))
        for j, count in enumerate(self._counts):
            at = self._starts[j]
            self._at[at : at + count] = first[j] + torch.arange(count)
        self._written = torch.zeros(self._at.numel(), dtype=torch.bool)

    def add(self, source: Tensor, target: Tensor) -> Add:
        """Adds rows of a piece to numbers that differ from each other."""
        new = ~self._written[target]
        writes = bool(new.all())
        clears = Places(0, 0) if writes else Places.of(self._at[target[new]])
        self._written[target] = True
        return Add(Places.of(source), Places.of(self._at[target]), writes, clears)

    def returned(
        self, targets: Sequence[Tensor], *, last: bool = False
    ) -> tuple[tuple[Add, ...], RowSums | None]:
        """Adds what peers have returned: to each number all that they have, in their order."""
        if not targets:
            return (), None
        if _alike(targets):  # summed before
            return (self.add(torch.arange(targets[0].numel()), targets[0]),), None
        came, written = torch.cat(list(targets)), self._written.clone()
        parts = tuple(self.add(source, at) for source, at in _parts(came))
        numbers = torch.arange(self._own) if last else came.unique()
        there = numbers[written[numbers]]
        order = torch.argsort(torch.cat([there, came]), stable=True)
        source = torch.cat([self._at[there], self.rows + torch.arange(came.numel())])[order]
        counts = torch.bincount(torch.cat([there, came]), minlength=self._at.numel())[numbers]
        whole = RowSums(source, _starts(counts), None if last else Places.of(self._at[numbers]))
        if sum(part.launches for part in parts) <= whole.launches:
            return parts, None
        self._written[numbers] = True
        return (), whole

    def unwritten(self, numbers: Tensor) -> Places:
        """Those of some numbers' places to which nothing was added."""
        return Places.of(self._at[numbers[~self._written[numbers]]])

    def message_places(self, i: int) -> Tensor:
        """int64 The numbers of all that round i sends."""
        return torch.arange(self._starts[i], self._starts[i] + self._counts[i])

    def messages(self, i: int) -> tuple[tuple[int, Places], ...]:
        """What round i sends to whom."""
        first = int(self._at[self._starts[i]]) if self._counts[i] else 0
        return _side_by_side(((p, rows.numel()) for p, rows in self._messages[i]), first)


def _nonempty(
    messages: Sequence[tuple[int, Sequence[tuple[int, int]]]],
) -> list[tuple[int, Tensor]]:
    found = [(peer, rows_of_spans(spans)) for peer, spans in messages]
    return [(peer, rows) for peer, rows in found if rows.numel()]


def _side_by_side(
    messages: Iterable[tuple[int, int]], first: int = 0
) -> tuple[tuple[int, Places], ...]:
    found = []
    for peer, rows in messages:
        found.append((peer, Places(first, rows)))
        first += rows
    return tuple(found)


def _alike(targets: Sequence[Tensor]) -> int:
    """How many messages there are, if there are several and all are for the same rows."""
    same = all(torch.equal(at, targets[0]) for at in targets)
    return len(targets) if same and len(targets) > 1 else 0


def _parts(came: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Rows of a piece, and where they go, in parts in which no target occurs twice.

    The first part has each target's first row, the next its second, and so on: every row is summed
    in the order of the messages, whatever order an addition takes its rows in.
    """
    order = torch.argsort(came, stable=True)
    counts = torch.unique_consecutive(came[order], return_counts=True)[1]
    turn = torch.empty_like(came)
    first = torch.repeat_interleave(_starts(counts)[:-1], counts)
    turn[order] = torch.arange(came.numel()) - first
    parts = (torch.nonzero(turn == i)[:, 0] for i in range(int(counts.max())))
    return [(rows, came[rows]) for rows in parts]


def _starts(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))
