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
    forward_between_nodes: Tensor
    """int64 [ranks] Bytes of the forward pass that come from ranks of other nodes."""
    backward_between_nodes: Tensor
    """int64 [ranks] Bytes of the backward pass that come from ranks of other nodes."""
    held: Tensor
    """int64 [ranks] Bytes that were received and are held at the same time, at most; between the
    passes too if the schedule keeps them."""


def elements_per_row(schedule: Schedule, shape: AttentionShape) -> int:
    """Batch elements that a row of the layout stands for."""
    return shape.batch if schedule.layout.batch_elements == 1 else 1


def traffic(
    schedule: Schedule, shape: AttentionShape, ranks_per_node: int | None = None
) -> Traffic:
    """Counts a schedule's transfers, those within groups included.

    Consecutive `ranks_per_node` ranks are a node; all of them, if it is not given.
    """
    group_size, groups = schedule.heads_group_size, schedule.groups.ranks
    per_row = elements_per_row(schedule, shape)
    batch_elements = schedule.layout.batch_elements
    kv = torch.tensor([shape.kv_bytes(len(s.kv)) for s in schedule.heads]).repeat(groups)
    kv_used = torch.tensor([len(s.q) > 0 for s in schedule.heads]).repeat(groups)

    def rows(table: Transfers) -> Tensor:
        return table.received(groups).repeat_interleave(group_size)

    kv_rows = rows(schedule.forward.moves) * kv_used
    forward = kv_rows * kv * per_row
    held = rows_held(schedule).repeat_interleave(group_size) * kv_used * kv * per_row
    back_rows = rows(schedule.backward.moves) + rows(schedule.backward.returns)
    backward = back_rows * kv * kv_used * per_row
    node = (torch.arange(schedule.ranks) // (ranks_per_node or schedule.ranks)).view(groups, -1)
    moves, back = schedule.forward.moves, (schedule.backward.moves, schedule.backward.returns)
    used = kv * kv_used * per_row
    far = _from_other_nodes(moves, node) * used
    far_back = sum(_from_other_nodes(table, node) for table in back) * used
    if group_size > 1:
        own = schedule.layout.counts * batch_elements
        others = (schedule.groups.counts * batch_elements).repeat_interleave(group_size) - own
        q = torch.tensor([shape.q_bytes(len(s.q)) for s in schedule.heads]).repeat(groups)
        out = torch.tensor([shape.out_bytes(len(s.q)) for s in schedule.heads])
        kv_back = torch.tensor([len(s.kv) for s in schedule.heads])
        foreign_out = int(out.sum()) - out.repeat(groups)
        foreign_q = shape.q_bytes(shape.num_heads) - q
        foreign_kv = (int(kv_back.sum()) - kv_back.repeat(groups)) * shape.kv_bytes(1)
        kv_rows = kv_rows + others * kv_used
        held = held + others * (q + kv) * per_row
        swapped = (others * (q + kv) + own * foreign_out) * per_row
        swapped_back = (others * q + own * (foreign_q + foreign_kv)) * per_row
        forward, backward = forward + swapped, backward + swapped_back
        # Of the ranks of its group, how many are on other nodes.
        apart = (node[:, :, None] != node[:, None, :]).sum(2).reshape(-1)
        far = far + swapped * apart // (group_size - 1)
        far_back = far_back + swapped_back * apart // (group_size - 1)
    return Traffic(kv_rows, forward, backward, far, far_back, held)


def _from_other_nodes(table: Transfers, node: Tensor) -> Tensor:
    """int64 [ranks] Rows that come from other nodes; `node` is [groups, ranks of a group]."""
    found = torch.zeros(node.shape, dtype=torch.int64)
    apart = node[table.source] != node[table.target]
    return found.index_add_(0, table.target, table.rows[:, None] * apart).reshape(-1)


def rows_held(schedule: Schedule) -> Tensor:
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
