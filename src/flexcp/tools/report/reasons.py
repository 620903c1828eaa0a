"""Why a plan is as it is, in sentences made from its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from flexcp.plan import Plan
from flexcp.plan.memory import rank_memory
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
    lines.append(_about_memory(plan))
    return lines + (_about_others(plan, others) if others else [])


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
    forward, backward = stats.bytes_received_per_rank, stats.backward_bytes_received_per_rank
    text = (
        f"A rank receives at most {format_bytes(max(forward))} forward and "
        f"{format_bytes(max(backward))} backward: {_percent(stats.received_fraction)} of the rows "
        "that an all-gather brings"
    )
    if first.heads_group_size > 1:
        text += (
            f", and {first.heads_group_size} ranks at a time share the heads of their rows, so "
            "that each receives only its own heads"
        )
    return text + f"; {_where(plan)}."


def _where(plan: Plan) -> str:
    """How much of the traffic stays within nodes."""
    if plan.ranks.size <= plan.machine.ranks_per_node:
        return "all ranks are on one node"
    near, far = bytes_by_node(plan)
    if not far:
        return "all of it stays within nodes"
    return (
        f"over all ranks, {format_bytes(near)} move within nodes and {format_bytes(far)} between "
        "them"
    )


def bytes_by_node(plan: Plan) -> tuple[int, int]:
    """All bytes that ranks receive from their own node, and from others, in both passes."""
    stats = plan.stats()
    whole = sum(stats.bytes_received_per_rank) + sum(stats.backward_bytes_received_per_rank)
    far = sum(stats.bytes_received_between_nodes_per_rank)
    far += sum(stats.backward_bytes_received_between_nodes_per_rank)
    return whole - far, far


def exposed_seconds(plan: Plan) -> float:
    """What the prediction has beyond the busiest rank's computing: transfers, and waiting."""
    stats = plan.stats()
    return max(0.0, stats.predicted_seconds - stats.compute_seconds)


def _about_time(plan: Plan) -> str:
    stats, exposed = plan.stats(), exposed_seconds(plan)
    share = exposed / max(stats.predicted_seconds, 1e-30)
    return (
        f"Exposed communication is {format_seconds(exposed)} of "
        f"{format_seconds(stats.predicted_seconds)}, {_percent(share)}: what ranks wait for rows "
        "or for each other; the rest is the busiest rank's computing, with transfers behind it."
    )


def _about_memory(plan: Plan) -> str:
    parts = memory_parts(plan)
    peak = parts["peak"]
    text = (
        f"One layer's attention takes at most {format_bytes(peak)} of a rank's memory, in "
        f"backward: {format_bytes(parts['own'])} are its own Q, K, V and output, "
        f"{format_bytes(parts['received'])} rows of others at a time"
    )
    kept = parts["kept"]
    text += (
        f", and it keeps {format_bytes(kept)} of rows between the passes"
        if kept
        else (", none of which it keeps between the passes")
    )
    room = plan.machine.memory
    if room:
        text += f"; {plan.machine.name} has {format_bytes(room)}" + (
            ", which is less" if peak > room else ""
        )
    return text + "."


def memory_parts(plan: Plan) -> dict[str, int]:
    """Bytes of one layer's attention by what they are for, on the rank that has most of each."""
    every = [rank_memory(schedule, plan.shape) for schedule in plan.schedules.values()]
    names = ("own", "received", "kept", "peak")
    return {name: max(int(getattr(one, name).max()) for one in every) for name in names}


def _about_others(plan: Plan, others: Sequence[Strategy]) -> list[str]:
    own = plan.stats().predicted_seconds
    if not own:
        return ["There is nothing to compute."]
    best, worst = others[0], others[-1]
    lines = [f"{best.name} would take {_longer(plan, best.plan)}: {_difference(plan, best.plan)}."]
    if worst is not best:
        lines.append(
            f"{worst.name} would take {_longer(plan, worst.plan)}: {_difference(plan, worst.plan)}."
        )
    return lines


def _longer(plan: Plan, other: Plan) -> str:
    ratio = other.stats().predicted_seconds / plan.stats().predicted_seconds
    return f"{ratio:.2f} × as long" if ratio >= 1.005 else "as long"


def _difference(plan: Plan, other: Plan) -> str:
    """Why another strategy is slower (or hardly faster): bytes, links, waiting, work."""
    against: list[str] = []
    for_it: list[str] = []
    (near, far), (its_near, its_far) = bytes_by_node(plan), bytes_by_node(other)
    mine, its = near + far, its_near + its_far
    if mine and its and (not 0.95 <= its / mine <= 1.05 or abs(its_far - far) > 0.1 * far):
        text = f"it moves {_times(its / mine)} the bytes"
        if plan.ranks.size > plan.machine.ranks_per_node:
            text += f", {_share_of(its_far, its)} instead of {_share_of(far, mine)} between nodes"
        (against if its > mine or its_far > far else for_it).append(text)
    exposed, its_exposed = exposed_seconds(plan), exposed_seconds(other)
    if abs(its_exposed - exposed) > 0.002 * plan.stats().predicted_seconds:
        text = f"waits {format_seconds(abs(its_exposed - exposed))}"
        if its_exposed > exposed:
            against.append(f"{text} longer")
        else:
            for_it.append(f"{text} less")
    if other.stats().imbalance > 1.02 * plan.stats().imbalance:
        against.append(f"its busiest rank has {other.stats().imbalance:.2f} × the mean work")
    peak, its_peak = (max(p.stats().memory_bytes_per_rank) for p in (plan, other))
    if not against and its_peak > 1.05 * peak:
        against.append(f"it takes {_times(its_peak / peak)} the memory")
    text = _listed(against) or "the two hardly differ"
    return f"{text}, although {_listed(for_it)}" if for_it else text


def _share_of(part: int, whole: int) -> str:
    return _percent(part / whole)


def _listed(texts: Sequence[str]) -> str:
    """Some things that "it" does, in one sentence.

    >>> _listed(["waits", "it sleeps"]), _listed([])
    ('it waits and it sleeps', '')
    """
    *most, last = texts or [""]
    found = f"{', '.join(most)} and {last}" if most else last
    return found if found.startswith("it") or not found else f"it {found}"


def _times(ratio: float) -> str:
    return f"{ratio:.2g} ×"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share >= 0.0995 else f"{100 * share:.2g}%"
