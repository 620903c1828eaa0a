"""RankProgram: one rank's part of a schedule, with every row turned into an index.

A schedule speaks of rows of the whole sequence. A rank holds rows in buffers: its own, and those
that arrive in each round. Here every message and every piece of work is worked out once, as copies
of rows out of buffers, so that running it is nothing but copying, sending and computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from flexcp.eager import outside_of_transforms, run_eagerly_on_cpu
from flexcp.grid import BlockGrid
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.key_ranges import key_ranges_of
from flexcp.kernels.shapes import shapes_from_ranges
from flexcp.schedule import Schedule
from flexcp.schedule.tables import Step

Spans = Sequence[tuple[int, int]]

_SHORT_RUN = 16
"""Runs of rows that are shorter than this, on average, are moved row by row."""


@dataclass(frozen=True, eq=False)
class RowCopy:
    """Some rows out of one buffer, to be put at some places of the result."""

    buffer: int
    """Which buffer: 0 are the own rows, i + 1 those that arrive in round i."""
    source: Tensor
    """int64 [n] Which rows of the buffer; at least one."""
    place: Tensor
    """int64 [n] Where they go."""

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...] | None:
        """Consecutive rows that go to consecutive places: (first row, first place, how many).

        None if there are so many that it is cheaper to move the rows one by one.
        """
        breaks = (self.source.diff() != 1) | (self.place.diff() != 1)
        first = torch.cat([torch.zeros(1, dtype=torch.int64), breaks.nonzero()[:, 0] + 1])
        if first.numel() * _SHORT_RUN > self.source.numel() and first.numel() > 1:
            return None
        lengths = torch.cat([first[1:], torch.tensor([self.source.numel()])]) - first
        table = torch.stack([self.source[first], self.place[first], lengths], dim=1)
        return tuple((row, place, rows) for row, place, rows in table.tolist())

    def takes_all_of(self, rows: int) -> bool:
        """Whether these are all of so many rows, as they are."""
        return self.runs == ((0, 0, rows),)


@dataclass(frozen=True, eq=False)
class Message:
    """Rows to or from a peer."""

    peer: int
    rows: int
    """How many."""
    copies: tuple[RowCopy, ...] = ()
    """Where they are taken from, if they are sent."""


@dataclass(frozen=True, eq=False)
class ElementWork:
    """The work of one batch element, or of all that share a layout."""

    b: int | None
    """Which batch element; None for all."""
    keys: Tensor
    """int64 [n] Which of the round's rows are its keys."""
    shapes: CompiledShapes
    """What to compute, in rows of its queries and keys."""


@dataclass(frozen=True, eq=False)
class Round:
    """What a rank does in one round."""

    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    rows: int
    """Rows of K and V that are computed against."""
    copies: tuple[RowCopy, ...]
    """Where they are."""
    work: tuple[ElementWork, ...]
    """What is computed."""
    returns_in: tuple[Message, ...]
    """Gradients that come after the work."""
    returns_out: tuple[Message, ...]
    """Gradients that leave after the work; buffers are here pieces of gradient, see below."""


@dataclass(frozen=True, eq=False)
class RankProgram:
    """One direction of one rank.

    In the backward pass gradients come in pieces: 2 * i is that of the work of round i, 2 * i + 1
    what was returned in round i. `own_gradients` says which rows of which pieces are its own.
    """

    rounds: tuple[Round, ...]
    own_gradients: tuple[RowCopy, ...]
    by_element: bool
    """Whether batch elements have layouts of their own, and rows are tokens of one element."""
    last_use: tuple[int, ...]
    """The round after which each buffer is not needed any more."""


@dataclass(frozen=True, eq=False)
class RankPrograms:
    """Both directions of one rank under one mask, each worked out when it is first run."""

    schedule: Schedule
    grid: BlockGrid
    rank: int

    @cached_property
    def forward(self) -> RankProgram:
        """What the rank does in the forward pass."""
        with outside_of_transforms():
            return rank_program(self.schedule, self.grid, self.rank, "forward")

    @cached_property
    def backward(self) -> RankProgram:
        """What the rank does in the backward pass."""
        with outside_of_transforms():
            return rank_program(self.schedule, self.grid, self.rank, "backward")


