"""Grids equal the dense evaluation of their mask by torch, tile for tile and pair for pair."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import flexcp
from flexcp.testing.strategies import mask_trees


def dense_kinds(dense: torch.Tensor, block_size: tuple[int, int]) -> torch.Tensor:
    """int8 [B, H, rows, cols] by looking at every pair."""
    rows = [
        [
            2 * tile.flatten(2).all(-1).to(torch.int8)
            + (tile.flatten(2).any(-1) & ~tile.flatten(2).all(-1)).to(torch.int8)
            for tile in band.split(block_size[1], dim=3)
        ]
        for band in dense.split(block_size[0], dim=2)
    ]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


@st.composite
def cases(draw):
    q_len, kv_len = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    block_size = (draw(st.integers(1, 40)), draw(st.integers(1, 40)))
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    mask = draw(mask_trees(max(q_len, kv_len), batch=batch, heads=heads))
    return mask, q_len, kv_len, block_size, batch, heads


@given(cases(), st.booleans())
@settings(max_examples=350, deadline=None)
def test_every_generated_mask_has_the_kinds_and_areas_of_its_dense_evaluation(case, tight):
    mask, q_len, kv_len, block_size, batch, heads = case
    dense = create_mask(mask.mask_mod, batch, heads, q_len, kv_len, device="cpu")
    dense = dense.expand(batch, heads, q_len, kv_len)
    # With tight limits the search starts from one rectangle and is cut into parts on the way, as
    # it would be for a mask that is too large for memory.
    limits = {"_FIRST_RECTANGLES": 1, "_MOST_RECTANGLES": 16, "MOST_PAIRS": 64}
    with mock.patch.multiple("flexcp.grid.analysis.descent", **limits) if tight else nullcontext():
        grid = flexcp.build_block_grid(
            mask, q_len, kv_len, block_size=block_size, batch=batch, heads=heads
        )
    assert torch.equal(grid.to_dense(), dense_kinds(dense, block_size))
    assert grid.area() == int(dense.sum())
    bands = dense.sum(3).split(block_size[0], dim=2)
    assert torch.equal(grid.row_areas(), torch.stack([band.sum(2) for band in bands], dim=2))


@given(cases())
@settings(max_examples=80, deadline=None)
def test_every_generated_mask_gives_the_block_mask_that_torch_makes(case):
    mask, q_len, kv_len, block_size, batch, heads = case
    theirs = create_block_mask(
        mask.mask_mod, batch, heads, q_len, kv_len, device="cpu", BLOCK_SIZE=block_size
    )
    grid = flexcp.build_block_grid(
        mask, q_len, kv_len, block_size=block_size, batch=batch, heads=heads
    )
    ours = grid.to_block_mask()
    for a, b in zip(ours.as_tuple(), theirs.as_tuple(), strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        elif not callable(a):
            assert a == b
    again = flexcp.BlockGrid.from_block_mask(theirs).to_block_mask()
    for a, b in zip(again.as_tuple(), theirs.as_tuple(), strict=True):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b)


@given(cases(), st.data())
@settings(max_examples=80, deadline=None)
def test_transposing_and_slicing_agree_with_the_dense_matrix(case, data):
    mask, q_len, kv_len, block_size, batch, heads = case
    grid = flexcp.build_block_grid(
        mask, q_len, kv_len, block_size=block_size, batch=batch, heads=heads
    )
    dense = grid.to_dense()
    assert torch.equal(grid.transposed().to_dense(), dense.transpose(2, 3))
    assert grid.transposed().transposed() == grid
    assert grid.transposed().area() == grid.area()
    spans = []
    for size in grid.shape:
        start = data.draw(st.integers(0, size - 1))
        spans.append(range(start, data.draw(st.integers(start + 1, size))))
    part = grid.window(*spans)
    rows, cols = (slice(s.start, s.stop) for s in spans)
    assert torch.equal(part.to_dense(), dense[:, :, rows, cols])
    pairs = create_mask(mask.mask_mod, batch, heads, q_len, kv_len, device="cpu")
    pairs = pairs.expand(batch, heads, q_len, kv_len)
    inside = pairs[
        :,
        :,
        spans[0].start * block_size[0] : spans[0].stop * block_size[0],
        spans[1].start * block_size[1] : spans[1].stop * block_size[1],
    ]
    assert part.area() == int(inside.sum())
