"""Packs that nothing was tuned on: work is even, short documents stay whole, nodes keep theirs."""

from __future__ import annotations

import math
import random

import pytest
import torch

from flexcp import build_block_grid, make_plan, masks
from flexcp.layout import Layout, area_per_rank, balanced, rows_needed
from flexcp.layout.balance.deal import Deal

LENGTH, RANKS = 1 << 16, 16
KINDS = {
    "uniform": lambda draw: draw.uniform(20, 1500),
    "exponential": lambda draw: draw.expovariate(1 / 400),
    "log-normal": lambda draw: draw.lognormvariate(5.5, 1.2),
    "two-peaked": lambda draw: draw.gauss(200, 50) if draw.random() < 0.9 else draw.gauss(6e3, 1e3),
    "Pareto": lambda draw: 40 * draw.paretovariate(1.1),
}


def pack(kind: str, seed: int) -> list[int]:
    draw, lengths, left = random.Random(f"{kind} {seed}"), [], LENGTH
    while left:
        lengths.append(min(left, max(1, round(KINDS[kind](draw)))))
        left -= lengths[-1]
    return lengths


def grid_of(lengths: list[int], *, causal: bool):
    mask = masks.document(lengths=lengths)
    return build_block_grid(mask & masks.causal() if causal else mask, sum(lengths))


def imbalance(grid, layout: Layout) -> float:
    areas = area_per_rank([grid], layout).double()
    return float(areas.max() / areas.mean())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_work_is_even_whatever_the_lengths(kind, causal, seed):
    grid = grid_of(pack(kind, seed), causal=causal)
    layout = balanced([grid], RANKS)
    assert imbalance(grid, layout) <= 1.02
    assert int(layout.counts.max()) - int(layout.counts.min()) <= 128


def test_no_trade_is_made_twice_where_even_work_and_the_price_disagree(monkeypatch):
    """What one aim gives, the other takes back: the search would go in circles up to its limit."""
    lengths = [16026, 542, 510, 421, 663, 376, 660, 14803, 383, 451, 555, 18231, 582, 474, 10859]
    trades, swap = [], Deal.swap

    def noted(deal, giver, taker, given, back):
        trades.append((giver.rank, taker.rank, given, back))
        swap(deal, giver, taker, given, back)

    monkeypatch.setattr(Deal, "swap", noted)
    balanced([grid_of(lengths, causal=False)], 8, pairs_per_row=100.0)
    assert trades
    assert len(set(trades)) == len(trades)


@pytest.mark.parametrize("kind", ["uniform", "exponential"])
def test_documents_that_fit_a_rank_hardly_move(kind):
    """One document in a hundred may be cut, to make counts and work even."""
    grid = grid_of(pack(kind, 0), causal=True)
    rows = rows_needed([grid], balanced([grid], RANKS, pairs_per_row=2500.0)).counts(RANKS)
    assert int(rows.sum()) <= 0.15 * LENGTH


@pytest.mark.parametrize(("causal", "times"), [(True, 0.65), (False, 0.9)], ids=["causal", "full"])
def test_documents_stay_whole_where_parts_of_longer_ones_make_work_even(causal, times):
    """Three are too long for a rank; two of half a rank's rows fit beside parts of them."""
    tokens, draw, lengths = 1 << 17, random.Random("exponential 3,000 101"), []
    while sum(lengths) < tokens:
        lengths.append(min(tokens - sum(lengths), max(1, round(draw.expovariate(1 / 3000)))))
    mask = masks.document(lengths=lengths)
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    plan = make_plan(mask & masks.causal() if causal else mask, tokens, 8, **heads)
    assert plan.stats().imbalance <= 1.02
    assert sum(plan.stats().tokens_received_per_rank) <= times * tokens


@pytest.mark.parametrize("seed", range(2))
def test_documents_are_not_mixed_where_they_are_cheaper_once_their_work_is_even(seed):
    """Whole documents begin uneven, and dear by that; the two-ended mix is even from the start."""
    draw, lengths, left = random.Random(seed), [], LENGTH
    while left:
        length = draw.gauss(50, 12) if draw.random() < 0.8 else draw.gauss(625, 156)
        lengths.append(min(left, max(1, round(length))))
        left -= lengths[-1]
    grid = grid_of(lengths, causal=True)
    layout = balanced([grid], 64, pairs_per_row=35.0)
    assert imbalance(grid, layout) <= 1.02
    assert int(rows_needed([grid], layout).counts(64).sum()) <= 0.65 * LENGTH


