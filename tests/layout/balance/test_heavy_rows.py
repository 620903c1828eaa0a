"""A few rows that see everything: ranks that have one get fewer rows besides, and lighter ones."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from flexcp import BlockGrid, Mask, build_block_grid, masks
from flexcp.layout import Layout, area_per_rank, balanced, rows_needed
from flexcp.layout.work import Work
from flexcp.plan.imbalance_bound import imbalance_bound


def heavy_rows(count: int, window: int, *, causal: bool) -> Mask:
    near = masks.sliding_window(window, window)
    return masks.global_tokens(count) | (near & masks.causal() if causal else near)


def imbalance(grid: BlockGrid, layout: Layout) -> float:
    areas = area_per_rank([grid], layout).double()
    return float(areas.max() / areas.mean())


def assert_as_even_as_can_be(grid: BlockGrid, ranks: int) -> None:
    layout = balanced([grid], ranks)
    bound = imbalance_bound([Work.of([grid])], ranks)
    found = imbalance(grid, layout)
    assert bound * (1 - 1e-9) <= found <= max(1.02, 1.01 * bound)
    assert int(layout.counts.max()) - int(layout.counts.min()) <= grid.block_size[0]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both sides"])
@pytest.mark.parametrize(("window", "ranks"), [(256, 8), (300, 13), (1000, 32), (4096, 16)])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16, 64])
def test_work_is_as_even_as_counts_allow(count, window, ranks, causal):
    grid = build_block_grid(heavy_rows(count, window, causal=causal), (1 << 15) + 77)
    assert_as_even_as_can_be(grid, ranks)


@pytest.mark.parametrize("count", [2, 5])
def test_light_rows_of_a_long_sequence_are_shared_by_the_ranks_with_heavy_ones(count):
    grid = build_block_grid(heavy_rows(count, 1000, causal=True), 1 << 18)
    assert_as_even_as_can_be(grid, 64)
    assert imbalance(grid, balanced([grid], 64)) <= 1.01


def test_heavy_rows_in_other_places_are_made_up_for_as_well():
    heavy = torch.zeros(20_000, dtype=torch.bool)
    heavy[[777, 9_000, 9_001, 19_999]] = True
    near = masks.causal() & masks.sliding_window(500)
    grid = build_block_grid(near | (lambda b, h, q, kv: heavy[q]), 20_000)
    assert_as_even_as_can_be(grid, 12)


def test_documents_with_a_few_rows_that_see_everything_are_even():
    lengths = [3_000, 500, 9_000, 40, 7_000, 460, 12_000]
    grid = build_block_grid(
        (masks.document(lengths=lengths) & masks.causal()) | masks.global_tokens(3), 32_000
    )
    assert_as_even_as_can_be(grid, 24)


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_see_everything_stay_on_few_ranks_where_work_is_even_so(seed):
    """Dealt out to all ranks, they would make each receive nearly all rows."""
    draw, tokens, lengths = random.Random(seed), 1 << 16, []
    while sum(lengths) < tokens:
        length = draw.choice([512, 1024, 1536, 3072, 4096])
        lengths.append(min(tokens - sum(lengths), length))
    local = masks.document(lengths=lengths) & masks.block_causal(256)
    grid = build_block_grid(local | masks.global_tokens(128), tokens)
    layout = balanced([grid], 32)
    areas = area_per_rank([grid], layout).double()
    assert float(areas.max() / areas.mean()) <= 1.02
    assert int(rows_needed([grid], layout).counts(32).sum()) <= 0.3 * 32 * tokens


def test_elements_of_a_batch_keep_equal_counts():
    """Batch elements of one layout have the same counts, so rows can only be exchanged."""
    first = torch.tensor([2, 5])
    near = masks.causal() & masks.sliding_window(500)
    grid = build_block_grid(near | (lambda b, h, q, kv: q < first[b]), 16_000, batch=2)
    counts = balanced([grid], 7).counts
    assert int(counts.max()) - int(counts.min()) <= 1


def test_no_dealing_out_of_a_tiny_sequence_is_below_the_bound():
    """All of them are tried."""
    rows, ranks, block = 8, 3, 2
    heavy = torch.tensor([False, False, True, False, False, False, True, False])
    mask = (masks.causal() & masks.sliding_window(1)) | (lambda b, h, q, kv: heavy[q])
    grid = build_block_grid(mask, rows, block_size=block)
    work = Work.of([grid])
    areas = work.tokens(torch.arange(rows // block)).reshape(-1).tolist()
    best = float("inf")
    for owners in itertools.product(range(ranks), repeat=rows):
        counts = [owners.count(rank) for rank in range(ranks)]
        if max(counts) - min(counts) <= block:
            shares = [0] * ranks
            for owner, area in zip(owners, areas, strict=True):
                shares[owner] += area
            best = min(best, max(shares) * ranks / sum(areas))
    bound = imbalance_bound([work], ranks)
    assert 1.05 < bound <= best
