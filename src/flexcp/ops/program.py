"""RankProgram: one rank's part of a schedule, with every row turned into a place in memory.

A schedule speaks of rows of the whole sequence. A rank holds rows in two tensors: its own, and
those that arrive. Here it is worked out, once, where each message lands, which rows each message
and each round's work consist of, and when a place is free again, so that running it is nothing but
copying, sending and computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor

from flexcp.eager import outside_of_transforms, run_eagerly_on_cpu
from flexcp.grid import BlockGrid
from flexcp.kernels.mask_kinds import most_demanding
from flexcp.ops.gradient_program import GradientProgram, gradient_program
from flexcp.ops.places import Places, arranged, rows_of_spans
from flexcp.ops.work import ElementWork, OwnPairs, WorkFinder
from flexcp.schedule import Schedule
from flexcp.schedule.tables import Step

_NOT_ARRIVED = "a schedule uses rows that have not arrived"

Direction = Literal["forward", "backward"]
Held = Literal["own", "arriving", "staged"]
"""Where rows are: a rank's own, those that arrive, or what is put side by side to be sent."""


@dataclass(frozen=True, eq=False)
class Source:
    """Rows to be read: places of the own rows, of those that arrived, or of what was gathered."""

    of: Held
    places: Places


@dataclass(frozen=True, eq=False)
class Round:
    """What a rank does in one round."""

    receives: tuple[tuple[int, Places], ...]
    """From whom, and where to among the rows that arrive."""
    gathers: tuple[Source, ...]
    """What has to be put side by side to be sent, for all peers at once; one after the other."""
    sends: tuple[tuple[int, Source], ...]
    """To whom, and what."""
    gathers_all: bool
    """Whether instead all ranks' own rows are gathered, padded, into all rows that arrive."""
    keys: Source
    """Rows of K and V that are computed against."""
    work: tuple[ElementWork, ...]
    """What is computed."""


@dataclass(frozen=True, eq=False)
class RankProgram:
    """One direction of one rank."""

    rounds: tuple[Round, ...]
    ranks: int
    """How many take part."""
    own_rows: int
    """Rows of K and V that are the rank's own."""
    sent_rows: int
    """Room for its own rows; more than there are if all ranks' parts are padded to the longest."""
    arriving_rows: int
    """Room for rows that arrive, in which a place serves several rounds."""
    own_is_given: bool
    """Whether K and V come as rows, as after a swap: then no room is kept for own rows."""
    own_is_read: bool
    """Whether own rows are needed, beside those that arrive or were kept."""
    own_arrive: bool
    """Whether own rows are put first among those that arrive, since they are read together."""
    keeps: bool
    """Whether all that arrives stays, for another pass."""
    by_element: bool
    """Whether batch elements have layouts of their own, and rows are tokens of one element."""
    as_one: bool
    """Whether the rows of all elements are computed as one sequence, in spite of that."""
    gradients: GradientProgram | None
    """What becomes of the gradients of K and V; None in the forward pass."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    """Where its indices are."""
    free: dict[Any, list[Any]] = field(default_factory=dict, repr=False)
    """Workspaces of passes that have ended, by kind of rows; the executor bounds them."""
    lock: Lock = field(default_factory=Lock, repr=False)
    """Guards them: threads may share a program."""
    _on: dict[torch.device, RankProgram] = field(default_factory=dict, repr=False)

    @cached_property
    def staged_rows(self) -> int:
        """Room for rows that have to be gathered to be sent, of one round."""
        return max((sum(x.places.rows for x in r.gathers) for r in self.rounds), default=0)

    @cached_property
    def gathered_rows(self) -> int:
        """Room for rows that have to be gathered to be computed against, of one round."""
        return max(
            (r.keys.places.rows for r in self.rounds if r.keys.places.index is not None), default=0
        )

    def on(self, device: torch.device) -> RankProgram:
        """The program with its indices on a device, where they are put once."""
        if device == self.device:
            return self
        found = self._on.get(device)
        if found is None:
            rounds = tuple(_round_on(round_, device) for round_ in self.rounds)
            gradients = None if self.gradients is None else self.gradients.on(device)
            made = replace(self, rounds=rounds, gradients=gradients, device=device, _on={})
            found = self._on.setdefault(device, made)
        return found


def _round_on(round_: Round, device: torch.device) -> Round:
    def moved(source: Source) -> Source:
        return Source(source.of, source.places.on(device))

    gathers = tuple(moved(source) for source in round_.gathers)
    return replace(round_, gathers=gathers, keys=moved(round_.keys))


@dataclass(frozen=True, eq=False)
class RankPrograms:
    """Both directions of one rank under one mask, each worked out when it is first run."""

    schedule: Schedule
    grid: BlockGrid
    rank: int
    as_one: bool
    """Whether batch elements whose layouts differ are computed as one sequence: in one go, if it
    does not matter which element a row is of."""
    part: int = 0
    """Which part of its heads, where masks of heads differ."""

    @cached_property
    def forward(self) -> RankProgram:
        """What the rank does in the forward pass."""
        with outside_of_transforms():
            return self._program("forward")

    @cached_property
    def own_pairs(self) -> OwnPairs | None:
        """What is computed while rows are swapped for heads; None if there is no such thing."""
        if self.schedule.heads_group_size == 1 or self.as_one:
            return None
        with outside_of_transforms():
            return own_pairs(self.schedule, self.grid, self.rank, self.part)

    @property
    def mask_kind(self) -> str:
        """The most demanding kind of mask among the rank's rounds, in the rows that it computes."""
        shapes = [w.shapes for r in self.forward.rounds for w in r.work]
        shapes += [] if self.own_pairs is None else [self.own_pairs.shapes]
        return most_demanding(x.kind for x in shapes)

    def mean_scores(self, batch: int, heads: int) -> int:
        """How many scores a rank computes, on average: the same number on all of them."""
        of_one_head = self.grid.area() / self.grid.planes.of.numel()
        return int(of_one_head * batch * heads / self.schedule.ranks)

    @cached_property
    def backward(self) -> RankProgram:
        """What the rank does in the backward pass."""
        with outside_of_transforms():
            return self._program("backward")

    def _program(self, direction: Direction) -> RankProgram:
        return rank_program(
            self.schedule, self.grid, self.rank, direction, as_one=self.as_one, part=self.part,
            apart=self.own_pairs,
        )  # fmt: skip


