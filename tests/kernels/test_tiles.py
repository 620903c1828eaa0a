"""Tile lists name every allowed pair once, in time that is proportional to the tiles."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexcp import FlexCPError, build_block_grid, masks
from flexcp.kernels.interface import (
    Plane,
    Shapes,
    Slab,
    allowed_pairs,
    causal_shapes,
    full_shapes,
)
from flexcp.kernels.shapes import shapes_of
from flexcp.kernels.tiles import By, TileLists, tile_lists
from kernels.cases import MASKS


def named_pairs(lists: TileLists, plane: int, rows: int, cols: int, by: By) -> Tensor:
    """How often the lists name each pair, by whole tiles."""
    across = cols if by == "query" else rows
    down = rows if by == "query" else cols
    tiles = int(max([-1, *lists.full_tile.tolist(), *lists.partial_tile.tolist()])) + 1
    found = torch.zeros(lists.lines * down, tiles * across, dtype=torch.int32)
    for line in range(lists.lines):
        at = plane * lists.lines + line
        row = slice(line * down, (line + 1) * down)
        for tile in lists.full_tile[lists.full_start[at] : lists.full_start[at + 1]].tolist():
            found[row, tile * across : (tile + 1) * across] += 1
        for n in range(int(lists.partial_start[at]), int(lists.partial_start[at + 1])):
            tile, words = int(lists.partial_tile[n]), lists.patterns[lists.partial_pattern[n]].T
            bits = ((words[..., None] >> torch.arange(32)) & 1).flatten(1)[:, :across]
            found[row, tile * across : (tile + 1) * across] += bits
    return found


def assert_names_the_pairs(shapes: Shapes, rows: int, cols: int, by: By) -> None:
    lists = tile_lists(shapes, rows, cols, by)
    for plane in range(len(shapes.planes)):
        found = named_pairs(lists, plane, rows, cols, by)
        wanted = allowed_pairs(shapes, plane)
        wanted = wanted if by == "query" else wanted.T
        inside = found[: wanted.shape[0], : wanted.shape[1]]
        assert torch.equal(inside > 0, wanted[:, : inside.shape[1]])
        assert not bool(wanted[:, inside.shape[1] :].any())
        assert int(found.max()) <= 1 if found.numel() else True
        assert not bool(found[:, wanted.shape[1] :].any()), "a full tile beyond the last column"


@pytest.mark.parametrize("by", ["query", "key"])
@pytest.mark.parametrize("name", MASKS)
def test_the_lists_of_every_mask_name_its_pairs(name: str, by: By) -> None:
    shapes = shapes_of(build_block_grid(MASKS[name](), 150, 111, batch=2, heads=2))
    for rows, cols in ((64, 32), (16, 64)):
        assert_names_the_pairs(shapes, rows, cols, by)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_slabs_of_any_slant_are_named(data) -> None:
    q_len, kv_len = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 90))
    slabs, row = [], 0
    while row < q_len:
        rows = data.draw(st.integers(1, q_len - row))
        step = st.integers(-2, 2)
        low, high = data.draw(st.tuples(step, step).map(sorted))
        begin = data.draw(st.integers(0, kv_len - 1))
        slab = Slab(row, row + rows, begin, data.draw(st.integers(begin + 1, kv_len)), low, high)
        first, last = slab.bounds
        if first >= 0 and last <= kv_len:
            slabs.append(slab)
        row += rows
    shapes = Shapes(q_len, kv_len, ((0,),), (Plane(tuple(slabs)),))
    for by in ("query", "key"):
        assert_names_the_pairs(shapes, 32, 16, by)


def test_patterns_that_look_alike_are_kept_once() -> None:
    causal = tile_lists(causal_shapes(4096), 128, 128, "query")
    assert (causal.patterns.shape[0], causal.partial_tile.numel()) == (1, 32)
    window = shapes_of(build_block_grid(masks.sliding_window(512), 4096))
    assert tile_lists(window, 128, 128, "query").patterns.shape[0] <= 3


def test_the_longest_lines_come_first() -> None:
    assert tile_lists(causal_shapes(256), 64, 64, "query").order.tolist() == [[3, 2, 1, 0]]
    assert tile_lists(causal_shapes(256), 64, 64, "key").order.tolist() == [[0, 1, 2, 3]]


def test_a_ragged_tile_is_partial_only_where_kernels_have_no_bounds() -> None:
    by_query = tile_lists(full_shapes(100, 100), 64, 64, "query")
    assert by_query.full_tile.tolist() == [0, 0]
    assert by_query.partial_tile.tolist() == [1, 1]
    by_key = tile_lists(full_shapes(100, 128), 64, 64, "key")
    assert by_key.full_tile.tolist() == [0, 0]
    assert by_key.partial_tile.tolist() == [1, 1]


def test_a_million_tokens_are_listed_by_runs() -> None:
    rows, length = 1 << 14, 1 << 20  # a rank of 64
    shapes = Shapes(rows, length, ((0,),), (Plane((Slab(0, rows, 0, length - rows + 1, 0, 1),)),))
    lists = tile_lists(shapes, 128, 128, "key")
    assert lists.full_tile.numel() + lists.partial_tile.numel() == sum(
        -(-(length - rows + 128 * (i + 1)) // 128) for i in range(128)
    )
    assert lists.patterns.shape[0] == 1


def test_more_tiles_than_32_bits_can_count_are_refused() -> None:
    with pytest.raises(FlexCPError, match=r"at most 2147483647 tiles .* shard the sequence"):
        tile_lists(full_shapes(1 << 23, 1 << 23), 128, 128, "query")
