"""Hierarchical exchange: rows that several ranks of a node need cross between nodes once."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp import Machine, build_block_grid, make_plan, masks
from flexcp.layout import Layout, contiguous, head_tail, rows_needed, striped
from flexcp.schedule import check_schedule, make_schedule

LENGTH = 240


def far_rows(table, ranks_per_node: int) -> int:
    apart = table.source // ranks_per_node != table.target // ranks_per_node
    return int(table.rows[apart].sum())


def rows_that_nodes_need(grid, layout: Layout, ranks_per_node: int) -> int:
    """Rows of other nodes that any rank of a node needs."""
    nodes = -(-layout.ranks // ranks_per_node)
    needed = torch.zeros(nodes, layout.rows, dtype=torch.bool)
    for rank in range(layout.ranks):
        for start, stop in rows_needed([grid], layout).of(rank):
            needed[rank // ranks_per_node, start:stop] = True
    for rank in range(layout.ranks):
        needed[rank // ranks_per_node, layout.rows_of(rank)] = False
    return int(needed.sum())


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=6),
    st.integers(1, 7),
    st.integers(1, 4),
    st.sampled_from([contiguous, head_tail, striped]),
    st.booleans(),
    st.booleans(),
)
def test_every_row_comes_once_to_whom_it_is_needed_by_and_once_to_every_node(
    lengths, ranks, per_node, layout_of, causal, keep
):
    mask = masks.document(lengths=lengths)
    grid = build_block_grid(mask & masks.causal() if causal else mask, sum(lengths), block_size=16)
    layout = layout_of(sum(lengths), ranks)
    schedule = make_schedule("hierarchical", [grid], layout, ranks_per_node=per_node, keep=keep)
    check_schedule(schedule, [grid])
    moves = schedule.forward.moves
    needed = rows_needed([grid], layout).counts(ranks)
    assert torch.equal(moves.received(ranks), needed)
    assert far_rows(moves, per_node) == rows_that_nodes_need(grid, layout, per_node)
    assert far_rows(schedule.backward.returns, per_node) == far_rows(moves, per_node)
    assert schedule.keeps_kv == keep
    assert (len(schedule.backward.moves) == 0) == (keep or len(moves) == 0)


def test_all_ranks_of_a_node_fetch_a_part_of_what_they_share():
    grid, layout = build_block_grid(masks.full(), 216, block_size=16), contiguous(216, 6)
    schedule = make_schedule("hierarchical", [grid], layout, ranks_per_node=3)
    moves = schedule.forward.moves
    far = moves.source // 3 != moves.target // 3
    rows = torch.zeros(6, dtype=torch.int64).index_add_(0, moves.target[far], moves.rows[far])
    assert rows.tolist() == [36] * 6
    assert far_rows(make_schedule("exchange", [grid], layout).forward.moves, 3) == 3 * 6 * 36


def test_short_stretches_that_the_same_ranks_share_come_whole_to_one_of_them():
    """Twelve stretches of five rows for three ranks: four for each, not a part of every one."""
    grid = build_block_grid(lambda b, h, q, kv: (kv < 120) & (kv % 10 < 5), 720, block_size=5)
    moves = make_schedule(
        "hierarchical", [grid], contiguous(720, 6), ranks_per_node=3
    ).forward.moves
    far = moves.target >= 3
    far &= moves.source < 3
    assert moves.rows[far].tolist() == [5] * 12
    assert moves.target[far].tolist() == [3] * 4 + [4] * 4 + [5] * 4


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("rounds", [6, 8])
def test_rows_come_in_as_many_rounds_as_asked_and_are_passed_on_in_the_next(rounds, keep):
    grid = build_block_grid(masks.causal(), LENGTH, block_size=8)
    options = {"ranks_per_node": 2, "few_rounds": rounds, "keep": keep}
    schedule = make_schedule("hierarchical", [grid], head_tail(LENGTH, 6), **options)
    check_schedule(schedule, [grid])
    assert schedule.forward.rounds == 1 + rounds + 1
    moves = schedule.forward.moves
    far = moves.source // 2 != moves.target // 2
    first, last = int(moves.round[far].min()), int(moves.round[far].max())
    assert (first, last) == (1, rounds)
    by_round = torch.bincount(moves.round[far], moves.rows[far].double())[1:]
    assert float(by_round.max() - by_round.min()) <= 0.2 * float(by_round.mean())


def test_a_round_brings_no_rank_more_than_the_largest_rank_owns():
    grid, layout = build_block_grid(masks.causal(), LENGTH, block_size=16), head_tail(LENGTH, 6)
    moves = make_schedule("hierarchical", [grid], layout, ranks_per_node=3).forward.moves
    filled = torch.zeros(100 * 6, dtype=torch.int64)
    filled.index_add_(0, moves.round * 6 + moves.target, moves.rows)
    assert int(filled.max()) <= LENGTH // 6


@pytest.mark.parametrize(("ranks", "per_node"), [(4, 2), (6, 3), (5, 2)])
def test_stats_tell_bytes_within_and_between_nodes_apart(ranks, per_node):
    machine = replace(Machine.preset("h100-ib"), ranks_per_node=per_node)
    found = {
        schedule: make_plan(
            masks.causal(), 4096, ranks, layout="head_tail", schedule=schedule, machine=machine
        ).stats()
        for schedule in ("exchange", "hierarchical")
    }
    both = found.values()
    far, far_back = (
        [sum(getattr(stats, f"{name}bytes_received_between_nodes_per_rank")) for stats in both]
        for name in ("", "backward_")
    )
    assert far[1] < far[0]
    assert far_back[1] < far_back[0]
    assert len({stats.bytes_received_per_rank for stats in both}) == 1


def test_auto_passes_rows_on_where_links_between_nodes_are_slow():
    machine = replace(Machine.preset("h100-ib"), ranks_per_node=4, inter_bandwidth=1e9)
    shape = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 128}
    plan = make_plan(masks.causal(), 1 << 15, 8, machine=machine, **shape)
    assert plan.schedules[""].name == "hierarchical"
    plan.check()
    for schedule in ("exchange", "ring", "allgather"):
        other = make_plan(masks.causal(), 1 << 15, 8, machine=machine, schedule=schedule, **shape)
        assert plan.stats().predicted_seconds < other.stats().predicted_seconds
    assert "hierarchical" in plan.explain()


def test_nodes_that_do_not_divide_the_ranks_work_with_every_schedule():
    machine = replace(Machine.preset("h100-ib"), ranks_per_node=3)
    mask = masks.document(lengths=[900, 100, 1500, 1596]) & masks.causal()
    for schedule in ("auto", "exchange", "hierarchical", "ring"):
        plan = make_plan(mask, 4096, 8, machine=machine, schedule=schedule)
        plan.check()
        stats = plan.stats()
        for far, all_ in zip(
            stats.bytes_received_between_nodes_per_rank, stats.bytes_received_per_rank, strict=True
        ):
            assert 0 <= far <= all_


def test_auto_does_not_miss_it_where_groups_that_share_heads_are_priced_first():
    """Rows that are passed on come once to a node; counted for every rank, they look dearer."""
    tokens, draw, lengths = 1 << 20, random.Random("log-normal 7.5, 1.2 301"), []
    while sum(lengths) < tokens:
        lengths.append(min(tokens - sum(lengths), round(draw.lognormvariate(7.5, 1.2))))
    mask = masks.document(lengths=lengths) & masks.causal()
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    chosen = make_plan(mask, tokens, 64, **heads)
    relayed = make_plan(mask, tokens, 64, layout="balanced", schedule="hierarchical", **heads)
    assert chosen.stats().predicted_seconds <= 1.001 * relayed.stats().predicted_seconds


def test_it_is_made_where_asked_for_however_many_stretches_are_passed_on():
    """Among others it would not be tried: 57,344 single rows."""
    machine = replace(Machine.preset("h100-ib"), ranks_per_node=4)
    layout = striped(8192, 8, stripe=1)
    plan = make_plan(masks.full(), 8192, 8, layout=layout, schedule="hierarchical", machine=machine)
    assert plan.schedules[""].name == "hierarchical"


@pytest.mark.parametrize("seed", [1, 4])
def test_auto_passes_rows_on_in_more_rounds_where_they_are_waited_for(seed):
    """In as few rounds as memory allows, the first rows and the last gradients are waited for."""
    draw, lengths, tokens = random.Random(seed), [], 1 << 18
    while sum(lengths) < tokens:
        lengths.append(min(tokens - sum(lengths), 1 + int(draw.expovariate(30 / tokens))))
    mask = masks.document(lengths=lengths) & masks.causal()
    machine = replace(Machine.preset("h100-ib"), inter_bandwidth=1e10)
    heads = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 128}
    plan = make_plan(mask, tokens, (64, 1), machine=machine, **heads)  # no ranks share heads
    kept = r"balanced \+ hierarchical in (\d+) rounds, kept"
    tried = [(re.fullmatch(kept, name), seconds) for name, seconds in plan.considered]
    few, *_, many = sorted((int(match[1]), seconds) for match, seconds in tried if match)
    assert many[1] < few[1]
    plan.check()
