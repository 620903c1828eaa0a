"""A mask is looked at once for each size, and again if it has changed."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import flexcp
from flexcp import masks
from flexcp.ops import mask_cache
from flexcp.ops.mask_cache import as_grid, compiled_shapes_for

X = torch.randn(1, 2, 200, 8)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_equal_masks_made_apart_share_their_compiled_shapes():
    first, second = (masks.causal() & masks.document(lengths=[80, 120]) for _ in range(2))
    assert compiled_shapes_for(first, X, X) is compiled_shapes_for(second, X, X)


def test_a_plain_function_is_looked_at_in_every_call():
    limit = 5

    def few(b, h, q_idx, kv_idx):
        return kv_idx < limit

    before = as_grid(few, X, X).area()
    limit = 6
    assert (before, as_grid(few, X, X).area()) == (2 * 5 * 200, 2 * 6 * 200)


def test_a_block_mask_is_converted_once_and_again_where_it_has_changed():
    block_mask = create_block_mask(causal, None, None, 200, 200, device="cpu")
    grid = as_grid(block_mask, X, X)
    assert as_grid(block_mask, X, X) is grid
    assert not [name for name in vars(block_mask) if "flexcp" in name]
    block_mask.kv_num_blocks[0, 0, 1] = 0
    changed = as_grid(block_mask, X, X)
    assert changed is not grid
    assert changed.counts() != grid.counts()


@pytest.mark.parametrize("change", ["mask_mod", "kv_indices"])
def test_a_block_mask_with_another_field_is_converted_again(change):
    block_mask = create_block_mask(causal, None, None, 200, 200, device="cpu")
    grid = as_grid(block_mask, X, X)
    other = {
        "mask_mod": lambda b, h, q_idx, kv_idx: q_idx > kv_idx,
        "kv_indices": block_mask.kv_indices.clone(),
    }
    setattr(block_mask, change, other[change])
    assert as_grid(block_mask, X, X) is not grid


def test_block_masks_are_forgotten_when_they_are_gone_and_beyond_a_number(monkeypatch):
    gc.collect()
    mask_cache._block_masks.clear()
    monkeypatch.setattr(mask_cache, "_MOST_BLOCK_MASKS", 3)
    kept = [create_block_mask(causal, None, None, 200, 200, device="cpu") for _ in range(5)]
    grids = [as_grid(block_mask, X, X) for block_mask in kept]
    assert len(mask_cache._block_masks) == 3
    assert as_grid(kept[-1], X, X) is grids[-1]
    del kept
    gc.collect()
    assert len(mask_cache._block_masks) == 0


def test_a_mask_first_used_in_inference_mode_trains_afterwards():
    table = torch.randn(200, requires_grad=True)

    def biased(score, b, h, q_idx, kv_idx):
        return score + table[kv_idx]

    def attend():
        mask = masks.causal() & masks.chunked(77)
        return flexcp.flex_attention(X, X, X, score_mod=biased, block_mask=mask)

    with torch.inference_mode():
        expected = attend()
    out = attend()
    out.sum().backward()
    assert torch.equal(out, expected)
    assert table.grad is not None


def test_a_block_mask_of_inference_mode_that_was_changed_in_place_is_converted_again():
    with torch.inference_mode():
        block_mask = create_block_mask(causal, None, None, 200, 200, device="cpu")
        before = as_grid(block_mask, X, X).counts()
        block_mask.kv_num_blocks.zero_()
        assert as_grid(block_mask, X, X).counts() != before


def test_threads_convert_and_evict_block_masks_at_the_same_time(monkeypatch):
    monkeypatch.setattr(mask_cache, "_MOST_BLOCK_MASKS", 8)
    of_threads = [
        [create_block_mask(causal, None, None, 128, 128, device="cpu") for _ in range(20)]
        for _ in range(4)
    ]
    grid = flexcp.BlockGrid.from_block_mask(of_threads[0][0])
    monkeypatch.setattr(flexcp.BlockGrid, "from_block_mask", lambda block_mask: grid)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda own: [_convert(own) for _ in range(50)], of_threads))
    finally:
        sys.setswitchinterval(interval)
    assert len(mask_cache._block_masks) <= 8


def _convert(block_masks):
    for block_mask in block_masks:
        mask_cache._grid_of_block_mask(block_mask)