@run_eagerly_on_cpu
def own_pairs(schedule: Schedule, grid: BlockGrid, rank: int, part: int) -> OwnPairs | None:
    """A rank's own rows with its own keys, where it has some heads of its group's rows."""
    finder = WorkFinder(schedule, grid, *schedule.group_of(rank), part)
    return finder.own_pairs(schedule.layout, schedule.members(rank), rank)


@run_eagerly_on_cpu
def rank_program(
    schedule: Schedule,
    grid: BlockGrid | None,
    rank: int,
    direction: Direction,
    *,
    as_one: bool = False,
    part: int = 0,
    apart: OwnPairs | None = None,
) -> RankProgram:
    """What one rank does in every round of one pass; without a grid, it only moves rows.

    `as_one` says that batch elements whose layouts differ are computed as one sequence. With `part`
    it is one for a part of the rank's heads. What is computed `apart` is in no round.
    """
    group, place = schedule.group_of(rank)
    own = schedule.groups.rows_of(group)
    steps = schedule.steps(rank, direction)
    kept = direction == "backward" and schedule.keeps_kv
    arrivals = schedule.steps(rank, "forward") if kept else steps
    if schedule.gathers_all:
        buffers = [own, _gathered_from_all(schedule)]
    else:
        buffers = [own, *(_rows_of_messages(step.receives) for step in arrivals)]
    rows = [rows_of_spans(step.work) for step in steps]
    work: list[tuple[ElementWork, ...]] = [()] * len(steps)
    pieces = [[(0, x.numel())] if x.numel() else [] for x in rows]
    if grid is not None:
        finder = WorkFinder(schedule, grid, group, place, part)
        work = [finder.as_one(x) if as_one else finder.of(x, apart) for x in rows]
        pieces = [[(w.first, w.rows) for w in found] for found in work]
    memory = _Memory(
        steps, buffers, kept=kept, keeps=schedule.keeps_kv, all_=schedule.gathers_all,
        own_arrive=bool(schedule.own_arrive[direction][group]),
    )  # fmt: skip
    rounds = [Round(*memory.transfers(i), memory.keys(i), found) for i, found in enumerate(work)]
    gradients = None
    if direction == "backward":
        gradients = gradient_program(schedule, rank, steps, own, pieces)
    by_element = schedule.groups.batch_elements > 1
    padded = schedule.longest_part if schedule.gathers_all else own.numel()
    return RankProgram(
        tuple(rounds),
        schedule.ranks,
        own.numel(),
        padded,
        memory.rows,
        schedule.heads_group_size > 1 and not (memory.own_arrive or by_element),
        (memory.own_is_read and not (kept and memory.own_arrive))
        or (schedule.gathers_all and not kept),
        memory.own_arrive,
        schedule.keeps_kv,
        by_element,
        as_one and by_element,
        gradients,
    )


