"""Pricing: the schedules for one mask on a layout that may be chosen, with what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from flexcp.layout.balance.objective import Objective
from flexcp.plan.cost import Cost, KnownTimes, price, swaps
from flexcp.plan.loads import LayoutLoads
from flexcp.plan.problem import Problem
from flexcp.schedule import Needs, Schedule, make_schedule
from flexcp.schedule.hierarchical import Relays, Ways

MOST_LINES = 1 << 21
"""Effort: the longest table of transfers, or of blocks that are dealt out, which are tried besides
the balanced layout."""


class Pricing:
    """Schedules for one mask on a layout, whose ranks share heads in groups, with their prices."""

    def __init__(
        self, problem: Problem, loads: LayoutLoads, mask: str, group_size: int, limit: float
    ) -> None:
        self._problem, self._loads, self._mask = problem, loads, mask
        self._group_size, self._limit = group_size, limit
        self._work = loads.work_of(mask, group_size)
        self._known = KnownTimes()
        self._make: Callable[..., Schedule] = partial(
            make_schedule,
            grids=[problem.grids[mask]],
            layout=loads.layout,
            num_heads=problem.shape.num_heads,
            num_kv_heads=problem.shape.num_kv_heads,
        )

    def of_all(self, schedule: str, few: bool, kept: bool) -> Iterator[tuple[Cost, Schedule]]:
        """All that may be chosen; `few` where fewer rounds gain nothing."""
        whole = list(self._with_all_heads(schedule, few, kept))
        yield from whole
        limit = Objective.enough * min((cost.seconds for cost, _ in whole), default=0.0)
        for cost, option in whole:
            if cost.seconds - self._seconds_of_swaps(option) <= limit:
                yield from self._in_head_parts((cost, option))

    def _seconds_of_swaps(self, schedule: Schedule) -> float:
        """What swaps of rows for heads take: parts can hide no more than that."""
        before, after = swaps(schedule, self._problem.machine, self._problem.shape)
        return sum(before) + sum(after)

    def _in_head_parts(self, former: tuple[Cost, Schedule]) -> Iterator[tuple[Cost, Schedule]]:
        """A schedule with heads in twice as many parts, and again, as long as that takes less.

        Rows of the next part are swapped for heads meanwhile; yet each part has its own rounds.
        """
        schedule = former[1]
        most = max(len(s.kv) for s in schedule.heads) if schedule.heads_group_size > 1 else 1
        while former[1].head_parts < most:
            parts = min(2 * former[1].head_parts, most)
            new = self._priced(replace(schedule, head_parts=parts))
            if new[0].seconds * (1 + Objective.worth) > former[0].seconds:
                return
            yield new
            former = new

    def _with_all_heads(
        self, schedule: str, few: bool, kept: bool
    ) -> Iterator[tuple[Cost, Schedule]]:
        """All that may be chosen, with the heads of a rank computed in one go."""
        loads, group_size, make = self._loads, self._group_size, self._make
        groups = loads.layout.ranks // group_size
        if not loads.needs:
            yield self._priced(make(schedule))
            return
        if groups == 1 and schedule != "hybrid" and loads.layout.ranks > 1:
            yield self._priced(make("ulysses"))
            return
        name = "hybrid" if group_size > 1 or schedule == "hybrid" else "exchange"
        needs = loads.needs_of(self._mask, group_size)
        own = needs.layout.counts.max() * needs.layout.batch_elements
        fewest = -(-int(needs.received.max()) // max(1, int(own)))
        rounds = self._seconds_of(fewest)
        lines = needs.by_owner[0].numel()
        too_many = lines + min(lines, groups**2) * fewest > MOST_LINES
        if schedule == "hierarchical":
            few_lines = lines <= MOST_LINES >> 6 and not too_many
            if not kept or (rounds <= self._limit and few_lines):
                yield from self._with_relays(needs, kept)
            return
        make = partial(make, heads_group_size=group_size, needs=needs)
        kept = schedule in ("auto", "hybrid") and groups > 1
        found = []
        # Nothing beats an all-gather like gathering only what is needed.
        wire = loads.seconds_of_rows(self._problem, self._mask, group_size).amax(0)
        least = self._least_at_once(wire) if kept and not few else math.inf
        if rounds > least:
            found.append(self._priced(make(name, keep=True, at_once=True)))
            self._limit = min(self._limit, Objective.enough * found[0][0].seconds)
        dense = needs.exceed(Objective.dense)
        if rounds <= self._limit:
            own_work = self._work.own(needs.layout)

            def even(few_rounds: int, *, keep: bool = kept) -> Schedule:
                return make(name, own_work=own_work, few_rounds=few_rounds, keep=keep)

            if not too_many:
                found += self._with_kept(even(1, keep=False), wire, kept=kept)
                self._limit = min(self._limit, Objective.enough * found[-1][0].seconds)
                found += self._in_more_parts(even, found[0])
            if dense or too_many:  # then messages are fewer by ring distance
                found += self._with_kept(make(name), wire, kept=kept)
        yield from found
        if found and rounds <= least < min(self._limit, *(cost.seconds for cost, _ in found)):
            yield self._priced(make(name, keep=True, at_once=True))
        ring = dense and kept and not few and groups**3 <= MOST_LINES
        if ring and self._seconds_of(groups - 1) <= self._limit:
            yield self._priced(make("ring" if name == "exchange" else name, outer_schedule="ring"))

    def _seconds_of(self, rounds: int) -> float:
        """What so many rounds take at least, both passes, whatever they move."""
        machine = self._problem.machine
        return 2 * rounds * (machine.latency + machine.message)

    def _with_kept(
        self, schedule: Schedule, wire: Tensor, *, kept: bool
    ) -> list[tuple[Cost, Schedule]]:
        """A schedule; and the same with rows kept for backward, which takes less time.

        If not even that is near the limit, or what is moved once more makes the other too dear to
        be taken for the memory that it saves, it stands for both.
        """
        found = [self._priced(schedule.with_kept_kv())] if kept else []
        once = Objective.moved * float(wire.mean())
        near = found and once <= (Objective.even - 1) * (found[0][0].seconds + 2 * once)
        if not kept or (near and found[0][0].seconds <= self._limit):
            found.append(self._priced(schedule))
        return found

    def _with_relays(self, needs: Needs, kept: bool) -> Iterator[tuple[Cost, Schedule]]:
        """Rows are passed on within nodes, in more rounds too; if they may be `kept`, both ways."""
        ways = Ways.of(needs, self._problem.machine.ranks_per_node)
        own_work, make = self._work.own(needs.layout), partial(self._make, "hierarchical")

        def in_rounds(few_rounds: int) -> Schedule:
            return make(relays=Relays.of(ways, own_work, few_rounds), keep=kept)

        relays = Relays.of(ways, own_work)
        yield (first := self._priced(make(relays=relays, keep=kept)))
        if kept and first[0].seconds > self._limit:
            return  # one of several
        yield from self._in_more_parts(in_rounds, first)
        if kept:
            yield self._priced(make(relays=relays))

    def _in_more_parts(
        self, make: Callable[[int], Schedule], former: tuple[Cost, Schedule]
    ) -> list[tuple[Cost, Schedule]]:
        """A schedule in twice as many rounds, or two more, and again, as long as that gains.

        Where transfers are waited for, little is left to compute once the last rows have arrived,
        and the first gradients leave early: of all work, the share of one round at most.
        """
        found: list[tuple[Cost, Schedule]] = []
        while former[0].seconds > Objective.enough * former[0].compute:
            parts = 2 * (former[1].forward.rounds - 1)
            lines = 2 * len(former[1].forward.moves)
            many = parts * (Objective.enough - 1) > 2 or lines > MOST_LINES
            if parts < 2 or many or self._seconds_of(parts) > self._limit:
                break
            new = self._priced(make(parts))
            if new[0].seconds * Objective.enough > former[0].seconds:
                break
            found.append(new)
            former = new
        return found

    def _least_at_once(self, wire: Tensor) -> float:
        """No schedule takes less that receives all rows before any work."""
        shape, machine = self._problem.shape, self._problem.machine
        pairs = self._work.before[:, -1] / self._group_size
        compute = (1 + machine.backward) * pairs * shape.flops_per_pair / machine.flops
        return float((compute + 2 * wire).max())

    def _priced(self, schedule: Schedule) -> tuple[Cost, Schedule]:
        problem = self._problem
        return (
            price(schedule, self._work, problem.machine, problem.shape, known=self._known),
            schedule,
        )


def describe(schedule: Schedule) -> str:
    """The schedule's name, with its parts for a hybrid."""
    how = schedule.outer_schedule
    if how in ("exchange", "hierarchical"):
        how += (
            f" in {schedule.forward.rounds} rounds" if schedule.forward.rounds > 1 else " at once"
        )
        how += ", kept" if schedule.keeps_kv else ""
    if schedule.name == "hybrid":
        how = f"hybrid {schedule.groups.ranks} x {schedule.heads_group_size} ({how})"
    return how if schedule.head_parts == 1 else f"{how}, heads in {schedule.head_parts} parts"