@run_eagerly_on_cpu
def rank_program(
    schedule: Schedule, grid: BlockGrid, rank: int, direction: Literal["forward", "backward"]
) -> RankProgram:
    """What one rank does in every round of one pass."""
    group, place = schedule.group_of(rank)
    own = schedule.groups.rows_of(group)
    forward = schedule.steps(rank, "forward")
    steps = forward if direction == "forward" else schedule.steps(rank, "backward")
    keeps = direction == "backward" and schedule.keeps_kv
    held = _HeldRows(schedule.groups.seq_len * schedule.groups.batch_elements)
    held.add(own)
    for step in forward if keeps else ():
        held.add(_rows_of_messages(step.receives))
    work = WorkFinder(schedule, grid, group, place)
    rounds = []
    for step in steps:
        rows = rows_of_spans(step.work)
        sends = tuple(_message(p, rows_of_spans(s), held) for p, s in step.sends)
        if not keeps:
            held.add(_rows_of_messages(step.receives))
        rounds.append(
            Round(
                tuple(Message(p, rows_of_spans(s).numel()) for p, s in step.receives),
                sends,
                rows.numel(),
                held.copies(rows),
                work.of(rows),
                (),
                (),
            )
        )
    rounds, own_gradients = _with_returns(rounds, steps, own)
    last_use = _last_use(rounds, held.buffers, schedule.keeps_kv)
    return RankProgram(tuple(rounds), own_gradients, schedule.groups.batch_elements > 1, last_use)


class WorkFinder:
    """Shapes of a round's work; row ranges of the mask are found once."""

    def __init__(self, schedule: Schedule, grid: BlockGrid, group: int, place: int) -> None:
        self._elements = schedule.groups.batch_elements
        self._seq_len = schedule.groups.seq_len
        positions = schedule.groups.positions(group)
        self._q = [positions] if self._elements == 1 else list(positions)
        grid = _of_heads(grid, schedule.heads[place].q) if schedule.heads_group_size > 1 else grid
        elements = range(self._elements) if self._elements > 1 else ()
        self._grids = [_of_element(grid, b) for b in elements] or [grid]
        self._ranges = [key_ranges_of(g) for g in self._grids]

    def of(self, rows: Tensor) -> tuple[ElementWork, ...]:
        """What the rank computes against these rows."""
        found = []
        for b in range(self._elements):
            inside = torch.nonzero(torch.div(rows, self._seq_len, rounding_mode="floor") == b)[:, 0]
            if inside.numel() == 0 or self._q[b].numel() == 0:
                continue
            shapes = shapes_from_ranges(
                self._ranges[b],
                self._grids[b],
                q_positions=self._q[b],
                kv_positions=rows[inside] - b * self._seq_len,
            )
            if any(plane.slabs or plane.tiles for plane in shapes.planes):
                element = None if self._elements == 1 else b
                found.append(ElementWork(element, inside, CompiledShapes(shapes)))
        return tuple(found)


def _of_element(grid: BlockGrid, b: int) -> BlockGrid:
    """The grid of one batch element."""
    of = grid.planes.of[b : b + 1] if grid.batch > 1 else grid.planes.of
    return replace(grid, planes=replace(grid.planes, of=of))


def _of_heads(grid: BlockGrid, heads: range) -> BlockGrid:
    """The grid of some heads."""
    if grid.heads == 1 or not len(heads):
        return grid
    of = grid.planes.of[:, heads.start : heads.stop]
    return replace(grid, planes=replace(grid.planes, of=of))


