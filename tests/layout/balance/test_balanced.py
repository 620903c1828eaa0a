"""The balanced layout: even work, even token counts, little traffic."""

from __future__ import annotations

import random

import pytest
import torch

from flexcp import build_block_grid, masks
from flexcp.layout import area_per_rank, balanced, rows_needed
from flexcp.layout.work import Work

LENGTH = 1 << 16


def documents(seed: int) -> list[int]:
    """Many short documents and a few that hold most of the work."""
    draw = random.Random(seed)
    lengths, left = [], LENGTH
    while left:
        lengths.append(min(left, int(draw.choice([50, 300, 900, 2500, 20000]) * draw.random()) + 1))
        left -= lengths[-1]
    return lengths


CASES = {
    "causal": masks.causal(),
    "full": masks.full(),
    "window": masks.causal() & masks.sliding_window(700),
    "documents, causal": masks.document(lengths=documents(0)) & masks.causal(),
    "documents": masks.document(lengths=documents(1)),
    "prefix": masks.prefix_lm(LENGTH // 3),
    "block-causal": masks.block_causal(1000),
    "shared prefix": masks.shared_prefix(LENGTH // 8, [LENGTH // 16] * 14),
    "window and global tokens": (masks.causal() & masks.sliding_window(700))
    | masks.global_tokens(40),
    "documents and a global block": (masks.document(lengths=documents(2)) & masks.causal())
    | masks.global_tokens(512),
}


def imbalance(grids, layout):
    areas = area_per_rank(grids, layout).double()
    return float(areas.max() / areas.mean())


@pytest.mark.parametrize("ranks", [8, 13, 32])
@pytest.mark.parametrize("name", CASES)
def test_work_is_even_to_two_percent(name, ranks):
    grid = build_block_grid(CASES[name], LENGTH)
    layout = balanced([grid], ranks)
    assert imbalance([grid], layout) <= 1.02
    assert int(layout.counts.max()) - int(layout.counts.min()) <= 128


def test_causal_is_the_exact_zigzag():
    grid = build_block_grid(masks.causal(), LENGTH)
    layout = balanced([grid], 16)
    assert imbalance([grid], layout) == 1.0
    received = rows_needed([grid], layout).counts(16).double().mean()
    assert float(received) / (LENGTH * 15 / 16) <= 0.76


@pytest.mark.parametrize("window", [100, 700, 2048])
def test_a_window_stays_a_halo_exchange(window):
    grid = build_block_grid(masks.causal() & masks.sliding_window(window), LENGTH)
    received = rows_needed([grid], balanced([grid], 16)).counts(16)
    assert int(received.max()) <= 1.25 * window


def test_chunks_that_fit_a_rank_need_nothing_from_others():
    grid = build_block_grid(masks.chunked(2048) & masks.causal(), LENGTH)
    layout = balanced([grid], 16)
    assert int(rows_needed([grid], layout).counts(16).max()) == 0


def test_a_rank_receives_little_more_than_one_long_document():
    lengths = documents(0)
    grid = build_block_grid(masks.document(lengths=lengths) & masks.causal(), LENGTH)
    received = rows_needed([grid], balanced([grid], 16)).counts(16)
    assert int(received.max()) <= 1.25 * max(lengths)


@pytest.mark.parametrize("other", ["documents, causal", "window"])
def test_one_layout_is_even_for_the_sum_of_masks(other):
    grids = [build_block_grid(m, LENGTH) for m in (masks.causal(), CASES[other])]
    assert imbalance(grids, balanced(grids, 16)) <= 1.02


def test_batch_elements_with_other_documents_get_layouts_of_their_own():
    packs = [documents(3), documents(4)]
    grid = build_block_grid(masks.document(lengths=packs) & masks.causal(), LENGTH, batch=2)
    layout = balanced([grid], 8)
    assert layout.batch_elements == 2
    for b in range(2):
        areas = torch.zeros(8, dtype=torch.int64)
        inside = layout.start // LENGTH == b
        start, stop = layout.start[inside] - b * LENGTH, layout.stop[inside] - b * LENGTH
        areas.index_add_(0, layout.rank[inside], Work.of([grid], b).of_stretches(start, stop))
        assert float(areas.max()) / float(areas.double().mean()) <= 1.02


def test_heads_that_differ_share_one_layout():
    slopes = torch.tensor([64, 4096])
    mask = masks.causal() & (lambda b, h, q, kv: q - kv <= slopes[h])
    grid = build_block_grid(mask, LENGTH, heads=2)
    layout = balanced([grid], 8)
    assert layout.batch_elements == 1
    assert imbalance([grid], layout) <= 1.02


def test_a_mask_that_allows_nothing_still_gets_a_layout():
    grid = build_block_grid(masks.causal() & ~masks.causal(), 1000)
    assert int(balanced([grid], 7).counts.sum()) == 1000
