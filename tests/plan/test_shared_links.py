"""Links that the ranks of a node share: one rank alone has all of it, all together no more."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexcp import FlexCPError, Layout, masks
from flexcp.plan import Machine, make_plan

OWN = Machine("own", 1e15, 2, 1e15, 1e9, 0.0, 0.0, 0.0, hidden=1.0)
"""Compute and links within a node take next to nothing."""
SHARED = replace(OWN, name="shared", node_bandwidth=1e9)
HALVES = replace(OWN, name="halves", inter_bandwidth=5e8)
HEADS = {"num_heads": 4, "head_dim": 32, "dtype": torch.float32}
ROW = 4 * 2 * 32 * 4
"""Bytes of a row of K and V."""


def predicted(machine, mask, layout, schedule="exchange", **options):
    options = {**HEADS, "block_size": 16, **options}
    plan = make_plan(
        mask, layout.seq_len, layout.ranks, layout=layout, schedule=schedule, machine=machine,
        **options,
    )  # fmt: skip
    return plan.stats().predicted_seconds


def in_order(*counts):
    edges = torch.tensor([0, *counts]).cumsum(0).tolist()
    runs = [[(a, b)] for a, b in pairwise(edges)]
    return Layout.of_runs(runs, seq_len=edges[-1])


def test_a_rank_that_sends_alone_has_the_whole_link():
    """A window of ranks in order crosses between the nodes once: rank 1 sends, rank 2 receives."""
    layout, window = in_order(128, 128, 128, 128), masks.sliding_window(64)
    seconds = 3 * 64 * ROW / 1e9  # rows in both passes, and their gradients
    assert predicted(SHARED, window, layout) == pytest.approx(seconds, rel=0.01)
    assert predicted(OWN, window, layout) == pytest.approx(seconds, rel=0.01)
    assert predicted(HALVES, window, layout) == pytest.approx(2 * seconds, rel=0.01)


def test_ranks_that_send_at_the_same_time_wait_for_all_that_the_link_carries():
    """Two ranks of a node fetch 100 rows each from the other node, in one round."""
    lengths = [100, 100, 100, 100]
    runs = [[(0, 50), (200, 250)], [(100, 150), (300, 350)], [(50, 100), (250, 300)],
            [(150, 200), (350, 400)]]  # fmt: skip
    layout = Layout.of_runs(runs, seq_len=sum(lengths))
    documents = masks.document(lengths=lengths)
    alone = 3 * 100 * ROW / 1e9
    assert predicted(OWN, documents, layout) == pytest.approx(alone, rel=0.01)
    assert predicted(SHARED, documents, layout) == pytest.approx(2 * alone, rel=0.01)


@given(
    counts=st.lists(st.integers(0, 60), min_size=4, max_size=8).filter(any),
    per_node=st.integers(2, 4),
    window=st.integers(0, 80),
    schedule=st.sampled_from(["exchange", "ring", "allgather", "ulysses", "hierarchical"]),
)
def test_a_shared_link_is_no_faster_than_own_ones_and_no_slower_than_its_even_parts(
    counts, per_node, window, schedule
):
    layout, mask = in_order(*counts), masks.sliding_window(window)
    own, shared, parts = (
        predicted(replace(m, ranks_per_node=per_node), mask, layout, schedule)
        for m in (OWN, SHARED, replace(OWN, inter_bandwidth=1e9 / per_node))
    )
    assert own * (1 - 1e-6) <= shared <= parts * (1 + 1e-6)


def test_swaps_of_groups_over_nodes_take_each_rank_its_part_of_the_link():
    layout, full = in_order(64, 64, 64, 64), masks.full()
    shared = predicted(SHARED, full, layout, "ulysses")
    assert shared == pytest.approx(predicted(HALVES, full, layout, "ulysses"), rel=1e-6)
    assert shared == pytest.approx(2 * predicted(OWN, full, layout, "ulysses"), rel=0.01)


def test_groups_within_nodes_use_the_link_with_all_of_their_ranks():
    """Both ranks of a group fetch the other group's rows, each for its heads."""
    full, options = masks.full(), {"schedule": "hybrid", **HEADS}
    shared, halves = (
        make_plan(full, 512, (2, 2), machine=machine, **options).stats().predicted_seconds
        for machine in (SHARED, HALVES)
    )
    assert shared == pytest.approx(halves)


