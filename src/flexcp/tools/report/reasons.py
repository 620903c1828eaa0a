"""Why a plan is as it is, in sentences made from its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from flexcp.plan import Plan
from flexcp.tools.report.strategies import Strategy
from flexcp.units import format_bytes, format_seconds


def reasons(found: Sequence[Strategy]) -> list[str]:
    """A few sentences about the first strategy, compared with the others.

    >>> import flexcp
    >>> from flexcp.tools.report.strategies import strategies
    >>> plan = flexcp.make_plan(flexcp.masks.causal(), 1 << 16, 4, num_heads=8)
    >>> reasons(strategies(plan))[0]
    'The mask allows 50.0% of all pairs of tokens.'
    """
    plan, others = found[0].plan, found[1:]
    lines = [_about_masks(plan)]
    if plan.ranks.size > 1:
        lines += [_about_work(plan, others), _about_traffic(plan), _about_time(plan)]
    if others:
        lines.append(_about_others(plan, others))
    return lines


def _about_masks(plan: Plan) -> str:
    pairs = plan.seq_len**2 * plan.shape.batch * plan.shape.num_heads
    shares = [(name, grid.area() / pairs) for name, grid in plan.grids.items()]
    if len(shares) == 1:
        return f"The mask allows {_percent(shares[0][1])} of all pairs of tokens."
    each = ", ".join(f"{name} {_percent(share)}" for name, share in shares)
    return f"Of all pairs of tokens, the masks allow: {each}."


def _about_work(plan: Plan, others: Sequence[Strategy]) -> str:
    stats = plan.stats()
    text = f"The busiest rank has {stats.imbalance:.3f} × the mean work"
    even = stats.imbalance <= 1.005 * stats.imbalance_lower_bound
    text += ", which no layout improves on" if even else ""
    plain = next((s.plan.stats() for s in others if _is_plain(s.plan)), None)
    if plain and plain.imbalance > 1.05 * stats.imbalance:
        text += f"; in plain order it would have {plain.imbalance:.2f} ×"
    return text + "."


def _is_plain(plan: Plan) -> bool:
    group_sizes = {schedule.heads_group_size for schedule in plan.schedules.values()}
    return plan.layout.name == "contiguous" and group_sizes == {1}


def _about_traffic(plan: Plan) -> str:
    stats = plan.stats()
    first = next(iter(plan.schedules.values()))
    most = max(stats.bytes_received_per_rank)
    text = (
        f"A rank receives at most {format_bytes(most)} forward: "
        f"{_percent(stats.received_fraction)} of the rows that an all-gather brings"
    )
    if first.heads_group_size > 1:
        text += (
            f", and {first.heads_group_size} ranks at a time share the heads of their rows, so "
            "that each receives only its own heads"
        )
    return text + "."


def _about_time(plan: Plan) -> str:
    stats = plan.stats()
    share = stats.compute_seconds / max(stats.predicted_seconds, 1e-30)
    return (
        f"Of {format_seconds(stats.predicted_seconds)}, {_percent(min(1.0, share))} is the busiest "
        f"rank's computing; the rest is transfers that nothing hides."
    )


def _about_others(plan: Plan, others: Sequence[Strategy]) -> str:
    own = plan.stats().predicted_seconds
    if not own:
        return "There is nothing to compute."
    best, worst = others[0], others[-1]
    texts = []
    for one in dict.fromkeys((best, worst)):
        ratio = one.plan.stats().predicted_seconds / own
        longer = f"{ratio:.2f} × as long" if ratio >= 1.005 else "as long"
        texts.append(f"{one.name} would take {longer}")
    return ", ".join(texts) + "."


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share >= 0.0995 else f"{100 * share:.2g}%"
