"""Equal masks share their grid; what is kept of it is bounded, and dies with what it belongs to."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch

import flexcp
from flexcp import masks
from flexcp.caches import BoundedByBytes
from flexcp.grid import memo
from flexcp.grid.memo import grid_of_mask


@pytest.fixture
def small_memo(monkeypatch):
    """A memo of its own, with room for 100 kB."""
    kept = BoundedByBytes(100_000, memo._nbytes)
    monkeypatch.setattr(memo, "shared_grids", kept)
    return kept


def packed(first):
    return masks.causal() & masks.document(lengths=[first, 1000 - first])


def test_equal_masks_made_apart_share_their_grid(small_memo):
    grid = grid_of_mask(packed(300), 1000, 1000)
    assert grid_of_mask(packed(300), 1000, 1000) is grid
    assert grid_of_mask(pickle.loads(pickle.dumps(packed(300))), 1000, 1000) is grid
    assert grid == flexcp.build_block_grid(packed(300), 1000)


def test_another_mask_or_size_has_another_grid(small_memo):
    grid = grid_of_mask(packed(300), 1000, 1000)
    others = [
        grid_of_mask(packed(301), 1000, 1000),
        grid_of_mask(packed(300), 999, 1000),
        grid_of_mask(packed(300), 1000, 999),
        grid_of_mask(packed(300), 1000, 1000, batch=2),
        grid_of_mask(packed(300), 1000, 1000, heads=2),
        grid_of_mask(packed(300), 1000, 1000, block_size=(64, 128)),
    ]
    assert all(other is not grid for other in others)
    assert others[1].q_len == 999
    assert others[5].block_size == (64, 128)


def test_changing_ids_after_the_mask_was_made_gives_no_kept_grid_of_other_ids(small_memo):
    ids = torch.zeros(256, dtype=torch.int64)
    before = grid_of_mask(masks.document(ids), 256, 256)
    ids[100:] = 1
    after = grid_of_mask(masks.document(ids), 256, 256)
    assert before.area() == 256 * 256
    assert after.area() == 100 * 100 + 156 * 156


def test_masks_of_a_function_keep_their_grids_to_themselves(small_memo):
    limit = 5

    def few(b, h, q_idx, kv_idx):
        return kv_idx < limit

    first = flexcp.Mask(few)
    grid = grid_of_mask(first, 200, 200)
    assert grid.area() == 5 * 200
    limit = 7
    assert grid_of_mask(first, 200, 200) is grid
    assert grid_of_mask(flexcp.Mask(few), 200, 200).area() == 7 * 200
    assert small_memo.nbytes == 0


def test_a_mask_of_a_function_and_its_grid_are_not_kept_alive(small_memo):
    mask = masks.causal() & flexcp.Mask(lambda b, h, q_idx, kv_idx: kv_idx > 3)
    alive = weakref.ref(mask), weakref.ref(grid_of_mask(mask, 200, 200))
    del mask
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_the_memo_is_bounded_by_bytes_of_masks_grids_and_what_they_grow_to(small_memo):
    for first in range(1, 60):
        grid_of_mask(packed(first), 1000, 1000)
        assert 0 < small_memo.nbytes <= 100_000
    assert small_memo.get((packed(1), (1000, 1000, 1, 1, (128, 128)))) is None
    assert small_memo.get((packed(59), (1000, 1000, 1, 1, (128, 128)))) is not None


def test_the_bytes_of_a_grid_grow_by_what_is_derived_from_it():
    from flexcp.kernels import compiled_shapes_of

    grid = flexcp.build_block_grid(masks.causal(), 1000)
    before = grid.nbytes
    compiled_shapes_of(grid).program(0, fused=False)
    assert grid.nbytes > before


def test_too_large_a_grid_is_kept_until_the_next_one(monkeypatch):
    kept = BoundedByBytes(10, memo._nbytes)
    monkeypatch.setattr(memo, "shared_grids", kept)
    first = grid_of_mask(packed(300), 1000, 1000)
    assert grid_of_mask(packed(300), 1000, 1000) is first
    other = grid_of_mask(packed(200), 1000, 1000)
    assert grid_of_mask(packed(200), 1000, 1000) is other
    assert grid_of_mask(packed(300), 1000, 1000) is not first


def test_a_mask_keeps_the_grids_of_its_last_sizes(small_memo):
    mask = flexcp.Mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    grids = {n: grid_of_mask(mask, n, n) for n in range(1, 20)}
    assert grid_of_mask(mask, 19, 19) is grids[19]
    assert grid_of_mask(mask, 1, 1) is not grids[1]


def test_a_grid_pickles_without_what_was_derived_from_it():
    from flexcp.kernels import compiled_shapes_of

    grid = flexcp.build_block_grid(packed(300), 1000)
    compiled_shapes_of(grid).program(0, fused=False)
    again = pickle.loads(pickle.dumps(grid))
    assert again == grid
    assert again.mask == grid.mask
    assert again.graph_handle is not grid.graph_handle
    assert grid.derived.nbytes > again.derived.nbytes == 0


def test_a_grid_that_the_memo_forgot_is_gone_though_its_mask_is_kept(small_memo):
    mask = packed(300)
    grids = [weakref.ref(grid_of_mask(mask, n, n)) for n in range(500, 1000, 10)]
    gc.collect()
    alive = [ref() for ref in grids if ref() is not None]
    assert 0 < len(alive) < len(grids)
    assert sum(grid.nbytes for grid in alive) <= small_memo.nbytes <= 100_000
