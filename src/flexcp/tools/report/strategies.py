"""A plan next to what people would have done without one, priced by the same code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flexcp.errors import FlexCPError, require, told
from flexcp.plan import Plan, make_plan


@dataclass(frozen=True, eq=False)
class Strategy:
    """A plan with a name that people know it by."""

    name: str
    about: str
    """What it does, in a sentence."""
    plan: Plan


_KNOWN = (
    (
        "Contiguous ring",
        "contiguous",
        "ring",
        "Each rank owns one stretch; all of K and V travel around the ring.",
    ),
    (
        "Head-tail ring",
        "head_tail",
        "ring",
        "Each rank owns a stretch from the front and one from the back; K and V travel around.",
    ),
    (
        "PTRR all-gather",
        "ptrr",
        "allgather",
        "Blocks sorted by work and dealt out there and back; all of K and V are gathered once.",
    ),
    (
        "Ulysses",
        "contiguous",
        "ulysses",
        "Rows are swapped for heads, and back: every rank sees all tokens of some heads.",
    ),
    (
        "Contiguous exchange",
        "contiguous",
        "exchange",
        "Each rank owns one stretch and receives exactly the rows that it needs.",
    ),
    (
        "Balanced exchange",
        "balanced",
        "exchange",
        "Work is evened out where documents allow it; exactly the rows that are needed move.",
    ),
)


_MOST_PIECES = 1 << 22
"""Blocks times ranks up to which layouts that scatter single blocks are worth the wait."""


def chosen_strategy(plan: Plan) -> Strategy:
    """The plan itself, under the name that the planner has for it."""
    name = plan.considered[0][0]
    own, priced = plan.considered[0][1], len(plan.considered)
    about = "This plan."
    if priced > 1 and own <= min(seconds for _, seconds in plan.considered):
        about = f"This plan: the fastest of {priced} priced."
    elif priced > 1:  # what is moved or kept more has to be worth it
        about = f"This plan: hardly slower than the fastest of {priced}, which move or keep more."
    return Strategy(name[:1].upper() + name[1:], about, plan)


def strategies(plan: Plan, say: Callable[[str], None] | None = None) -> list[Strategy]:
    """The plan first, then others for the same masks and machine, the cheapest first.

    One that comes to the same as the plan, or as another, is left out; `say` is told what is being
    priced. Layouts that scatter single blocks are left out where they would take longer to price
    than all the rest together: from some four million blocks times ranks on.

    >>> import flexcp
    >>> plan = flexcp.make_plan(flexcp.masks.causal(), 8192, 4)
    >>> [s.name for s in strategies(plan)][:2]
    ['Balanced + exchange at once, kept', 'PTRR all-gather']
    """
    require("plan", plan, Plan, "make one with flexcp.make_plan")
    if say is not None and not callable(say):
        raise FlexCPError("say as a function of a text", told(say), "pass print, or leave it out")
    if plan.ranks.size == 1:
        return [chosen_strategy(plan)]
    shape = plan.shape
    others = []
    rows = next(iter(plan.grids.values())).shape[0]
    for name, layout, schedule, about in _KNOWN:
        if layout == plan.layout.name and {schedule} == {s.name for s in plan.schedules.values()}:
            continue
        if layout == "ptrr" and rows * plan.ranks.size > _MOST_PIECES:
            continue
        if say is not None:
            say(f"pricing {name.lower()}")
        made = make_plan(
            plan.grids,
            plan.seq_len,
            plan.ranks.size,
            layout=layout,
            schedule=schedule,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            batch=shape.batch,
            machine=plan.machine,
        )
        others.append(Strategy(name, about, made))
    others.sort(key=lambda s: s.plan.stats().predicted_seconds)
    found: dict[tuple[object, ...], Strategy] = {}
    for strategy in (chosen_strategy(plan), *others):
        found.setdefault(_what_it_comes_to(strategy.plan), strategy)
    return list(found.values())


def _what_it_comes_to(plan: Plan) -> tuple[object, ...]:
    """Equal for plans between which nobody could choose: the same schedule, price and bytes."""
    stats = plan.stats()
    kinds = tuple((s.name, s.heads_group_size) for s in plan.schedules.values())
    size = max(stats.bytes_received_per_rank)
    return kinds, f"{stats.predicted_seconds:.3g}", f"{size:.2g}", f"{stats.imbalance:.2f}"