@pytest.mark.parametrize(("mesh", "schedule"), [(8, "ulysses"), ((2, 4), "hybrid")])
def test_ranks_without_heads_leave_the_link_to_those_that_have_some(mesh, schedule):
    """One of four ranks of a node has the head, and fetches all rows alone."""
    shape = {"num_heads": 1, "head_dim": 64, "dtype": torch.float32, "layout": "contiguous"}
    own, shared = (
        make_plan(
            masks.full(), 1024, mesh, schedule=schedule, machine=replace(m, ranks_per_node=4),
            **shape,
        ).stats().predicted_seconds
        for m in (OWN, SHARED)
    )  # fmt: skip
    assert shared == pytest.approx(own)


@pytest.mark.parametrize("mesh", [(2, 6), (4, 3), (8, 3), (2, 5)])
def test_groups_on_two_nodes_take_no_less_than_their_links_carry(mesh):
    """Groups of 3, 5 and 6 ranks on nodes of 4: what nodes receive of other groups, both passes."""
    machine = replace(SHARED, ranks_per_node=4)
    plan = make_plan(
        masks.full(), 960, mesh, schedule="hybrid", machine=machine, num_heads=30, head_dim=16,
        layout="contiguous",
    )  # fmt: skip
    groups, size = mesh
    rows, part = 960 // groups, 30 // size * 2 * 16 * 2
    node = torch.arange(groups * size).view(groups, size) // 4
    apart = (node[:, None] != node[None]).sum(1).reshape(-1) * rows * part
    most = int(torch.bincount(node.reshape(-1), apart.double()).max())
    rounds_and_gradients = 3 - plan.schedule.keeps_kv
    assert plan.stats().predicted_seconds >= rounds_and_gradients * most / 1e9 * (1 - 1e-6)


def test_a_plan_within_a_node_knows_nothing_of_its_link():
    documents = masks.causal() & masks.document(lengths=[900, 300, 2000, 70, 68, 300])
    options = {"num_heads": 8, "num_kv_heads": 1, "head_dim": 128, "block_size": 32}
    one = replace(Machine.preset("h100-ib"), node_bandwidth=0.0)
    found = (
        make_plan(documents, 3638, 4, machine=m, **options)
        for m in (one, replace(one, node_bandwidth=1e9))
    )
    assert next(found).layout == next(found).layout


def test_bytes_have_the_price_of_the_link_that_all_of_a_node_keep_busy():
    received, far = torch.tensor([30, 40, 50, 0]), torch.tensor([10, 20, 0, 0])
    slow = replace(SHARED, intra_bandwidth=1e3, inter_bandwidth=1e2, node_bandwidth=1e2)
    assert slow.wire(received, far).tolist() == pytest.approx([0.32, 0.32, 0.05, 0.0])


def test_a_window_over_nodes_with_one_link_each_stays_a_halo_exchange():
    """Were the link taken to be cut in halves, ranks would share heads and move more."""
    machine = Machine("nodes", 4.4e10, 2, 1.1e9, 4.75e7, 1e-3, 2e-4, 5e-5, node_bandwidth=4.75e7)
    options = {"num_heads": 8, "head_dim": 64, "dtype": torch.float32, "machine": machine}
    plan = make_plan(masks.sliding_window(1024), 8192, 4, **options)
    own = 2048 * 8 * 2 * 64 * 4
    assert plan.schedule.heads_group_size == 1
    assert max(plan.stats().bytes_received_per_rank) < own


def test_what_ranks_of_a_node_share_is_a_number_that_a_price_can_be_computed_with():
    for wrong in (-1.0, 5e-324, 0.5, float("nan"), float("inf"), "fast", None, True):
        with pytest.raises(FlexCPError, match="node_bandwidth"):
            replace(OWN, node_bandwidth=wrong)
