"""Rows and bytes that each rank receives under a schedule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.plan.shape import AttentionShape
from flexcp.schedule import Schedule, Transfers


@dataclass(frozen=True, eq=False)
class Traffic:
    """What arrives at each rank; queries and outputs that are swapped for heads included."""

    kv_rows: Tensor
    """int64 [ranks] Rows of K and V in forward, whatever part of their heads."""
    forward: Tensor
    """int64 [ranks] Bytes of the forward pass."""
    backward: Tensor
    """int64 [ranks] Bytes of the backward pass."""
    held: Tensor
    """int64 [ranks] Bytes that were received and are held at the same time, at most; between the
    passes too if the schedule keeps them."""


def elements_per_row(schedule: Schedule, shape: AttentionShape) -> int:
    """Batch elements that a row of the layout stands for."""
    return shape.batch if schedule.layout.batch_elements == 1 else 1


def traffic(schedule: Schedule, shape: AttentionShape) -> Traffic:
    """Counts a schedule's transfers, those within groups included."""
    group_size, groups = schedule.heads_group_size, schedule.groups.ranks
    per_row = elements_per_row(schedule, shape)
    batch_elements = schedule.layout.batch_elements
    kv = torch.tensor([shape.kv_bytes(len(s.kv)) for s in schedule.heads]).repeat(groups)
    kv_used = torch.tensor([len(s.q) > 0 for s in schedule.heads]).repeat(groups)

    def rows(table: Transfers) -> Tensor:
        return table.received(groups).repeat_interleave(group_size)

    kv_rows = rows(schedule.forward.moves) * kv_used
    forward = kv_rows * kv * per_row
    held = _rows_held(schedule).repeat_interleave(group_size) * kv_used * kv * per_row
    back_rows = rows(schedule.backward.moves) + rows(schedule.backward.returns)
    backward = back_rows * kv * kv_used * per_row
    if group_size > 1:
        own = schedule.layout.counts * batch_elements
        others = (schedule.groups.counts * batch_elements).repeat_interleave(group_size) - own
        q = torch.tensor([shape.q_bytes(len(s.q)) for s in schedule.heads]).repeat(groups)
        out = torch.tensor([shape.out_bytes(len(s.q)) for s in schedule.heads])
        back = torch.tensor([len(s.kv) for s in schedule.heads])
        foreign_out = int(out.sum()) - out.repeat(groups)
        foreign_q = shape.q_bytes(shape.num_heads) - q
        foreign_kv = (int(back.sum()) - back.repeat(groups)) * shape.kv_bytes(1)
        kv_rows = kv_rows + others * kv_used
        held = held + others * (q + kv) * per_row
        forward = forward + (others * (q + kv) + own * foreign_out) * per_row
        backward = backward + (others * q + own * (foreign_q + foreign_kv)) * per_row
    return Traffic(kv_rows, forward, backward, held)


def _rows_held(schedule: Schedule) -> Tensor:
    """int64 [groups] Rows of K and V of others that a group has at the same time, at most."""
    groups, moves = schedule.groups.ranks, schedule.forward.moves
    if schedule.keeps_kv:
        return moves.received(groups)
    rounds = schedule.forward.rounds
    found = torch.zeros((rounds + 1) * groups, dtype=torch.int64)
    found.index_add_(0, moves.round * groups + moves.target, moves.rows)
    by_round = found.view(rounds + 1, groups)
    # What is computed with, and what arrives meanwhile.
    return (by_round[:-1] + by_round[1:]).amax(0)
