"""Layouts: runs, positions, shards, and the errors of layouts that don't fit."""

from __future__ import annotations

import pytest
import torch

from flexcp import FlexCPError
from flexcp.layout import (
    Layout,
    contiguous,
    head_tail,
    per_document_head_tail,
    ptrr,
    striped,
)


def every_policy(length: int, ranks: int) -> list[Layout]:
    areas = torch.arange(-(-length // 16))
    return [
        contiguous(length, ranks),
        head_tail(length, ranks),
        striped(length, ranks, stripe=5),
        per_document_head_tail([length // 3, 0, length - length // 3], ranks),
        ptrr(areas, length, ranks, block_size=16),
    ]


@pytest.mark.parametrize(("length", "ranks"), [(1, 1), (7, 3), (100, 8), (257, 5), (3, 9)])
def test_every_policy_holds_every_position_once(length, ranks):
    for layout in every_policy(length, ranks):
        positions = torch.cat([layout.positions(r) for r in range(ranks)])
        assert torch.equal(positions.sort().values, torch.arange(length))
        assert int(layout.counts.sum()) == length


@pytest.mark.parametrize("lengths", [[8, 3], [1, 1, 1], [100, 7, 13, 64], [5], [0, 9, 0]])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_per_document_layouts_are_even_for_any_document_length(lengths, ranks):
    layout = per_document_head_tail(lengths, ranks)
    assert int(layout.counts.max()) - int(layout.counts.min()) <= 1


def test_per_document_layouts_are_head_tail_in_each_document_that_divides():
    layout = per_document_head_tail([8, 16], 2)
    assert layout.positions(0).tolist() == [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23]


def test_more_ranks_than_tokens_leaves_ranks_without():
    layout = contiguous(3, 8)
    assert int(layout.counts.sum()) == 3
    assert sum(layout.positions(r).numel() == 0 for r in range(8)) == 5


def test_shard_and_restore_are_differentiable_inverses():
    layout = head_tail(21, 4)
    x = torch.randn(2, 21, 3, requires_grad=True)
    parts = [layout.shard(x, -2, rank=r) for r in range(4)]
    restored = layout.restore(parts, 1)
    assert torch.equal(restored, x)
    weight = torch.randn_like(x)
    (restored * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_a_layout_per_batch_element_shards_each_by_its_own():
    layout = Layout.stacked([contiguous(6, 2), striped(6, 2, stripe=1)])
    x = torch.arange(12).view(2, 6)
    assert layout.shard(x, 1, rank=0).tolist() == [[0, 1, 2], [6, 8, 10]]
    parts = [layout.shard(x, 1, rank=r) for r in range(2)]
    assert torch.equal(layout.restore(parts, 1), x)
    heads_first = x.T[None].float()
    parts = [layout.shard(heads_first, 1, rank=r, batch_dim=2) for r in range(2)]
    assert torch.equal(layout.restore(parts, 1, batch_dim=2), heads_first)


def test_layouts_keep_the_order_in_which_a_rank_stores_its_tokens():
    layout = Layout.of_positions([torch.tensor([3, 2, 0]), torch.tensor([1, 4])])
    assert layout.positions(0).tolist() == [3, 2, 0]
    assert layout != Layout.of_positions([torch.tensor([0, 2, 3]), torch.tensor([1, 4])])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout.of_runs([[(0, 4)], [(3, 8)]]), "each of 8 rows once"),
        (lambda: Layout.of_runs([[(0, 4)], [(5, 8)]]), "each of 8 rows once"),
        (lambda: Layout.of_runs([[(0, 4)]], seq_len=6), "each of 6 rows once"),
        (lambda: contiguous(8, 2).positions(2), "rank between 0 and 1"),
        (lambda: contiguous(8, 2).shard(torch.zeros(9), 0, rank=0), "8 along dim 0"),
        (lambda: contiguous(8, 2).shard(torch.zeros(8), 1, rank=0), "8 along dim 1"),
        (lambda: Layout.stacked([contiguous(8, 2), contiguous(9, 2)]), "same length"),
        (
            lambda: Layout.stacked([contiguous(4, 2), Layout.of_runs([[(0, 1)], [(1, 4)]])]),
            "as many tokens of each batch element",
        ),
        (
            lambda: Layout.stacked([contiguous(4, 2)] * 2).shard(torch.zeros(3, 4), 1, rank=0),
            "2 batch elements along dim 0",
        ),
        (lambda: striped(8, 2, stripe=0), "at least 1 token"),
    ],
)
def test_layouts_that_do_not_fit_say_so(make, words):
    with pytest.raises(FlexCPError, match=words):
        make()
