"""A plan in words for a person, and as plain data for a program."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flexcp.layout import Layout
from flexcp.layout.balance.objective import Objective
from flexcp.plan.saved_masks import mask_as_data
from flexcp.schedule import Pass, Schedule, Transfers
from flexcp.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from flexcp.plan.plan import Plan

_NOT_TUNED = ("pairs_per_row", "pairs_per_round", "beside", "mean")
"""Numbers of the objective that follow from the machine, the shape and the mask."""


def explain(plan: Plan) -> str:
    """Some lines of text: what was chosen, why, what it costs."""
    stats, layout = plan.stats(), plan.layout
    runs = layout.rank.numel() / max(1, layout.ranks * layout.batch_elements)
    lines = [
        f"{plan.seq_len:,} tokens on {layout.ranks} ranks, priced for {plan.machine.name}",
        "",
        f"Layout {layout.name}: {int(layout.counts.min()):,} to {int(layout.counts.max()):,} "
        f"tokens per rank in {runs:.1f} runs on average"
        + (
            f", another one for each of {layout.batch_elements} batch elements"
            if layout.batch_elements > 1
            else ""
        ),
        f"  work    {stats.imbalance:.3f} x the mean on the busiest rank "
        f"(no layout is below {stats.imbalance_lower_bound:.3f})",
        f"  rows    {max(stats.tokens_received_per_rank):,} of K and V at most are received, "
        f"{sum(stats.tokens_received_per_rank) / layout.ranks:,.0f} on average; "
        f"{stats.received_fraction:.3f} of what an all-gather brings",
        f"  bytes   {format_bytes(max(stats.bytes_received_per_rank))} forward, "
        f"{format_bytes(max(stats.backward_bytes_received_per_rank))} backward, at most; "
        f"{format_bytes(max(stats.bytes_received_between_nodes_per_rank))} and "
        f"{format_bytes(max(stats.backward_bytes_received_between_nodes_per_rank))} of it from "
        "other nodes",
        f"  memory  {format_bytes(max(stats.bytes_held_per_rank))} of what others sent is held at "
        f"once, {_how_long(plan)}",
        "",
    ]
    for name, schedule in plan.schedules.items():
        cost = plan.costs[name]
        mask = f" for {name}" if name else f" for {plan.grids[name].mask.name}"
        lines.append(
            f"Schedule {_schedule_text(schedule)}{mask}: {format_seconds(cost.forward)} forward, "
            f"{format_seconds(cost.backward)} backward, of which "
            f"{format_seconds(cost.compute)} is compute"
        )
    numbers = asdict(Objective()).items()
    tuned = ", ".join(f"{name} {value:g}" for name, value in numbers if name not in _NOT_TUNED)
    lines += ["", f"Objective, all that is tuned: {tuned}"]
    lines += ["", "Considered (predicted time of all masks, forward and backward):"]
    for i, (name, seconds) in enumerate(plan.considered):
        lines.append(f"  {'->' if i == 0 else '  '} {format_seconds(seconds):>10}  {name}")
    return "\n".join(lines)


def _how_long(plan: Plan) -> str:
    if any(schedule.keeps_kv for schedule in plan.schedules.values()):
        return "until the backward pass is done (schedule='exchange' keeps two rounds' rows only)"
    return "two rounds' rows at a time"


def _schedule_text(schedule: Schedule) -> str:
    rounds = schedule.forward.rounds
    text = f"{schedule.name} in {rounds} round{'s' if rounds != 1 else ''}"
    if schedule.heads_group_size > 1:
        text += (
            f", heads shared by {schedule.heads_group_size} ranks, {schedule.groups.ranks} groups"
        )
    if schedule.head_parts > 1:
        text += f", {schedule.head_parts} parts of heads one after the other"
    return text


def plan_as_data(plan: Plan) -> dict[str, Any]:
    """Plain lists, numbers and texts."""
    shape = asdict(plan.shape)
    shape["dtype"] = str(plan.shape.dtype).removeprefix("torch.")
    return {
        "seq_len": plan.seq_len,
        "ranks": list(plan.ranks.shape),
        "masks": {
            name: {
                "name": grid.mask.name,
                "block_size": list(grid.block_size),
                **grid.counts(),
                "steps": mask_as_data(grid.mask),
            }
            for name, grid in plan.grids.items()
        },
        "shape": shape,
        "machine": asdict(plan.machine),
        "layout": _layout(plan.layout),
        "schedules": {name: _schedule(s) for name, s in plan.schedules.items()},
        "costs": {name: asdict(cost) for name, cost in plan.costs.items()},
        "stats": asdict(plan.stats()),
        "considered": [list(line) for line in plan.considered],
        "fingerprint": plan.fingerprint(),
    }


def _layout(layout: Layout) -> dict[str, Any]:
    return {
        "name": layout.name,
        "ranks": layout.ranks,
        "batch_elements": layout.batch_elements,
        "rank": layout.rank.tolist(),
        "start": layout.start.tolist(),
        "stop": layout.stop.tolist(),
    }


def _schedule(schedule: Schedule) -> dict[str, Any]:
    return {
        "name": schedule.name,
        "heads_group_size": schedule.heads_group_size,
        "groups": schedule.groups.ranks,
        "group_layout": _layout(schedule.groups) if schedule.heads_group_size > 1 else None,
        "outer": schedule.outer_schedule,
        "keeps_kv": schedule.keeps_kv,
        "head_parts": schedule.head_parts,
        "heads": [
            {"q": [s.q.start, s.q.stop], "kv": [s.kv.start, s.kv.stop]} for s in schedule.heads
        ],
        "forward": _pass(schedule.forward),
        "backward": _pass(schedule.backward),
    }


def _pass(what: Pass) -> dict[str, Any]:
    work = what.work
    return {
        "rounds": what.rounds,
        "moves": _transfers(what.moves),
        "work": {
            "round": work.round.tolist(),
            "rank": work.rank.tolist(),
            "start": work.start.tolist(),
            "stop": work.stop.tolist(),
        },
        "returns": _transfers(what.returns),
    }


def _transfers(table: Transfers) -> dict[str, list[int]]:
    return {
        "round": table.round.tolist(),
        "source": table.source.tolist(),
        "target": table.target.tolist(),
        "start": table.start.tolist(),
        "stop": table.stop.tolist(),
    }
