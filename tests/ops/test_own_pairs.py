"""Own rows with own keys, which ranks that swap rows for heads compute while they swap."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexcp
from flexcp import masks, testing
from flexcp.kernels.compiled_shapes import compiled_shapes_of
from flexcp.layout import Layout
from flexcp.ops.program import RankPrograms

LENGTH = 240


def programs(mask, layout):
    """What every rank does of a group that shares all heads."""
    grid = flexcp.build_block_grid(mask, LENGTH, block_size=16)
    plan = flexcp.make_plan(
        mask, LENGTH, layout.ranks, layout=layout, schedule="ulysses", block_size=16,
        num_heads=4, head_dim=8,
    )  # fmt: skip
    return [RankPrograms(plan.schedule, grid, rank, as_one=False) for rank in range(layout.ranks)]


def dealt(cuts, owners, ranks=3):
    """Stretches between the cuts, for their owners."""
    edges = [0, *sorted(set(cuts)), LENGTH]
    runs = [[] for _ in range(ranks)]
    for i, (a, b) in enumerate(pairwise(edges)):
        runs[owners[i % len(owners)]].append((a, b))
    return Layout.of_runs(runs, seq_len=LENGTH)


DOCUMENTS = masks.causal() & masks.document(lengths=[50, 3, 97, 40, 50])


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(1, LENGTH - 1), max_size=24),
    owners=st.lists(st.integers(0, 2), min_size=1, max_size=9),
    mask=st.sampled_from([DOCUMENTS, masks.causal(), masks.sliding_window(30, 5), masks.full()]),
)
def test_every_pair_is_computed_once(cuts, owners, mask):
    """In a round, or apart from them."""
    layout = dealt(cuts, owners)
    everything = flexcp.build_block_grid(mask, LENGTH, block_size=16).area()
    for of_rank in programs(mask, layout):
        work = [w.shapes.shapes for r in of_rank.forward.rounds for w in r.work]
        if of_rank.own_pairs is not None:
            work.append(of_rank.own_pairs.shapes.shapes)
        assert sum(shapes.area(1, 1) for shapes in work) == everything


@pytest.mark.parametrize(("pieces", "apart"), [(4, True), (8, True), (9, False)])
def test_rows_in_many_stretches_are_left_to_the_rounds(pieces, apart):
    """They would cut what the rounds compute into too many shapes."""
    layout = dealt(range(10, 20 * pieces, 10), [0, 1], ranks=2)
    found = programs(DOCUMENTS, layout)
    assert [p.own_pairs is not None for p in found] == [apart, apart]


def test_rows_that_do_not_ascend_are_left_to_the_rounds():
    layout = Layout.of_runs([[(120, 240), (60, 120)], [(0, 60)]])
    assert programs(DOCUMENTS, layout)[0].own_pairs is None


@pytest.mark.parametrize("mask", [masks.full(), masks.causal(), masks.sliding_window(30)])
def test_a_rectangle_a_triangle_and_a_band_are_not_cut(mask):
    """A kernel that computes the group's in one call would need several."""
    layout = Layout.of_runs([[(0, 80)], [(80, 160)], [(160, 240)]])
    for of_rank in programs(mask, layout):
        assert of_rank.own_pairs is None
        ((work,),) = (round_.work for round_ in of_rank.forward.rounds)
        of_all = compiled_shapes_of(flexcp.build_block_grid(mask, LENGTH, block_size=16))
        assert work.shapes.kind == of_all.kind


@pytest.mark.parametrize(("kv_heads", "more"), [(8, 1.01), (2, 1.15)])
def test_gradients_in_half_types_are_rounded_once(kv_heads, more):
    """Their error is that of one process; but for what others send of a kv head that they share."""
    errors = {"ranks": 0.0, "one": 0.0}
    for seed in range(3):
        torch.manual_seed(seed)
        full = [torch.randn(1, h, 512, 32) for h in (8, kv_heads, kv_heads)]
        weight = torch.randn(1, 8, 512, 32)
        mask = masks.causal() & masks.document(lengths=[290, 222])

        def gradients(dtype, full=full, weight=weight, mask=mask):
            x = [t.bfloat16().to(dtype).requires_grad_() for t in full]
            out = flexcp.flex_attention(*x, block_mask=mask, enable_gqa=True)
            out.backward(weight.to(dtype))
            return [t.grad for t in x]

        def rank(mesh, full=full, weight=weight, mask=mask):
            plan = flexcp.make_plan(
                mask, 512, mesh, layout="head_tail", schedule="ulysses", num_heads=8,
                num_kv_heads=kv_heads, head_dim=32, dtype=torch.bfloat16,
            )  # fmt: skip
            x = [plan.shard(t.bfloat16(), 2).requires_grad_() for t in full]
            flexcp.attention(*x, plan).backward(plan.shard(weight.bfloat16(), 2))
            return [plan.unshard(t.grad, 2) for t in x]

        exact = gradients(torch.float64)
        one, ranks = gradients(torch.bfloat16), testing.simulate(rank, 4)[0]
        for name, found in (("one", one), ("ranks", ranks)):
            pairs = zip(found, exact, strict=True)
            errors[name] += sum(float((a - b).norm() / b.norm()) for a, b in pairs)
    assert errors["ranks"] <= more * errors["one"]
