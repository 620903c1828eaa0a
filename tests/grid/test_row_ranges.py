"""Row ranges: what each query sees as a few ranges of keys, read off the mask's comparisons."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp import BlockGrid, Mask, build_block_grid, masks
from flexcp.grid.row_areas import row_areas
from flexcp.grid.row_ranges import row_ranges
from flexcp.layout import Layout, area_per_rank, rows_needed
from flexcp.layout.work import Work

LENGTH = 300
HEAVY = torch.zeros(LENGTH, dtype=torch.bool)
HEAVY[[3, 77, 250]] = True
SLOPES = torch.tensor([5, 50])
UNSORTED = torch.tensor([5] * 100 + [2] * 50 + [9] * 150)

KNOWN = {
    "causal": masks.causal(),
    "full": masks.full(),
    "nothing": masks.causal() & ~masks.causal(),
    "window": masks.sliding_window(30, 7),
    "prefix per element": masks.prefix_lm(torch.tensor([40, 130])),
    "documents": masks.document(lengths=[100, 60, 1, 139]),
    "documents per element": masks.document(lengths=[[200, 100], [50, 250]]) & masks.causal(),
    "documents in no order": masks.causal() & masks.document(UNSORTED),
    "chunks": masks.chunked(90),
    "block-causal": masks.block_causal(64),
    "global tokens": masks.global_tokens(5) | (masks.sliding_window(20) & masks.causal()),
    "shared prefix": masks.shared_prefix(60, [80, 80, 80]),
    "not causal": ~masks.causal(),
    "all but itself": Mask(lambda b, h, q, kv: q != kv),
    "heads": masks.causal() & (lambda b, h, q, kv: q - kv <= SLOPES[h]),
    "heavy rows": (masks.causal() & masks.sliding_window(9)) | (lambda b, h, q, kv: HEAVY[q]),
    "falling keys": Mask(lambda b, h, q, kv: LENGTH - 1 - q > LENGTH - 50 - kv),
}
UNKNOWN = {
    "ids that come again": masks.document(torch.arange(LENGTH) % 7),
    "floating point": Mask(lambda b, h, q, kv: q * 0.5 >= kv),
    "a product": Mask(lambda b, h, q, kv: q * kv < 500),
}


def by_tiles(grid: BlockGrid) -> BlockGrid:
    """The same grid, of which nothing but its tiles is believed."""
    return BlockGrid(grid.q_len, grid.kv_len, grid.block_size, grid.planes, grid.runs, grid.mask)


def dense(grid: BlockGrid, plane: int) -> torch.Tensor:
    q, kv = torch.arange(grid.q_len)[:, None], torch.arange(grid.kv_len)[None]
    found = grid.mask.mask_mod(grid.planes.b[plane], grid.planes.h[plane], q, kv)
    return found.expand(grid.q_len, grid.kv_len)


@pytest.mark.parametrize("name", KNOWN)
def test_ranges_are_what_the_mask_allows_pair_by_pair(name):
    grid = build_block_grid(KNOWN[name], LENGTH, block_size=64, batch=2, heads=2)
    planes = row_ranges(grid).planes
    assert planes is not None
    keys = torch.arange(LENGTH)
    for plane, columns in enumerate(planes):
        times = torch.zeros(LENGTH, LENGTH, dtype=torch.int64)
        for column in columns:
            times += (column.start[:, None] <= keys) & (keys < column.stop[:, None])
        assert torch.equal(times, dense(grid, plane).to(torch.int64))
    areas = row_areas(grid).planes
    assert areas is not None
    assert int(areas[grid.planes.of.reshape(-1)].sum()) == grid.area()


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_masks_have_none(name):
    grid = build_block_grid(UNKNOWN[name], LENGTH, block_size=64)
    assert row_ranges(grid).planes is None


def test_tiles_that_may_overrule_the_mask_are_believed():
    grid = build_block_grid(masks.causal(), LENGTH, block_size=64)
    assert row_ranges(by_tiles(grid)).planes is None


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(KNOWN)), st.data())
def test_needs_and_areas_are_those_that_the_tiles_show(name, data):
    grid = build_block_grid(KNOWN[name], LENGTH, block_size=64, batch=2, heads=2)
    owner = data.draw(st.lists(st.integers(0, 3), min_size=12, max_size=12))
    edges = [0, *sorted(data.draw(st.sets(st.integers(1, LENGTH - 1), min_size=11, max_size=11)))]
    runs: list[list[tuple[int, int]]] = [[] for _ in range(4)]
    for rank, start, stop in zip(owner, edges, [*edges[1:], LENGTH], strict=True):
        runs[rank].append((start, stop))
    layout = Layout.of_runs(runs, seq_len=LENGTH)
    ours, theirs = (rows_needed([g], layout) for g in (grid, by_tiles(grid)))
    assert [ours.of(r) for r in range(4)] == [theirs.of(r) for r in range(4)]
    assert torch.equal(area_per_rank([grid], layout), area_per_rank([by_tiles(grid)], layout))


@pytest.mark.parametrize("name", ["documents", "chunks", "causal", "window", "global tokens"])
def test_documents_begin_where_nothing_crosses(name):
    grid = build_block_grid(KNOWN[name], LENGTH, block_size=64)
    seen = dense(grid, 0)
    seams = [
        t for t in range(1, LENGTH) if not bool(seen[t:, :t].any()) and not bool(seen[:t, t:].any())
    ]
    assert Work.of([grid]).seams.tolist() == seams


def test_a_set_of_thousands_of_masks_one_inside_the_other_has_row_ranges():
    mask = masks.causal()
    for _ in range(2000):
        mask = mask & masks.causal()
    (column,) = row_ranges(build_block_grid(mask, 40)).planes[0]
    assert torch.equal(column.stop, torch.arange(1, 41))
