"""Schedules by name; and the hybrid: heads split within groups, any other schedule between them."""

from __future__ import annotations

from collections.abc import Sequence

from flexcp.errors import FlexCPError, quote
from flexcp.grid import BlockGrid
from flexcp.layout import Layout
from flexcp.schedule.allgather import allgather
from flexcp.schedule.exchange import OwnWork, exchange
from flexcp.schedule.heads import split_heads
from flexcp.schedule.hierarchical import Relays, Ways
from flexcp.schedule.needs import Needs
from flexcp.schedule.ring import ring
from flexcp.schedule.tables import Schedule
from flexcp.schedule.ulysses import grouped, ulysses

SCHEDULES = ("exchange", "ring", "allgather", "ulysses", "hybrid", "hierarchical")
"""The names of all schedules."""


def make_schedule(
    name: str,
    grids: Sequence[BlockGrid],
    layout: Layout,
    *,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    heads_group_size: int = 1,
    outer_schedule: str = "exchange",
    keep: bool = False,
    at_once: bool = False,
    few_rounds: int = 0,
    own_work: OwnWork | None = None,
    needs: Needs | None = None,
    ranks_per_node: int | None = None,
    relays: Relays | None = None,
) -> Schedule:
    """A schedule for some masks on a layout.

    Args:
        name: One of `SCHEDULES`.
        grids: The masks that are computed together; usually one.
        layout: Who owns which rows.
        num_heads: Query heads.
        num_kv_heads: Key-value heads; as many as query heads if not given.
        heads_group_size: For hybrid: how many consecutive ranks share the heads.
        outer_schedule: For hybrid: what runs between groups.
        keep: For exchange and hierarchical: keep what forward received for backward, which then
            only sends gradients home. That needs memory for these rows, like an all-gather, but not
            for more.
        at_once: For exchange: fetch everything before any work.
        few_rounds: For exchange and hierarchical: if not 0, in that many rounds, or in more if
            memory asks for them, an equal part of what every pair of ranks exchanges in each.
        own_work: For exchange with few rounds, and hierarchical: the work of every group. That
            against own rows is spread over rounds, and heavy and light rows of others come in each.
        needs: Who needs what between groups, if known.
        ranks_per_node: For hierarchical: consecutive ranks that are a node; all, if not given.
        relays: For hierarchical: who fetches and who passes on what when, if known.

    >>> import flexcp
    >>> from flexcp.layout import contiguous
    >>> grid = flexcp.build_block_grid(flexcp.masks.sliding_window(2), 12)
    >>> schedule = make_schedule("exchange", [grid], contiguous(12, 3))
    >>> schedule.steps(1, "forward")[1].receives
    ((0, ((2, 4),)),)
    """
    if name not in SCHEDULES:
        raise FlexCPError(
            f"a schedule among {', '.join(SCHEDULES)}", quote(name), "pass one of those, or 'auto'"
        )
    if name == "ulysses":
        heads_group_size, outer_schedule = layout.ranks, "ulysses"
    elif name != "hybrid":
        heads_group_size, outer_schedule = 1, name
    if heads_group_size < 1 or layout.ranks % heads_group_size:
        raise FlexCPError(
            f"groups that divide {layout.ranks} ranks",
            f"groups of {heads_group_size}",
            "pass a mesh of shape (groups, ranks of a group)",
        )
    groups = grouped(layout, heads_group_size)
    if outer_schedule == "exchange":
        forward, backward = exchange(
            needs or Needs.of(grids, groups),
            at_once=at_once,
            few_rounds=few_rounds,
            own_work=own_work,
        )
    elif outer_schedule == "hierarchical":
        if relays is None:
            ways = Ways.of(needs or Needs.of(grids, groups), ranks_per_node or layout.ranks)
            relays = Relays.of(ways, own_work, max(1, few_rounds))
        forward, backward = relays.forward, relays.backward(keep=keep)
    elif outer_schedule == "ring":
        forward, backward = ring(groups)
    elif outer_schedule == "allgather":
        forward, backward = allgather(groups)
    else:
        forward, backward = ulysses(groups)
    schedule = Schedule(
        name,
        layout,
        groups,
        heads_group_size,
        split_heads(num_heads, num_kv_heads or num_heads, heads_group_size),
        forward,
        backward,
        outer_schedule=outer_schedule,
        keeps_kv=outer_schedule == "allgather" or (keep and outer_schedule == "hierarchical"),
    )
    return schedule.with_kept_kv() if keep and outer_schedule == "exchange" else schedule
