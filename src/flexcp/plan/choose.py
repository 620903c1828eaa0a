"""Trying layouts and schedules, and keeping the cheapest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import torch

from flexcp.blocks import BlockGrid
from flexcp.errors import FlexCPError
from flexcp.layout import (
    Layout,
    area_per_rank,
    balanced,
    contiguous,
    dealt,
    head_tail,
    per_document_head_tail,
    ptrr,
    striped,
)
from flexcp.layout.fill import fold
from flexcp.layout.policies import even_edges
from flexcp.layout.work import Work
from flexcp.plan.cost import Cost, price
from flexcp.plan.load import Load
from flexcp.plan.machine import Machine
from flexcp.plan.mesh import Ranks
from flexcp.plan.shape import AttentionShape
from flexcp.schedule import Needs, Schedule, make_schedule
from flexcp.schedule.ulysses import grouped

LAYOUTS = ("auto", "contiguous", "head_tail", "striped", "per_document", "ptrr", "balanced")
"""The names of all layouts."""
_DENSE = 0.2
"""From this share of an all-gather on, rotating or gathering everything may be as good."""

_CHUNKS, _MOST_LINES = 8, 1 << 21
"""Chunks per rank of dealt layouts, and the largest table of transfers to try them with."""
_RING = 128
"""Groups up to which a ring is tried: it is never much better than an exchange."""
_FLAT = 1.001
"""Ranks that are as even as this need no other layout to be more so."""
_HARDLY_MORE = 1.02
"""What a schedule that fetches rows again in backward may cost, relative to one that keeps them."""
_EVEN = 1.015
"""Groups of ranks that are as even as this keep the layout that was made for the ranks."""


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be planned."""

    grids: Mapping[str, BlockGrid]
    ranks: Ranks
    shape: AttentionShape
    machine: Machine

    @property
    def seq_len(self) -> int:
        """Tokens."""
        return next(iter(self.grids.values())).q_len

    @cached_property
    def pairs_per_row(self) -> float:
        """Pairs, over all heads, that a rank computes while it receives one row of K and V."""
        row = self.shape.kv_bytes(self.shape.num_kv_heads) * self.shape.batch
        return row / self.machine.inter_bandwidth * self.machine.flops / self.shape.flops_per_pair


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layout with a schedule for every mask."""

    layout: Layout
    schedules: Mapping[str, Schedule]
    costs: Mapping[str, Cost]

    @property
    def seconds(self) -> float:
        """Sum over all masks."""
        return sum(c.seconds for c in self.costs.values())

    @property
    def compute(self) -> float:
        """The same without transfers."""
        return sum(c.compute for c in self.costs.values())

    @property
    def keeps_much(self) -> bool:
        """Whether a rank keeps more rows of others until backward than it has itself."""
        return any(
            s.keeps_kv
            and int(s.forward.moves.received(s.groups.ranks).max())
            > int(s.groups.counts.max()) * s.groups.lanes
            for s in self.schedules.values()
        )

    @property
    def name(self) -> str:
        """Layout and schedules, for a table."""
        names = dict.fromkeys(describe(s) for s in self.schedules.values())
        return f"{self.layout.name} + {', '.join(names)}"


def describe(schedule: Schedule) -> str:
    """The schedule's name, with its parts for a hybrid."""
    how = schedule.between
    if schedule.keeps_kv and how == "exchange":
        how += " at once, kept" if schedule.forward.rounds == 1 else ", kept"
    if schedule.name != "hybrid":
        return how
    return f"hybrid {schedule.groups.ranks} x {schedule.inner} ({how})"


