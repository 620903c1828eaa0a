"""The packs of documents on which a fixed-chunk planner publishes what its ranks receive."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flexcp import build_block_grid, masks
from flexcp.layout import area_per_rank, balanced, rows_needed

PACKS = 3


@pytest.fixture(scope="module")
def packs(of_benchmarks) -> Callable[[int, int], list[list[int]]]:
    return of_benchmarks("documents").published_packs


@pytest.mark.parametrize(
    ("causal", "tokens", "ranks", "published"),
    [
        (True, 1 << 17, 32, 0.40),
        (True, 1 << 19, 32, 0.125),
        (True, 1 << 20, 64, 0.112),
        (False, 1 << 19, 32, 0.22),
        (False, 1 << 20, 64, 0.20),
    ],
)
def test_less_is_received_than_published_and_work_is_even(packs, causal, tokens, ranks, published):
    shares = []
    for lengths in packs(tokens, PACKS):
        documents = masks.document(lengths=lengths)
        grid = build_block_grid(documents & masks.causal() if causal else documents, tokens)
        layout = balanced([grid], ranks)
        areas = area_per_rank([grid], layout).double()
        assert float(areas.max() / areas.mean()) <= 1.02
        received = float(rows_needed([grid], layout).counts(ranks).max())
        shares.append(received / (tokens - tokens // ranks))
    assert sum(shares) / PACKS <= 0.8 * published
