"""Layouts: runs, positions, shards, and the errors of layouts that don't fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flexcp import FlexCPError, build_block_grid, masks
from flexcp.layout import (
    Layout,
    balanced,
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
        (lambda: Layout.of_runs([[(0, 4.5)], [(4.5, 8)]]), "pairs of integers for each rank"),
        (lambda: Layout.of_runs([[(False, True)], [(True, 2)]]), "pairs of integers for each rank"),
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
        (lambda: striped(8, 2, stripe=0), "stripe to be an integer of at least 1"),
        (lambda: contiguous(-1, 2), "seq_len to be an integer of at least 0"),
        (lambda: per_document_head_tail([3, -1], 2), "a length to be an integer of at least 0"),
        (lambda: ptrr(torch.ones(3), 8, 2, block_size=2), "each of 4 blocks of 2 rows"),
        (lambda: ptrr(torch.ones(4), 8, 2, block_size=0), "block_size to be an integer"),
        (lambda: balanced([], 2), "one or several block grids"),
        (lambda: Layout.of_runs([]), "at least 1 rank"),
        (lambda: Layout.stacked([]), "a layout for each batch element"),
        (
            lambda: Layout("own", 4, 2, 1, *torch.tensor([[1, 0], [0, 2], [2, 4]])),
            r"runs sorted by rank, got owners \[1, 0\]",
        ),
    ],
)
def test_layouts_that_do_not_fit_say_so(make, words):
    with pytest.raises(FlexCPError, match=words):
        make()


def test_unshard_is_the_name_and_restore_another():
    layout = head_tail(21, 4)
    x = torch.randn(21)
    parts = [layout.shard(x, 0, r) for r in range(4)]
    assert torch.equal(layout.unshard(parts, 0), x)
    assert torch.equal(layout.restore(parts, 0), x)


def parts_of(*shapes):
    return [torch.zeros(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("parts", "dim", "words"),
    [
        (parts_of(4), 0, "parts of all 3 ranks, got 1"),
        (parts_of(3, 3, 4, 1), 0, "parts of all 3 ranks, got 4"),
        ([], 0, "parts of all 3 ranks, got 0"),
        (parts_of(3, 4, 3), 0, "3 along dim 0, the tokens of rank 1"),
        (parts_of((2, 3), (2, 3), (2, 4)), 0, "3 along dim 0, the tokens of rank 0"),
        (parts_of((2, 3), (2, 3), (2, 4)), 2, "3 along dim 2, the tokens of rank 0"),
        (parts_of((2, 3), (3, 3), (2, 4)), 1, r"\(2, 3\) of rank 0 and \(3, 3\) of rank 1"),
        (parts_of((2, 3), (1, 2, 3), (2, 4)), -1, r"\(2, 3\) of rank 0 and \(1, 2, 3\) of rank 1"),
    ],
)
def test_parts_that_are_not_those_of_all_ranks_are_refused(parts, dim, words):
    for name in ("unshard", "restore"):
        with pytest.raises(FlexCPError, match=words):
            getattr(contiguous(10, 3), name)(parts, dim)


POLICIES = {
    "contiguous": lambda ranks: contiguous(8, ranks),
    "head_tail": lambda ranks: head_tail(8, ranks),
    "striped": lambda ranks: striped(8, ranks, stripe=2),
    "per_document": lambda ranks: per_document_head_tail([5, 3], ranks),
    "ptrr": lambda ranks: ptrr(torch.ones(4), 8, ranks, block_size=2),
    "balanced": lambda ranks: balanced([build_block_grid(masks.causal(), 8)], ranks),
}


@pytest.mark.parametrize("ranks", [0, -2, True, 2.0, "2", None])
@pytest.mark.parametrize("name", POLICIES)
def test_no_ranks_are_refused(name, ranks):
    with pytest.raises(FlexCPError, match=r"ranks to be an integer of at least 1.*world size of 1"):
        POLICIES[name](ranks)


@pytest.mark.parametrize("name", POLICIES)
def test_integers_of_numpy_are_integers(name):
    assert POLICIES[name](np.int32(2)) == POLICIES[name](2)


def test_a_short_last_block_does_not_change_token_counts_where_they_are_to_be_exact():
    light, heavy = torch.tensor([3, 2, 1, 0]), torch.tensor([1, 2, 3, 4])
    first, second = (ptrr(x, 7, 2, block_size=2, exact_counts=True) for x in (light, heavy))
    assert first.counts.tolist() == second.counts.tolist() == [3, 4]
    assert Layout.stacked([first, second]).batch_elements == 2
    assert ptrr(heavy, 7, 2, block_size=2).positions(0).tolist() == [0, 1, 6]