def named_layout(name: str, problem: Problem, ranks: int) -> Layout:
    """A layout by its name; "auto" is the balanced one."""
    grids, length = list(problem.grids.values()), problem.seq_len
    block = grids[0].block_size[0]
    if name in ("auto", "balanced"):
        return balanced(grids, ranks, pairs_per_row=problem.pairs_per_row)
    if name == "contiguous":
        return contiguous(length, ranks)
    if name == "head_tail":
        return head_tail(length, ranks)
    if name == "striped":
        return striped(length, ranks, stripe=min(block, max(1, length // ranks)))
    if name == "per_document":
        edges = torch.cat([torch.tensor([0]), Work.of(grids).seams, torch.tensor([length])])
        return per_document_head_tail(edges.diff().tolist(), ranks)
    if name == "ptrr":
        return ptrr(Work.of(grids).blocks, length, ranks, block_size=block)
    raise FlexCPError(
        f"a layout among {', '.join(LAYOUTS)}, or a Layout",
        repr(name),
        "pass one of those names, or a Layout made for this sequence",
    )


def search(problem: Problem, layout: str | Layout, schedule: str) -> list[Candidate]:
    """The candidates that were priced: the chosen one, then the others, cheapest first."""
    splits = _splits(problem, schedule)
    chosen = (
        layout if isinstance(layout, Layout) else named_layout(layout, problem, problem.ranks.size)
    )
    ready = {name: _Prepared.of(grid, chosen, schedule) for name, grid in problem.grids.items()}
    found: list[Candidate] = []
    for inner in splits:
        if not found or not _cannot_win(problem, found, ready, inner):
            found.extend(_options(problem, chosen, ready, inner, schedule))
    found.sort(key=lambda c: c.seconds)
    inner = next(iter(found[0].schedules.values())).inner
    if layout in ("auto", "balanced") and _uneven(ready, inner):
        again = split_groups(named_layout("balanced", problem, problem.ranks.size // inner), inner)
        ready = {name: _Prepared.of(g, again, schedule) for name, g in problem.grids.items()}
        found.extend(_options(problem, again, ready, inner, schedule))
    if layout == "auto":
        for other in _other_layouts(problem, chosen, ready):
            ready = {name: _Prepared.of(g, other, schedule) for name, g in problem.grids.items()}
            for split in dict.fromkeys((inner, 1)):
                if split in splits and not _cannot_win(problem, found, ready, split):
                    found.extend(_options(problem, other, ready, split, schedule))
    return _modest_first(sorted(found, key=lambda c: c.seconds))


def _modest_first(found: list[Candidate]) -> list[Candidate]:
    """The cheapest first; or the cheapest that keeps little, if it costs hardly more."""
    limit = found[0].seconds * _HARDLY_MORE
    modest = (i for i, c in enumerate(found) if c.seconds <= limit and not c.keeps_much)
    first = next(modest, 0)
    return [found[first], *found[:first], *found[first + 1 :]]


def _other_layouts(
    problem: Problem, chosen: Layout, ready: Mapping[str, _Prepared]
) -> Iterator[Layout]:
    """Layouts that may be cheaper than the balanced one, for what it gains by its locality."""
    if problem.ranks.size == 1 or chosen.lanes > 1:
        return
    pairs = _pairs(ready, 1)
    if chosen.rank.numel() == chosen.ranks and float(pairs.max()) > _FLAT * float(pairs.mean()):
        yield fold(Work.of(list(problem.grids.values())), problem.ranks.size)
    if _is_dense(problem, ready):
        other = _dealt(problem)
        if other is not None:
            yield other


def _is_dense(problem: Problem, ready: Mapping[str, _Prepared]) -> bool:
    """Whether ranks need so much of the others that where tokens live hardly matters."""
    most = problem.seq_len * max(1, problem.ranks.size - 1)
    return all(
        p.needs is not None and float(p.needs.received.sum()) > _DENSE * most
        for p in ready.values()
    )


def _dealt(problem: Problem) -> Layout | None:
    """Chunks dealt out by their work: every rank then has the same to do in every round."""
    grids, ranks = list(problem.grids.values()), problem.ranks.size
    work = Work.of(grids)
    chunk = max(1, work.blocks.numel() // ranks // _CHUNKS)
    if work.blocks.numel() // chunk * ranks > _MOST_LINES:
        return None
    found = dealt(work.blocks, work.seq_len, ranks, block_size=work.block, chunk=chunk)
    areas = area_per_rank(grids, found).double()
    within = int(found.counts.max()) - int(found.counts.min()) <= work.block
    return found if within and float(areas.max()) <= _EVEN * float(areas.mean()) else None


def _uneven(ready: Mapping[str, _Prepared], inner: int) -> bool:
    """Whether groups of ranks have uneven work, though the ranks together may not."""
    if inner == 1:
        return False
    pairs = _pairs(ready, inner)
    return float(pairs.max()) > _EVEN * float(pairs.mean())


def _pairs(ready: Mapping[str, _Prepared], inner: int) -> torch.Tensor:
    """float64 [groups] Work of each group, over all masks."""
    loads = [prepared.load.grouped(inner).before[:, -1] for prepared in ready.values()]
    return torch.stack(loads).sum(0)


def split_groups(groups: Layout, inner: int) -> Layout:
    """Each group's rows, shared evenly by its ranks in order.

    >>> split_groups(contiguous(8, 2), 2).positions(1)
    tensor([2, 3])
    """
    rows: list[torch.Tensor] = []
    for group in range(groups.ranks):
        own = groups.rows_of(group).view(groups.lanes, -1)
        edges = even_edges(own.shape[1], inner).tolist()
        rows.extend(own[:, a:b].reshape(-1) for a, b in pairwise(edges))
    return Layout.of_rows(rows, seq_len=groups.seq_len, lanes=groups.lanes, name=groups.name)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What all schedules of a mask on a layout share."""

    grid: BlockGrid
    load: Load
    needs: Needs | None

    @classmethod
    def of(cls, grid: BlockGrid, layout: Layout, schedule: str) -> _Prepared:
        needs = None if schedule in ("ring", "allgather", "ulysses") else Needs.of([grid], layout)
        return cls(grid, Load.of([grid], layout), needs)


def _splits(problem: Problem, schedule: str) -> list[int]:
    """Ranks that share heads, in the candidates to try."""
    size, heads = problem.ranks.size, problem.shape.num_heads
    if schedule == "hybrid":
        if len(problem.ranks.shape) != 2:
            raise FlexCPError(
                "a mesh of two dimensions for the hybrid schedule",
                f"a mesh of shape {problem.ranks.shape}",
                "pass a 2-D mesh, or a shape such as (4, 2): groups, and ranks that share heads; "
                "schedule='auto' finds a split by itself",
            )
        return [problem.ranks.shape[1]]
    if schedule == "ulysses":
        return [size]
    if schedule != "auto":
        return [1]
    if len(problem.ranks.shape) == 2:
        return list(dict.fromkeys([1, problem.ranks.shape[1]]))
    near = min(problem.machine.ranks_per_node, size)
    splits = [n for n in range(2, min(size, heads) + 1) if size % n == 0]
    # Splits that stay on a node first: if they are good, the others need not be tried.
    return [*sorted(splits, key=lambda n: (n > near, -n if n <= near else n)), 1]


def _options(
    problem: Problem,
    layout: Layout,
    ready: Mapping[str, _Prepared],
    inner: int,
    schedule: str,
) -> list[Candidate]:
    """Each kind of schedule for all masks; with several masks, also the cheapest for each."""
    groups = grouped(layout, inner)
    table: dict[str, dict[str, tuple[Cost, Schedule]]] = {}
    for name, prepared in ready.items():
        load = prepared.load.grouped(inner)
        for option in _schedules(problem, prepared, layout, groups, inner, schedule):
            cost = price(option, load, problem.machine, problem.shape)
            table.setdefault(describe(option), {})[name] = (cost, option)
    complete = [row for row in table.values() if len(row) == len(ready)]
    if len(ready) > 1:
        complete.append(
            {
                name: min((row[name] for row in table.values() if name in row), key=_seconds)
                for name in ready
            }
        )
    return [
        Candidate(layout, {n: s for n, (_, s) in row.items()}, {n: c for n, (c, _) in row.items()})
        for row in complete
    ]


def _seconds(priced: tuple[Cost, Schedule]) -> float:
    return priced[0].seconds


def _schedules(
    problem: Problem,
    prepared: _Prepared,
    layout: Layout,
    groups: Layout,
    inner: int,
    schedule: str,
) -> Iterator[Schedule]:
    make = partial(
        make_schedule,
        grids=[prepared.grid],
        layout=layout,
        num_heads=problem.shape.num_heads,
        num_kv_heads=problem.shape.num_kv_heads,
    )
    if prepared.needs is None:
        yield make(schedule)
        return
    if groups.ranks == 1 and schedule != "hybrid" and layout.ranks > 1:
        yield make("ulysses")
        return
    name = "hybrid" if inner > 1 or schedule == "hybrid" else "exchange"
    needs = prepared.needs if inner == 1 else prepared.needs.grouped(groups, inner)
    plain = make(name, inner=inner, needs=needs)
    yield plain
    if schedule not in ("auto", "hybrid") or groups.ranks == 1:
        return
    # Nothing beats an all-gather like gathering only what is needed.
    yield plain.keeping()
    yield make(name, inner=inner, needs=needs, keep=True, at_once=True)
    dense = float(needs.received.sum()) > _DENSE * groups.rows * max(1, groups.ranks - 1)
    if dense and groups.ranks <= _RING:
        yield make("ring" if name == "exchange" else name, inner=inner, between="ring")


def _cannot_win(
    problem: Problem, found: Sequence[Candidate], ready: Mapping[str, _Prepared], inner: int
) -> bool:
    """Whether a split can't be cheaper than the best so far, whatever its schedule."""
    best = min(found, key=lambda c: c.seconds)
    shape, machine = problem.shape, problem.machine
    share = problem.seq_len / problem.ranks.size * shape.batch
    if inner == 1:
        # Rows that come from other nodes, once forward and once as gradients.
        near = min(machine.ranks_per_node, problem.ranks.size) * share / shape.batch
        rows = sum(
            max(0.0, float(p.needs.received.max()) - near) for p in ready.values() if p.needs
        )
        row = shape.kv_bytes(shape.num_kv_heads) * shape.batch
        wire = 2 * rows * row / machine.inter_bandwidth
        return max(wire, best.compute * 0.98 + (1 - machine.hidden) * wire) >= best.seconds
    moved = share * (inner - 1) / inner * shape.q_bytes(shape.num_heads) * 4
    near = min(inner, machine.ranks_per_node)
    far = (inner - near) / (inner - 1)
    wire = max(moved * (1 - far) / machine.intra_bandwidth, moved * far / machine.inter_bandwidth)
    heads = -(-shape.num_heads // inner) * inner / shape.num_heads
    least = len(problem.grids) * wire + best.compute * heads * 0.98
    return least >= best.seconds