def _with_returns(
    rounds: list[Round], steps: Sequence[Step], own: Tensor
) -> tuple[list[Round], tuple[RowCopy, ...]]:
    """Adds where returned gradients are gathered from; what is sent leaves its piece."""
    pieces = _GradientPieces()
    done = []
    for i, (round_, step) in enumerate(zip(rounds, steps, strict=True)):
        pieces.add(2 * i, rows_of_spans(step.work))
        out = []
        for peer, spans in step.returns_out:
            rows = rows_of_spans(spans)
            out.append(Message(peer, rows.numel(), pieces.take(rows)))
        pieces.add(2 * i + 1, _rows_of_messages(step.returns_in))
        back = tuple(Message(p, rows_of_spans(s).numel()) for p, s in step.returns_in)
        done.append(replace(round_, returns_in=back, returns_out=tuple(out)))
    return done, pieces.take(own)


class _GradientPieces:
    """The pieces of gradient that a rank has, without what it has sent."""

    def __init__(self) -> None:
        # Row, piece, and place in the piece of all that is there, by piece and place.
        self._rows = self._piece = self._place = torch.zeros(0, dtype=torch.int64)

    def add(self, piece: int, rows: Tensor) -> None:
        """A new piece holds the gradients of these rows."""
        self._rows = torch.cat([self._rows, rows])
        self._piece = torch.cat([self._piece, torch.full_like(rows, piece)])
        self._place = torch.cat([self._place, torch.arange(rows.numel())])

    def take(self, rows: Tensor) -> tuple[RowCopy, ...]:
        """Everything that pieces hold of some rows; they do not hold it any more."""
        if rows.numel() == 0:
            return ()
        ascending, order = torch.sort(rows)
        at = torch.searchsorted(ascending, self._rows).clamp(max=rows.numel() - 1)
        taken = ascending[at] == self._rows
        pieces, counts = torch.unique_consecutive(self._piece[taken], return_counts=True)
        sizes = counts.tolist()
        copies = zip(
            pieces.tolist(),
            self._place[taken].split(sizes),
            order[at[taken]].split(sizes),
            strict=True,
        )
        found = tuple(RowCopy(*copy) for copy in copies)
        left = ~taken
        self._rows, self._piece, self._place = (
            x[left] for x in (self._rows, self._piece, self._place)
        )
        return found


class _HeldRows:
    """Where each row is: in the latest buffer that holds it."""

    def __init__(self, rows: int) -> None:
        self.buffers = 0
        self._buffer = torch.full((rows,), -1, dtype=torch.int64)
        self._place = torch.zeros(rows, dtype=torch.int64)

    def add(self, rows: Tensor) -> None:
        """The next buffer holds these rows, in this order."""
        self._buffer[rows] = self.buffers
        self._place[rows] = torch.arange(rows.numel())
        self.buffers += 1

    def copies(self, rows: Tensor) -> tuple[RowCopy, ...]:
        """From which places of which buffers rows are copied, from the latest buffer on."""
        buffer = self._buffer[rows]
        assert not bool((buffer < 0).any()), "a schedule uses rows that have not arrived"
        found = []
        for number in buffer.unique().flip(0).tolist():
            to = torch.nonzero(buffer == number)[:, 0]
            found.append(RowCopy(number, self._place[rows[to]], to))
        return tuple(found)


def _message(peer: int, rows: Tensor, held: _HeldRows) -> Message:
    return Message(peer, rows.numel(), held.copies(rows))


def _last_use(rounds: Sequence[Round], buffers: int, keeps: bool) -> tuple[int, ...]:
    last = [len(rounds) if keeps else -1] * buffers
    for i, round_ in enumerate(rounds):
        users = [*round_.copies, *(c for m in round_.sends for c in m.copies)]
        for copy in users:
            last[copy.buffer] = max(last[copy.buffer], i)
    return tuple(last)


def rows_of_spans(spans: Spans) -> Tensor:
    """int64 The rows of some (start, stop) pairs."""
    parts = [torch.arange(a, b) for a, b in spans]
    return torch.cat([*parts, torch.zeros(0, dtype=torch.int64)])


def _rows_of_messages(messages: Sequence[tuple[int, Spans]]) -> Tensor:
    return torch.cat([*(rows_of_spans(s) for _, s in messages), torch.zeros(0, dtype=torch.int64)])
