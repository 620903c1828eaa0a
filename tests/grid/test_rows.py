"""Areas of single rows, and neighbours that never see each other, against dense masks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from flexcp import build_block_grid, masks
from flexcp.grid.rows import token_areas, unlinked_neighbours
from flexcp.testing.strategies import mask_trees


@st.composite
def cases(draw):
    length = draw(st.integers(1, 80))
    heads = draw(st.integers(1, 2))
    mask = draw(mask_trees(length, batch=1, heads=heads))
    return mask, length, heads, draw(st.sampled_from([1, 3, 8, 16, 128]))


@given(cases(), st.data())
@settings(max_examples=100, deadline=None)
def test_areas_of_single_rows_are_those_of_the_dense_mask(case, data):
    mask, length, heads, block = case
    grid = build_block_grid(mask, length, block_size=block, heads=heads)
    rows = grid.shape[0]
    blocks = torch.tensor(sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1))))
    found = token_areas(grid, blocks)
    dense = create_mask(mask.mask_mod, 1, heads, length, length, device="cpu")
    expected = torch.zeros(heads, rows * block, dtype=torch.int64)
    expected[:, :length] = dense.expand(1, heads, length, length)[0].sum(2)
    by_head = found[grid.planes.of[0]]
    assert torch.equal(by_head, expected.view(heads, rows, block)[:, blocks])


@given(cases())
@settings(max_examples=50, deadline=None)
def test_neighbours_are_strangers_if_no_head_links_them(case):
    mask, length, heads, block = case
    grid = build_block_grid(mask, length, block_size=block, heads=heads)
    dense = create_mask(mask.mask_mod, 1, heads, length, length, device="cpu")[0].any(0)
    expected = [t for t in range(1, length) if not (dense[t, t - 1] or dense[t - 1, t])]
    assert unlinked_neighbours(grid).tolist() == expected


def test_documents_begin_where_neighbours_are_strangers():
    mask = masks.document(lengths=[30, 1, 50]) & masks.causal()
    assert unlinked_neighbours(build_block_grid(mask, 81)).tolist() == [30, 31]