def test_no_rank_receives_two_long_documents_where_work_can_be_even_without_that():
    """Either is cheap to receive; only memory is short."""
    draw = random.Random(6)
    lengths = [round(draw.uniform(7e4, 1e5)) for _ in range(3)]
    while sum(lengths) < 1 << 19:
        length = round(draw.expovariate(1 / 1500)) + 1
        lengths.append(min((1 << 19) - sum(lengths), length))
    grid = grid_of(lengths, causal=False)
    layout = balanced([grid], 32)
    assert imbalance(grid, layout) <= 1.02
    assert int(rows_needed([grid], layout).counts(32).max()) <= 1.1 * max(lengths)


def test_nothing_moves_where_a_first_row_costs_more_than_even_work_gains():
    lengths = [540, 436, 370, 1123, 1135, 594, 791, 1117, 906, 490, 766, 483, 592, 1072, 949, 981]
    grid = grid_of(lengths, causal=False)
    moved = [
        int(rows_needed([grid], layout).counts(4).sum())
        for layout in (
            balanced([grid], 4, pairs_per_row=1.0),
            balanced([grid], 4, pairs_per_row=1.0, pairs_per_round=1e6),
        )
    ]
    assert moved[0] > 0
    assert moved[1] == 0


@pytest.mark.parametrize(
    ("lengths", "ranks"),
    [([4096] * 16, 16), ([1000] * 128, 16), ([64] * 512, 8), ([1] * 4096, 4)],
    ids=["the share", "equal", "small", "single tokens"],
)
def test_documents_that_divide_evenly_stay_where_they_are(lengths, ranks):
    grid = grid_of(lengths, causal=True)
    assert int(rows_needed([grid], balanced([grid], ranks)).counts(ranks).max()) == 0


def test_ranks_that_share_a_document_are_on_one_node():
    lengths = [6000, 500, 6000, 300, 6000, 6000] * 4
    grid = grid_of(lengths, causal=True)
    layout = balanced([grid], 32, ranks_per_node=4)
    node = torch.arange(32) // 4
    needs = rows_needed([grid], layout)
    start, _, owner = layout.by_row
    far = near = 0
    for rank, first, last in zip(needs.rank, needs.start, needs.stop, strict=True):
        at = torch.searchsorted(start, first, right=True) - 1
        apart = bool(node[owner[at]] != node[rank])
        far, near = far + int(last - first) * apart, near + int(last - first) * (not apart)
    assert far < near


def test_a_document_of_more_ranks_than_a_node_leaves_none_of_them_alone():
    """A rank that shares it with no other of its node receives all of it from other nodes."""
    lengths = [9 * 1024, 7 * 1024]
    grid = grid_of(lengths, causal=False)
    layout = balanced([grid], 16, token_slack=0.9, ranks_per_node=8)
    sharers = layout.rank[layout.start < lengths[0]].unique()
    assert 8 < sharers.numel() < 12
    assert int(torch.bincount(sharers // 8, minlength=2).min()) >= 4


@pytest.mark.parametrize(
    ("kind", "seed"), [("log-normal 7.5, 1.2", 4015), ("two-peaked", 3007)], ids=str
)
def test_a_rank_with_less_work_does_not_receive_more_for_it(of_benchmarks, kind, seed):
    """Where only the slowest rank counted, one with some time left received a fifth more."""
    packs = of_benchmarks("planning_packs")
    assert packs.short_of(packs.compared(kind, 1 << 17, 8, seed, causal=False)) == []


def test_the_rest_of_the_model_is_balanced_with_attention():
    lengths, flops = pack("log-normal", 1), 4e6
    mask = masks.document(lengths=lengths) & masks.causal()
    options = {"num_heads": 4, "head_dim": 64, "flops_per_token": flops, "token_slack": 0.5}
    plan = make_plan(mask, LENGTH, 8, **options)
    plan.check()
    counts = plan.layout.counts
    assert int(counts.max()) <= 1.5 * LENGTH / 8 + 1
    areas = torch.tensor(plan.stats().area_per_rank, dtype=torch.float64)
    work = areas + counts * (flops / plan.shape.flops_per_pair)
    assert float(work.max() / work.mean()) <= 1.02


def test_token_counts_may_differ_as_far_as_they_are_allowed_to():
    lengths = [4000] * 4 + [1000] * 48
    mask = masks.document(lengths=lengths) & masks.causal()
    for ranks in (7, 8):
        for slack in (0.0, 0.1, 0.4):
            mean = sum(lengths) / ranks
            counts = make_plan(mask, sum(lengths), ranks, token_slack=slack).layout.counts
            assert min(math.floor(mean), mean * (1 - slack)) <= int(counts.min())
            assert int(counts.max()) <= max(math.ceil(mean), mean * (1 + slack))
