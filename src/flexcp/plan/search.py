"""Trying layouts and schedules, and keeping the cheapest."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from flexcp.errors import FlexCPError
from flexcp.layout import Layout, contiguous
from flexcp.layout.balance.objective import Objective
from flexcp.plan.cost import Cost
from flexcp.plan.loads import LayoutLoads, rows_in_tiles
from flexcp.plan.model_work import model_seconds
from flexcp.plan.pricing import MOST_LINES, Pricing, describe
from flexcp.plan.problem import Problem, named_layout, split_groups
from flexcp.plan.traffic import traffic
from flexcp.schedule import Schedule

_TUNED = Objective()
"""The numbers that layouts and schedules are chosen by."""
_NEAR = 1 + (_TUNED.enough - 1) / 2
"""Over the lowest price: what may be taken for moving and keeping little."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layout with a schedule for every mask."""

    layout: Layout
    schedules: Mapping[str, Schedule]
    costs: Mapping[str, Cost]
    wire: float
    """Seconds that a rank's transfers take on average, hidden or not, over all masks."""
    received: int
    """Bytes of the rank that receives most, forward, over all masks."""
    beside: float = 0.0
    """Seconds of the slowest rank, attention and the rest of the model together, beyond `compute`;
    0 if nothing is known of the rest."""

    @property
    def price(self) -> float:
        """What candidates are compared by: predicted seconds, and a price on all that moves."""
        return float(f"{self.seconds + self.beside + _TUNED.moved * self.wire:.9g}")

    @property
    def seconds(self) -> float:
        """Predicted seconds, over all masks."""
        return sum(c.seconds for c in self.costs.values())

    @property
    def compute(self) -> float:
        """Seconds of compute alone, over all masks."""
        return sum(c.compute for c in self.costs.values())

    @property
    def if_even(self) -> float:
        """Seconds over all masks without load imbalance and without exposed communication."""
        return sum(c.if_even for c in self.costs.values())

    @property
    def group_size(self) -> int:
        """Ranks that share heads."""
        return next(iter(self.schedules.values())).heads_group_size

    @property
    def keeps_much(self) -> bool:
        """Whether a rank keeps more rows of others until backward than it has itself."""
        return any(
            s.keeps_kv
            and int(s.forward.moves.received(s.groups.ranks).max())
            > int(s.groups.counts.max()) * s.groups.batch_elements
            for s in self.schedules.values()
        )

    @property
    def name(self) -> str:
        """Layout and schedules, for a table."""
        names = dict.fromkeys(describe(s) for s in self.schedules.values())
        return f"{self.layout.name} + {', '.join(names)}"


