"""Batch elements with other documents: a layout for each, even in each, and honest bounds."""

from __future__ import annotations

import random

import pytest
import torch

from flexcp import build_block_grid, make_plan, masks
from flexcp.layout import Layout, area_per_rank, balanced, rows_needed
from flexcp.layout.work import Work
from flexcp.plan.imbalance_bound import imbalance_bound

LENGTH, RANKS = 20_011, 6


def pack(seed: int, *, length: int = LENGTH, most: int = 6000) -> list[int]:
    draw = random.Random(seed)
    lengths, left = [], length
    while left:
        lengths.append(min(left, draw.randint(most // 20, most)))
        left -= lengths[-1]
    return lengths


PACKS = [pack(1), pack(2), pack(3)]
DOCUMENTS = masks.document(lengths=PACKS) & masks.causal()


def layout_of_element(layout: Layout, element: int) -> Layout:
    """The assignment of one batch element."""
    at = layout.start // layout.seq_len == element
    first = element * layout.seq_len
    columns = (layout.rank[at], layout.start[at] - first, layout.stop[at] - first)
    return Layout(layout.name, layout.seq_len, layout.ranks, 1, *columns)


def element(mask_lengths: list[int]):
    mask = masks.document(lengths=mask_lengths) & masks.causal()
    return build_block_grid(mask, sum(mask_lengths))


@pytest.mark.parametrize(("layout", "most"), [("per_document", 1.01), ("ptrr", 1.05)])
def test_named_layouts_are_even_in_every_element(layout, most):
    plan = make_plan(DOCUMENTS, LENGTH, RANKS, layout=layout, schedule="exchange", batch=3)
    assert (plan.layout.batch_elements, plan.layout.name) == (3, layout)
    plan.check()
    for b, lengths in enumerate(PACKS):
        own = layout_of_element(plan.layout, b)
        areas = area_per_rank([element(lengths)], own).double()
        assert float(areas.max() / areas.mean()) <= most
    assert plan.stats().imbalance <= most


@pytest.mark.parametrize("layout", ["per_document", "ptrr"])
def test_an_element_has_the_layout_that_it_has_alone(layout):
    """Lengths are whole blocks here: elements deal out a short last one last."""
    packs = [[1024, 512, 2560], [256, 3840], [2048, 2048]]
    mask = masks.document(lengths=packs) & masks.causal()
    plan = make_plan(mask, 4096, 4, layout=layout, schedule="exchange", batch=3)
    for b, lengths in enumerate(packs):
        alone = make_plan(element(lengths), 4096, 4, layout=layout, schedule="exchange")
        assert layout_of_element(plan.layout, b) == alone.layout


@pytest.mark.parametrize("layout", ["per_document", "ptrr", "balanced"])
def test_elements_that_are_the_same_share_a_layout(layout):
    mask = masks.document(lengths=PACKS[0]) & masks.causal()
    plan = make_plan(mask, LENGTH, RANKS, layout=layout, schedule="exchange", batch=3)
    assert plan.layout.batch_elements == 1


def test_a_document_of_one_element_is_shared_by_few_ranks_whatever_the_others_are():
    """Documents are looked for in each element: those of the others have no ends in common."""
    grid = build_block_grid(DOCUMENTS, LENGTH, batch=3)
    received = rows_needed([grid], balanced([grid], RANKS)).counts(RANKS)
    alone = [element(lengths) for lengths in PACKS]
    least = sum(rows_needed([g], balanced([g], RANKS)).counts(RANKS).max() for g in alone)
    assert int(received.max()) <= 1.1 * int(least)


def test_no_bound_is_above_what_layouts_per_element_reach():
    """A rank may have the heavy row of one element, and another rank that of the other."""
    packs = [pack(seed, length=2048, most=20) for seed in (4, 5)]
    mask = (masks.document(lengths=packs) & masks.causal()) | masks.global_tokens(1)
    options = {"block_size": 16, "batch": 2}
    order = torch.arange(2048)
    apart = Layout.of_positions(
        [
            torch.stack(pair)
            for pair in zip(order.split(128), order.roll(-128).split(128), strict=True)
        ]
    )
    stats = make_plan(mask, 2048, 16, layout=apart, schedule="exchange", **options).stats()
    assert 1.05 < stats.imbalance_lower_bound <= stats.imbalance
    of_sum = imbalance_bound([Work.of([build_block_grid(mask, 2048, **options)])], 16)
    assert stats.imbalance < of_sum
    found = make_plan(mask, 2048, 16, **options).stats()
    assert found.imbalance_lower_bound == stats.imbalance_lower_bound
    assert found.imbalance_lower_bound <= found.imbalance


def test_one_layout_for_all_elements_has_the_bound_of_their_sum():
    mask = masks.sliding_window(1) | masks.global_tokens(1)
    one, two = (make_plan(mask, 4096, 64, block_size=16, batch=n).stats() for n in (1, 2))
    assert two.imbalance_lower_bound == pytest.approx(one.imbalance_lower_bound)
    works = [Work.of([build_block_grid(mask, 4096, block_size=16)])] * 2
    assert 1 < imbalance_bound(works, 64) < two.imbalance_lower_bound
