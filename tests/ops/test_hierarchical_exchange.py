"""Rows that are passed on within a node give the results of one process, and its gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp import (
    Machine,
    Mask,
    attention,
    build_block_grid,
    flex_attention,
    make_plan,
    masks,
    testing,
)
from flexcp.layout import contiguous, head_tail, striped
from flexcp.ops.program import rank_program
from flexcp.plan.work_profile import WorkProfile
from flexcp.schedule import make_schedule
from tests.ops.test_parity_over_ranks import MASKS, compare


@pytest.mark.parametrize("name", ["causal", "documents", "window", "full"])
@pytest.mark.parametrize(("ranks", "per_node"), [(4, 2), (6, 3), (5, 2)])
@pytest.mark.parametrize("layout", ["head_tail", "balanced"])
def test_passing_rows_on_gives_the_result_of_one_process(name, ranks, per_node, layout):
    machine = replace(Machine.preset("h100-ib"), ranks_per_node=per_node)
    worst = compare(
        testing.simulate,
        ranks,
        MASKS[name],
        203,
        layout=layout,
        schedule="hierarchical",
        machine=machine,
    )
    assert worst < 1e-10


@pytest.mark.parametrize("name", ["causal", "full"])
def test_rows_that_auto_keeps_for_backward_are_passed_on_too(name):
    machine = replace(Machine.preset("h100-ib"), ranks_per_node=3, inter_bandwidth=1e6)
    options = {"layout": "head_tail", "machine": machine}
    shape = {"num_heads": 1, "head_dim": 8, "dtype": torch.float64, "batch": 2, "block_size": 16}
    schedule = make_plan(MASKS[name], 203, 6, **options, **shape).schedules[""]
    assert schedule.name == "hierarchical"
    assert schedule.keeps_kv
    heads = {"heads": 1, "kv_heads": 1}
    assert (
        compare(testing.simulate, 6, MASKS[name], 203, schedule="auto", **options, **heads) < 1e-10
    )


def test_elements_of_a_batch_with_layouts_of_their_own_pass_rows_on():
    machine = replace(Machine.preset("h100-ib"), ranks_per_node=2)
    mask = masks.document(lengths=[[40, 60], [70, 30]]) & masks.causal()
    assert compare(testing.simulate, 4, mask, 100, schedule="hierarchical", machine=machine) < 1e-10


QUICK = replace(
    Machine.preset("h100-ib"), ranks_per_node=4, flops=1e13, latency=1e-7, launch=1e-7, message=1e-8
)
"""Machines on which small sequences are worth keeping and passing on."""


def test_own_rows_that_are_sent_with_others_stay_where_they_are_for_backward():
    """No rank computes against rows of its own, but it sends them beside rows that it passes on."""
    others = Mask(lambda b, h, q, kv: q // 128 != kv // 128)
    options = {"layout": "contiguous", "machine": QUICK}
    shape = {"num_heads": 2, "head_dim": 8, "dtype": torch.float64, "block_size": 16, "batch": 2}
    schedule = make_plan(others, 1024, 8, **options, **shape).schedules[""]
    assert schedule.name == "hierarchical"
    assert schedule.keeps_kv
    heads = {"heads": 2, "kv_heads": 2, "schedule": "auto"}
    assert compare(testing.simulate, 8, others, 1024, **options, **heads) < 1e-10


@settings(max_examples=25, deadline=None)
@given(
    st.integers(2, 6),
    st.integers(1, 3),
    st.sampled_from(["exchange", "hierarchical"]),
    st.sampled_from([contiguous, head_tail, striped]),
    st.sampled_from(["causal", "documents", "window", "full"]),
    st.integers(0, 4),
)
def test_both_passes_agree_on_where_kept_rows_are(ranks, per_node, name, layout_of, mask, rounds):
    grid, layout = build_block_grid(MASKS[mask], 203, block_size=16), layout_of(203, ranks)
    own = WorkProfile.of([grid], layout).own(layout) if rounds else None
    options = {"few_rounds": rounds} if name == "exchange" else {"ranks_per_node": per_node}
    schedule = make_schedule(name, [grid], layout, keep=True, own_work=own, **options)
    for rank in range(ranks):
        forward, backward = (
            rank_program(schedule, grid, rank, direction) for direction in ("forward", "backward")
        )
        assert forward.own_arrive == backward.own_arrive
        assert forward.arriving_rows == backward.arriving_rows == schedule.kept_rows(rank)


@pytest.mark.parametrize("schedule", ["exchange", "hierarchical"])
def test_a_graph_knows_how_many_rows_are_kept_in_several_rounds(schedule):
    machine = QUICK if schedule == "hierarchical" else replace(QUICK, ranks_per_node=8)
    shape = {"num_heads": 1, "head_dim": 8, "dtype": torch.float64, "block_size": 16}
    options = {"layout": "head_tail", "machine": machine, **shape}
    ranks = 8 if schedule == "hierarchical" else 4
    x = torch.randn(1, 1, 1024, 8, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    flex_attention(whole, whole, whole, block_mask=masks.causal()).sum().backward()

    def rank(mesh):
        plan = make_plan(masks.causal(), 1024, mesh, **options)
        assert (plan.schedule_of().name, plan.schedule_of().keeps_kv) == (schedule, True)
        assert plan.schedule_of().forward.rounds > 2
        own = plan.shard(x, 2).requires_grad_()
        torch.compile(lambda q: attention(q, q, q, plan), backend="aot_eager")(own).sum().backward()
        return plan.unshard(own.grad, 2)

    for found in testing.simulate(rank, ranks):
        torch.testing.assert_close(found, whole.grad)
