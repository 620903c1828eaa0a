"""Memory of a rank is foretold: what its buffers take, before there are any."""

from __future__ import annotations

import pytest
import torch

import flexcp
from flexcp import masks
from flexcp.ops.executor import PassWorkspace
from flexcp.ops.program import rank_program
from flexcp.ops.rows import RowKind
from flexcp.plan.memory import rank_memory

HEADS, KV_HEADS, DIM = 8, 4, 32


def bytes_of_buffers(plan: flexcp.Plan, rank: int) -> int:
    """What the backward pass of a rank takes: its buffers as they are made, and its tensors."""
    schedule, dtype = plan.schedule_of(), plan.shape.dtype
    item, exact = dtype.itemsize, max(4, dtype.itemsize)
    group, place = schedule.group_of(rank)
    rows, own_rows = int(schedule.groups.counts[group]), int(plan.layout.counts[rank])
    q_heads, kv_heads = len(schedule.heads[place].q), len(schedule.heads[place].kv)
    program = rank_program(schedule, plan.grids[""], rank, "backward")
    keys = torch.empty(1, kv_heads, rows, DIM, dtype=dtype)
    space = PassWorkspace.of(program, RowKind.of(keys, keys, program.by_element), ())
    assert space.gradients is not None
    found = space.gradients.nbytes
    found += sum(
        x.nbytes for x in (space.own, space.arriving, space.staged, space.gathered) if x is not None
    )
    found += own_rows * (2 * HEADS * DIM * item + 2 * KV_HEADS * DIM * item + HEADS * exact)
    found += schedule.kept_rows(group) * 2 * kv_heads * DIM * item
    found += rows * (q_heads * (DIM * item + DIM * exact + exact) + 2 * kv_heads * DIM * item)
    if schedule.heads_group_size > 1:
        found += own_rows * HEADS * DIM * item
        found += rows * (2 * q_heads * DIM * item + 2 * kv_heads * DIM * item + q_heads * exact)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("ring", 8), ("exchange", 8), ("allgather", 8), ("ulysses", 8), ("hybrid", (4, 2)),
     ("auto", 4)],
)  # fmt: skip
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_the_peak_is_that_of_the_buffers_of_a_rank(schedule, ranks, dtype, name):
    mask = masks.causal()
    if name == "documents":
        mask &= masks.document(lengths=[100] * 10 + [1048])
    plan = flexcp.make_plan(
        mask, 2048, ranks, schedule=schedule, num_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=DIM, dtype=dtype, block_size=64,
    )  # fmt: skip
    told = rank_memory(plan.schedule_of(), plan.shape)
    for rank in (0, plan.ranks.size - 1):
        assert 0.75 <= int(told.peak[rank]) / bytes_of_buffers(plan, rank) <= 1.5
    assert plan.stats().memory_bytes_per_rank == tuple(told.peak.tolist())


def test_rounds_take_the_same_memory_on_any_number_of_ranks_and_an_all_gather_more():
    def peak(schedule: str, ranks: int) -> int:
        plan = flexcp.make_plan(masks.full(), 256 * ranks, ranks, schedule=schedule)
        return max(plan.stats().memory_bytes_per_rank)

    assert peak("ring", 16) == peak("ring", 4)
    assert peak("allgather", 16) > 2 * peak("allgather", 4)


def test_received_rows_are_those_of_the_traffic():
    plan = flexcp.make_plan(masks.causal(), 2048, 4, num_heads=8)
    told = rank_memory(plan.schedule_of(), plan.shape)
    assert tuple(told.received.tolist()) == plan.stats().bytes_held_per_rank