class _Memory:
    """Where the rows of each round are: found first by buffer, then as places.

    Buffer 0 are the own rows, buffer i + 1 those that arrive in round i. Rows that arrive in round
    i land from its start on, which is when round i - 1 begins to be computed. So a place is free
    for round m once what was in it has been computed against in round m - 2, and sent in m - 1.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        buffers: Sequence[Tensor],
        *,
        kept: bool,
        keeps: bool,
        all_: bool,
        own_arrive: bool,
    ) -> None:
        self._steps = steps
        self._receives = () if kept else [step.receives for step in steps]
        self._all = all_ and not kept
        self._keys, self._sends = [], []
        finder = _RowFinder(buffers)
        finder.know(len(buffers) if kept else 1)
        for i, step in enumerate(steps):
            messages = () if all_ else step.sends
            self._sends.append([(p, finder.find(rows_of_spans(s))) for p, s in messages])
            finder.know(i + 2)
            self._keys.append(finder.find(rows_of_spans(step.work)))
        used = [*self._keys, *(held for sends in self._sends for _, held in sends)]
        self.own_arrive = own_arrive
        self.own_is_read = any(bool((held[0] == 0).any()) for held in used)
        sizes = [x.numel() for x in buffers]
        until = [len(steps) + 2 if keeps else i + 1 for i in range(len(buffers))]
        for i in range(len(steps)):
            for which in self._keys[i][0].unique().tolist():
                until[which] = max(until[which], i + 2)
            for _, held in self._sends[i]:
                for which in held[0].unique().tolist():
                    until[which] = max(until[which], i + 1)
        born = [max(0, i - 1) for i in range(len(buffers))]
        if self.own_arrive:
            until[0] = len(steps) + 2
        else:
            sizes[0] = 0
        offsets, self.rows = arranged(sizes, born, until)
        self._offsets = torch.tensor(offsets)

    def transfers(
        self, i: int
    ) -> tuple[
        tuple[tuple[int, Places], ...], tuple[Source, ...], tuple[tuple[int, Source], ...], bool
    ]:
        """What round i receives, gathers, sends, and whether it is an all-gather instead."""
        if self._all:
            return (), (), (), True
        receives = []
        at = int(self._offsets[i + 1]) if self._receives else 0
        for peer, spans in self._receives[i] if self._receives else ():
            rows = sum(stop - start for start, stop in spans)
            if rows:
                receives.append((peer, Places(at, rows)))
            at += rows
        sends = [(peer, self._source(held)) for peer, held in self._sends[i]]
        return tuple(receives), *_staged([(p, s) for p, s in sends if s.places.rows]), False

    def keys(self, i: int) -> Source:
        """What round i computes against."""
        return self._source(self._keys[i])

    def _source(self, held: tuple[Tensor, Tensor]) -> Source:
        buffer, row = held
        is_own = not self.own_arrive and not bool((buffer > 0).any())
        at = row if is_own else self._offsets[buffer] + row
        return Source("own" if is_own else "arriving", Places.of(at))


def _staged(
    sends: Sequence[tuple[int, Source]],
) -> tuple[tuple[Source, ...], tuple[tuple[int, Source], ...]]:
    """What is gathered, by one operation per tensor; and what is sent once it is."""
    gathers, staged, at = [], dict(sends), 0
    for of in ("own", "arriving"):
        indices = []
        for peer, source in sends:
            index = source.places.index
            if source.of == of and index is not None:
                staged[peer] = Source("staged", Places(at, index.numel()))
                indices.append(index)
                at += index.numel()
        if indices:
            index = torch.cat(indices)
            gathers.append(Source(of, Places(0, index.numel(), index)))
    return tuple(gathers), tuple(staged.items())


def _gathered_from_all(schedule: Schedule) -> Tensor:
    """int64 Rows in the order of an all-gather of padded parts; -1 for padding."""
    found = torch.full((schedule.ranks, schedule.longest_part), -1)
    for rank in range(schedule.ranks):
        rows = schedule.groups.rows_of(rank)
        found[rank, : rows.numel()] = rows
    return found.flatten()


class _RowFinder:
    """Where each row is: in the latest buffer that holds it, of those that are known so far."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers, self._known = buffers, 0
        rows = max((int(x.max()) + 1 for x in buffers if x.numel()), default=0)
        self._buffer, self._row = torch.full((rows,), -1), torch.zeros(rows, dtype=torch.int64)

    def know(self, count: int) -> None:
        """The first `count` buffers are known from now on."""
        for number in range(self._known, min(count, len(self._buffers))):
            rows = self._buffers[number]
            held = (rows >= 0).nonzero()[:, 0]  # not padding
            self._buffer[rows[held]] = number
            self._row[rows[held]] = held
        self._known = max(self._known, count)

    def find(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [n] Which buffer each row is in, and where there."""
        assert rows.numel() == 0 or int(rows.max()) < self._buffer.numel(), _NOT_ARRIVED
        buffer = self._buffer[rows]
        assert not bool((buffer < 0).any()), _NOT_ARRIVED
        return buffer, self._row[rows]


def _rows_of_messages(messages: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> Tensor:
    return torch.cat([*(rows_of_spans(s) for _, s in messages), torch.zeros(0, dtype=torch.int64)])
