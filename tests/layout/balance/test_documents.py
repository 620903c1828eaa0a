"""Packs of documents: no rank receives much more than its longest document makes it."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp import BlockGrid, build_block_grid, masks
from flexcp.layout import Layout, area_per_rank, balanced, rows_needed

LENGTH, RANKS = 1 << 17, 16


def pack(seed: int) -> list[int]:
    """Documents whose lengths spread over four powers of ten: most short, a few very long."""
    draw = random.Random(seed)
    lengths, left = [], LENGTH
    while left:
        lengths.append(min(left, int(10 ** draw.triangular(1, 5, 2.6))))
        left -= lengths[-1]
    draw.shuffle(lengths)
    return lengths


def grid_of(lengths: list[int], *, causal: bool) -> BlockGrid:
    mask = masks.document(lengths=lengths)
    return build_block_grid(mask & masks.causal() if causal else mask, sum(lengths))


def received(grid: BlockGrid, layout: Layout) -> int:
    return int(rows_needed([grid], layout).counts(layout.ranks).max())


def imbalance(grid: BlockGrid, layout: Layout) -> float:
    areas = area_per_rank([grid], layout).double()
    return float(areas.max() / areas.mean())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("seed", range(6))
def test_no_more_is_received_than_with_fixed_chunks(of_benchmarks, seed, causal):
    grid = grid_of(pack(seed), causal=causal)
    layout = balanced([grid], RANKS)
    assert imbalance(grid, layout) <= 1.02
    chunks = of_benchmarks("chunks").greedy_chunks(grid, RANKS)
    assert received(grid, layout) <= received(grid, chunks)


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_receives_no_more_than_its_longest_document_and_a_share_besides(seed):
    lengths = pack(seed)
    grid = grid_of(lengths, causal=True)
    assert received(grid, balanced([grid], RANKS)) <= max(lengths) + LENGTH // RANKS


@pytest.mark.parametrize("seed", [14, 15, 28])
def test_a_long_document_makes_up_for_short_ones_that_stay_whole(of_benchmarks, seed):
    """Short ones between which work was to be even were cut into dust, besides its rows."""
    tokens, ranks = 1 << 19, 32
    lengths = of_benchmarks("documents").packed_document_lengths(tokens, seed)
    grid = grid_of(lengths, causal=True)
    layout = balanced([grid], ranks)
    assert imbalance(grid, layout) <= 1.02
    assert received(grid, layout) <= 1.05 * max(lengths)


def test_two_documents_that_end_within_one_rank_are_not_both_fetched_by_it():
    """Dealt out in order, one rank would get the end of one and the start of the other."""
    lengths = [50_000, 39_000] + [500] * 84 + [72]
    grid = grid_of(lengths, causal=False)
    layout = balanced([grid], RANKS)
    assert imbalance(grid, layout) <= 1.02
    assert received(grid, layout) <= 1.05 * max(lengths)


@pytest.mark.parametrize(("seed", "most"), [(28, 47_000), (30, 64_000)])
def test_rows_are_exchanged_where_dealing_out_with_little_to_receive_left_work_uneven(seed, most):
    """Dealt out evenly at once, a rank would receive 55,000 rows of one pack, 84,000 of another."""
    grid = grid_of(pack(seed), causal=True)
    layout = balanced([grid], RANKS)
    assert imbalance(grid, layout) <= 1.02
    assert received(grid, layout) <= most


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=30),
    st.integers(1, 9),
    st.sampled_from([16, 64]),
    st.booleans(),
)
def test_any_pack_is_dealt_out_once_in_even_parts_and_always_the_same(
    lengths, ranks, block, causal
):
    total = sum(lengths)
    mask = masks.document(lengths=lengths)
    grid = build_block_grid(mask & masks.causal() if causal else mask, total, block_size=block)
    layout = balanced([grid], ranks)
    rows = torch.cat([layout.positions(rank) for rank in range(ranks)])
    assert torch.equal(rows.sort().values, torch.arange(total))
    assert int(layout.counts.max()) - int(layout.counts.min()) <= block
    assert balanced([grid], ranks).fingerprint() == layout.fingerprint()


@pytest.mark.parametrize(("seed", "causal"), [(2, True), (5, False), (8, False), (11, False)])
def test_long_documents_have_ranks_of_their_own_where_light_ones_make_work_even(
    of_benchmarks, seed, causal
):
    """A rank with parts of two receives both."""
    lengths = of_benchmarks("documents").packed_document_lengths(1 << 19, seed=seed)
    grid = grid_of(lengths, causal=causal)
    assert received(grid, balanced([grid], 32)) <= 1.06 * max(lengths)


@pytest.mark.parametrize(("kind", "seed"), [("log-normal 7.5, 1.2", 30), ("exponential 3,000", 48)])
def test_documents_stay_whole_between_rows_of_one_that_all_ranks_have(of_benchmarks, kind, seed):
    """Cut where a rank's share ends, others are received besides the long one."""
    lengths = of_benchmarks("planning_packs").pack(kind, LENGTH, seed)
    grid = grid_of(lengths, causal=False)
    layout = balanced([grid], 8, pairs_per_row=80_000.0)
    assert imbalance(grid, layout) <= 1.02
    assert received(grid, layout) <= 1.05 * max(lengths)