def search(problem: Problem, layout: str | Layout, schedule: str) -> list[Candidate]:
    """The candidates that were priced: the chosen one, then the others, cheapest first."""
    splits = _splits(problem, schedule)
    chosen = (
        layout if isinstance(layout, Layout) else named_layout(layout, problem, problem.ranks.size)
    )
    loads = LayoutLoads.of(problem, chosen, schedule)
    found: list[Candidate] = []
    for group_size in _by_bound(problem, loads, splits, found):
        found.extend(_options(problem, loads, group_size, schedule, found=found))
        relayed = group_size == 1 and schedule == "auto" and not problem.flops_per_token
        if relayed and not _is_near_bound(found) and loads.share_rows(problem):
            found.extend(_options(problem, loads, 1, "hierarchical", kept=True, found=found))
    if problem.flops_per_token:
        if schedule == "auto" and layout in ("auto", "balanced"):
            found.extend(_shared_by_groups(problem, found))
        return _modest_first(sorted(found, key=lambda c: (c.price, c.seconds)))
    group_size, enough = min(found, key=lambda c: c.price).group_size, _TUNED.enough
    if layout in ("auto", "balanced") and group_size > 1 and loads.imbalance(group_size) > enough:
        again = split_groups(
            named_layout("balanced", problem, problem.ranks.size // group_size), group_size
        )
        loads = LayoutLoads.of(problem, again, schedule)
        found.extend(_options(problem, loads, group_size, schedule, found=found))
    other_layouts = layout == "auto" and not _is_near_bound(found)
    if other_layouts and problem.ranks.size > 1 and chosen.batch_elements == 1:
        tried = [n for n in dict.fromkeys((group_size, 1)) if n in splits]
        plain = contiguous(problem.seq_len, problem.ranks.size)  # a window's, say: less is moved
        uneven = {n: loads.imbalance(n, plain) for n in tried}
        even = [n for n in tried if uneven[n] <= 1 + _TUNED.small]
        if even:  # what is less even has to gain half as much as it is uneven
            best = min(c.price for c in found)
            of_plain = LayoutLoads.of(problem, plain, schedule)
            more = _priced(problem, of_plain, even, found, schedule)
            gain = {n: max(_TUNED.enough, (1 + uneven[n]) / 2) for n in even}
            found.extend(c for c in more if c.price * gain[c.group_size] < best)
        less_local: list[Candidate] = []
        gains = min(c.seconds for c in found) > _TUNED.enough * min(c.if_even for c in found)
        for split in tried if gains else ():
            groups = _blocks_dealt_to_groups(problem, loads, split, found)
            if groups is not None:
                of_groups = LayoutLoads.of(problem, split_groups(groups, split), schedule, split)
                less_local.extend(
                    _options(problem, of_groups, split, schedule, few=True, found=found)
                )
        found.extend(c for c in less_local if _is_worth(c, min(found, key=lambda c: c.seconds)))
    return _modest_first(sorted(found, key=lambda c: (c.price, c.seconds)))


def _is_worth(other: Candidate, fastest: Candidate) -> bool:
    """Whether giving up locality gains 2 % for each time that it moves what the fastest does."""
    gain = fastest.seconds / other.seconds - 1
    times = max(other.wire, fastest.wire) / max(fastest.wire, 1e-12)
    return gain > (_TUNED.enough - 1) * times


def _shared_by_groups(problem: Problem, found: Sequence[Candidate]) -> list[Candidate]:
    """Groups of ranks that share heads, each with as much attention and tokens as the others.

    Within a group all ranks have the same of both; a row crosses between groups once.
    """
    more: list[Candidate] = []
    for group_size in _group_sizes(problem):
        if group_size > min(problem.machine.ranks_per_node, problem.ranks.size - 1):
            continue
        if _is_near_bound([*found, *more]):
            break
        groups = named_layout("balanced", problem, problem.ranks.size // group_size)
        loads = LayoutLoads.of(problem, split_groups(groups, group_size), "auto", group_size)
        more.extend(_options(problem, loads, group_size, "auto"))
    return more


def _is_near_bound(found: Sequence[Candidate]) -> bool:
    """Whether no other candidate can be much better than the best: nobody waits, all is even."""
    best = min(found, key=lambda c: c.price)
    return best.price <= _TUNED.enough * (
        best.compute + best.beside if best.beside else best.if_even
    )


def _priced(
    problem: Problem,
    loads: LayoutLoads,
    splits: Sequence[int],
    found: Sequence[Candidate],
    schedule: str,
) -> list[Candidate]:
    """The candidates of another layout, with all splits that may be cheaper."""
    return [
        candidate
        for group_size in splits
        if _least_price(problem, loads, group_size, rows=True) < min(c.price for c in found)
        for candidate in _options(problem, loads, group_size, schedule, found=found)
    ]


def _modest_first(found: list[Candidate]) -> list[Candidate]:
    """The cheapest first; or the cheapest that moves and keeps little, if it costs 1 % more."""
    near = [c for c in found if c.price <= found[0].price * _NEAR]
    much = (1 + _TUNED.small) * min(c.received for c in near)
    first = min(near, key=lambda c: (c.received > much, c.keeps_much))
    return [first, *(c for c in found if c is not first)]


def _blocks_dealt_to_groups(
    problem: Problem, loads: LayoutLoads, group_size: int, found: Sequence[Candidate]
) -> Layout | None:
    """Single blocks, dealt out to groups of ranks by their work, if that may be cheaper.

    Groups receive more than under the balanced layout, but have the same to do in every round.
    """
    ranks, machine = problem.ranks.size, problem.machine
    groups = ranks // group_size
    size = -(-problem.seq_len // problem.block) * groups
    # Where all ranks need all rows, what is local matters less.
    if groups == 1 or size > MOST_LINES >> (4 if loads.asks_for(_TUNED.dense) else 6):
        return None
    best = min(c.seconds for c in found)
    same = [
        c for c in found if c.group_size == group_size and c.seconds < (1 + 2 * _TUNED.small) * best
    ]
    floor = min((c.if_even for c in same), default=best)
    if not floor:
        return None  # nothing to compute
    gain = best / floor - 1  # at most; see `_is_worth`
    if gain <= _TUNED.enough - 1:
        return None
    layout = named_layout("ptrr", problem, groups)
    if int(layout.counts.max()) * groups > _TUNED.enough * problem.seq_len:
        return None  # too few blocks
    received = rows_in_tiles(list(problem.grids.values()), layout).double()
    if group_size == 1 and loads.needs:
        least = [needs.received.double() for needs in loads.needs.values()]
        times = max(float(received.max()) / max(1.0, float(rows.max())) for rows in least)
        if gain <= (_TUNED.enough - 1) * times:
            return None
    wire = (1 - _TUNED.small) * problem.seconds_from_other_nodes(float(received.max()), group_size)
    # Rows come in forward; in backward they may be kept, but their gradients leave.
    return layout if max(2 * wire, floor + (1 - machine.hidden) * 2 * wire) < best else None


def _splits(problem: Problem, schedule: str) -> list[int]:
    """Ranks that share heads, in the candidates to try."""
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
        return [problem.ranks.size]
    if schedule != "auto" or problem.flops_per_token:  # whose rows a rank computes must not change
        return [1]
    return [1, *_group_sizes(problem)]


def _group_sizes(problem: Problem) -> list[int]:
    """Ranks that may share heads: first splits that stay on a node, then others."""
    size, heads = problem.ranks.size, problem.shape.num_heads
    if len(problem.ranks.shape) == 2:
        return [n for n in problem.ranks.shape[1:] if n > 1]
    near = min(problem.machine.ranks_per_node, size)
    splits = [n for n in range(2, min(size, heads) + 1) if size % n == 0]
    return sorted(splits, key=lambda n: (n > near, -n if n <= near else n))


def _options(
    problem: Problem,
    loads: LayoutLoads,
    group_size: int,
    schedule: str,
    *,
    few: bool = False,
    kept: bool = False,
    found: Sequence[Candidate] = (),
) -> list[Candidate]:
    """Each kind of schedule for all masks; with several masks, also the cheapest for each.

    What is hardly dearer than the cheapest that was `found` may still be chosen for another merit.
    """
    table: dict[str, dict[str, tuple[Cost, Schedule]]] = {}
    one = len(problem.grids) == 1
    limit = _TUNED.enough * min((c.price for c in found), default=math.inf) if one else math.inf
    for name in problem.grids:
        pricing = Pricing(problem, loads, name, group_size, limit)
        for cost, option in pricing.of_all(schedule, few, kept):
            row = table.setdefault(describe(option), {})
            if name not in row or cost.seconds < row[name][0].seconds:
                row[name] = (cost, option)
    complete = [row for row in table.values() if len(row) == len(problem.grids)]
    if not one and all(any(name in row for row in table.values()) for name in problem.grids):
        complete.append(
            {
                name: min((row[name] for row in table.values() if name in row), key=_seconds)
                for name in problem.grids
            }
        )
    own = model_seconds(problem, loads.layout, group_size) if problem.flops_per_token else 0.0
    return [_candidate(problem, loads.layout, row, own) for row in complete]


def _candidate(
    problem: Problem, layout: Layout, row: Mapping[str, tuple[Cost, Schedule]], own: float
) -> Candidate:
    """A schedule for every mask, with what it moves; `own` seconds are of the rest of the model."""
    machine, wire, received = problem.machine, 0.0, torch.zeros(layout.ranks, dtype=torch.int64)
    for _, schedule in row.values():
        found = traffic(schedule, problem.shape, machine.ranks_per_node)
        far = float((found.forward_between_nodes + found.backward_between_nodes).double().mean())
        near = float((found.forward + found.backward).double().mean()) - far
        wire += near / machine.intra_bandwidth + far / machine.inter_bandwidth
        received += found.forward
    costs = {name: cost for name, (cost, _) in row.items()}
    beside = max(0.0, own - sum(cost.compute for cost in costs.values()))
    schedules = {name: schedule for name, (_, schedule) in row.items()}
    return Candidate(layout, schedules, costs, wire, int(received.max()), beside)


def _seconds(priced: tuple[Cost, Schedule]) -> float:
    return priced[0].seconds


def _by_bound(
    problem: Problem, loads: LayoutLoads, splits: Sequence[int], found: Sequence[Candidate]
) -> Iterator[int]:
    """How many ranks share heads: what may be cheapest first, as long as it may be cheaper.

    Where none share them, it may also be chosen for how little it moves, if it is hardly dearer.
    """
    queue = [(_least_price(problem, loads, n, rows=n == 1), n == 1, n) for n in splits]
    heapq.heapify(queue)
    while queue:
        least, with_rows, group_size = heapq.heappop(queue)
        best = min(found, key=lambda c: c.price, default=None)
        # Even work without a transfer bounds all splits, but not with the time of swaps in it.
        near = best and best.group_size == 1 and _is_near_bound(found)
        if best and (near or least >= best.price):
            if least > _NEAR * best.price:
                return
            most = int(loads.bytes_received(problem).max()) if group_size == 1 else best.received
            if most * (1 + _TUNED.small) >= best.received:
                continue
        if with_rows or len(splits) == 1:
            yield group_size
        else:  # what groups exchange takes a look at their rows
            least = _least_price(problem, loads, group_size, rows=True)
            heapq.heappush(queue, (least, True, group_size))


def _least_price(problem: Problem, loads: LayoutLoads, group_size: int, *, rows: bool) -> float:
    """No candidate is cheaper in which so many ranks share heads: what each computes and moves."""
    shape, machine, masks = problem.shape, problem.machine, len(problem.grids)
    heads = -(-shape.num_heads // group_size) * group_size / shape.num_heads
    per_pair = (1 + machine.backward) * heads / group_size * shape.flops_per_pair / machine.flops
    pairs = torch.stack([work.before[:, -1] for work in loads.work.values()]).sum(0)
    compute = pairs.view(-1, group_size // loads.group_size).sum(1) * per_pair
    seconds, wire = compute + 2 * masks * machine.launch, torch.zeros_like(compute)
    for name in loads.needs if rows else ():  # forward, and as gradients
        wire = wire + 2 * loads.seconds_of_rows(problem, name, group_size)
    seconds = torch.maximum(seconds + (1 - machine.hidden) * wire, wire)
    least = float(seconds.max() + _TUNED.moved * wire.mean())
    if group_size == 1:
        return least
    share = problem.seq_len / problem.ranks.size * shape.batch
    moved = share * (group_size - 1) / group_size * shape.q_bytes(shape.num_heads) * 4
    near = min(group_size, machine.ranks_per_node)
    far = (group_size - near) / (group_size - 1)
    swaps = max(moved * (1 - far) / machine.intra_bandwidth, moved * far / machine.inter_bandwidth)
    swaps *= masks * (1 + _TUNED.moved)
    swaps += 4 * masks * (machine.latency + (group_size - 1) * machine.message)  # two in each pass
    return least + swaps
