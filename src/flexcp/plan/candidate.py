"""Candidate: a layout with schedules, what they cost, and which of several is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flexcp.layout import Layout
from flexcp.layout.balance.objective import Objective
from flexcp.plan.cost import Cost
from flexcp.plan.pricing import describe
from flexcp.plan.problem import Problem
from flexcp.plan.traffic import Traffic, traffic
from flexcp.schedule import Pass, Schedule

_TUNED = Objective()
GAIN = 1 + _TUNED.exposed * _TUNED.small
"""Over the lower price: what has to be saved where a rank receives an eighth more (`small`), which
costs it as much if its transfers take as long as its work (`exposed`)."""

Bytes = tuple[float, float]
"""What a rank receives, on average and at most."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layout with a schedule for every mask."""

    layout: Layout
    schedules: Mapping[str, Schedule]
    costs: Mapping[str, Cost]
    wire: float
    """Seconds that a rank's transfers take on average, hidden or not, over all masks."""
    received: float
    """Seconds that all takes which the rank receives that waits longest, forward, over all masks:
    bytes between nodes count more than those within."""
    bytes_received: Bytes
    """Forward, over all masks."""
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


def candidate_of(
    problem: Problem,
    layout: Layout,
    row: Mapping[str, tuple[Cost, Schedule]],
    own: float,
    known: dict[tuple[Pass, Pass], Traffic],
) -> Candidate:
    """A schedule for every mask, with what it moves; `own` seconds are of the rest of the model.

    `known` is what passes of schedules in which as many ranks share heads move.
    """
    machine, zero = problem.machine, torch.zeros(layout.ranks, dtype=torch.float64)
    forward, backward, received = zero, zero, zero
    for _, schedule in row.values():
        both = schedule.forward, schedule.backward
        if both not in known:
            known[both] = traffic(schedule, problem.shape, machine.ranks_per_node)
        found = known[both]
        forward = forward + machine.wire(found.forward, found.forward_between_nodes)
        backward = backward + machine.wire(found.backward, found.backward_between_nodes)
        received = received + found.forward
    costs = {name: cost for name, (cost, _) in row.items()}
    beside = max(0.0, own - sum(cost.compute for cost in costs.values()))
    schedules = {name: schedule for name, (_, schedule) in row.items()}
    wire, longest = float((forward + backward).mean()), float(forward.max())
    bytes_received = float(received.mean()), float(received.max())
    return Candidate(layout, schedules, costs, wire, longest, bytes_received, beside)


def is_less(received: Bytes, other: Bytes) -> bool:
    """Whether ranks receive less by an eighth, on average or at most, and not more in the other.

    >>> is_less((4.0, 5.0), (4.4, 6.0)), is_less((5.0, 5.0), (4.0, 6.0))
    (True, False)
    """
    much, pairs = 1 + _TUNED.small, list(zip(received, other, strict=True))
    return any(a * much < b for a, b in pairs) and all(a <= b * much for a, b in pairs)


def modest_first(found: list[Candidate]) -> list[Candidate]:
    """The cheapest first; or the cheapest that moves and keeps little, if it costs 1 % more.

    Or one that moves less by an eighth, unless what is moved more buys 5 % of the price, in which
    bytes between nodes cost more already.
    """
    first = _of_equal_price(found, found[0])
    most = _limit(found[0], GAIN)
    less = [c for c in found if c.price <= most and is_less(c.bytes_received, first.bytes_received)]
    if less:
        first = _of_equal_price(less, less[0])
    return [first, *(c for c in found if c is not first)]


def _of_equal_price(found: list[Candidate], best: Candidate) -> Candidate:
    """Of all that cost as much as the best, to 1 %, the cheapest that moves and keeps little."""
    near = [c for c in found if c.price <= _limit(best, _TUNED.even)]
    much = (1 + _TUNED.small) * min(c.received for c in near)
    return min(near, key=lambda c: (c.received > much, c.keeps_much))


def _limit(best: Candidate, times: float) -> float:
    """So many times the price; the rest of the model is no reason to let attention take longer."""
    return best.price + (times - 1) * (best.price - best.beside)
