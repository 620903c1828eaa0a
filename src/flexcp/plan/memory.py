"""Memory of one attention call on each rank, known before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.plan.shape import AttentionShape
from flexcp.plan.traffic import elements_per_row, rows_held
from flexcp.schedule import Schedule, Transfers


@dataclass(frozen=True, eq=False)
class RankMemory:
    """Bytes of one layer's attention on each rank; what the kernel itself takes is not in it."""

    own: Tensor
    """int64 [ranks] Q, K, V, output and lse of the rank's own tokens."""
    received: Tensor
    """int64 [ranks] What others sent and is held at the same time, at most."""
    kept: Tensor
    """int64 [ranks] Kept for the backward pass beside the own tensors: received rows, if the
    schedule keeps them, and with heads split Q, K, V, output and lse of the group's rows."""
    peak: Tensor
    """int64 [ranks] The most at any moment of both passes, in backward: own and kept tensors, rows
    in flight, and gradients, summed in float32 (float64 for float64)."""


def rank_memory(schedule: Schedule, shape: AttentionShape) -> RankMemory:
    """What a schedule takes.

    >>> import flexcp
    >>> plan = flexcp.make_plan(flexcp.masks.causal(), 4096, 4, schedule="allgather")
    >>> found = rank_memory(plan.schedule_of(), plan.shape)
    >>> bool((found.received == 3 * 1024 * plan.shape.kv_bytes(1)).all())
    True
    """
    group_size, groups = schedule.heads_group_size, schedule.groups.ranks
    elements = elements_per_row(schedule, shape)
    item, exact = shape.dtype.itemsize, max(4, shape.dtype.itemsize)
    sums = exact // item  # bytes of a sum, over those of what is summed
    own_rows = schedule.layout.counts * schedule.layout.batch_elements * elements
    own = own_rows * (
        shape.q_bytes(shape.num_heads)
        + shape.kv_bytes(shape.num_kv_heads)
        + shape.out_bytes(shape.num_heads)
    )
    counts = schedule.groups.counts * schedule.layout.batch_elements * elements

    def by_rank(rows: Tensor) -> Tensor:
        return rows.repeat_interleave(group_size)

    def by_place(sizes: list[int]) -> Tensor:
        return torch.tensor(sizes, dtype=torch.int64).repeat(groups)

    q = by_place([shape.q_bytes(len(s.q)) for s in schedule.heads])
    kv = by_place([shape.kv_bytes(len(s.kv)) if len(s.q) else 0 for s in schedule.heads])
    lse = by_place([exact * len(s.q) for s in schedule.heads])
    rows, held = by_rank(counts), by_rank(rows_held(schedule) * elements)
    received = held * kv
    home, away = (
        by_rank(_most_in_a_round(schedule.backward.returns, groups, to=to) * elements)
        for to in (True, False)
    )
    # Sums of own gradients and of those that leave next; what comes home; what leaves, as it goes.
    gradients = (rows + away) * kv * sums + (home + away) * kv
    # dO, the sum of dQ, delta; own K and V as rows; dK and dV as they are handed out.
    passing = rows * (q + q * sums + lse + kv + kv) + gradients
    at_once = schedule.backward.rounds == 1
    if at_once:  # keys are put in order, own among those of others, and so are their gradients
        passing = passing + (rows + held) * kv * (1 + sums)
    kept_rows = held + rows * by_rank(schedule.own_arrive["forward"])
    kept = kept_rows * kv * schedule.keeps_kv
    in_flight = received * (not schedule.keeps_kv)
    if group_size > 1:
        received = received + (rows - own_rows) * (q + kv)
        kept = kept + rows * (2 * q + kv + lse)
        passing = passing + own_rows * shape.q_bytes(shape.num_heads)
    return RankMemory(own, received, kept, own + kept + in_flight + passing)


def _most_in_a_round(table: Transfers, groups: int, *, to: bool) -> Tensor:
    """int64 [groups] The most rows that come to a group, or leave it, in one round."""
    rounds = int(table.round.max()) + 1 if len(table) else 1
    found = torch.zeros(rounds * groups, dtype=torch.int64)
    end = table.target if to else table.source
    found.index_add_(0, table.round * groups + end, table.rows)
    return found.view(rounds, groups).amax(0)
