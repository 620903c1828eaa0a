"""Tiles that are read off row ranges are those that the descent finds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp import Mask, build_block_grid, masks
from flexcp.grid.row_ranges import row_ranges

_IDS = torch.tensor([(7 * i * i + 3 * i) % 11 - 1 for i in range(300)])


def _masks(lengths: list[int], width: int) -> list[Mask]:
    documents, ids = masks.document(lengths=lengths), _IDS
    return [
        documents,
        documents & masks.causal(),
        masks.causal() & masks.sliding_window(width),
        masks.prefix_lm(width),
        Mask(lambda b, h, q, kv: (ids[q] >= 3) & (q >= kv)),  # rows without keys between others
        Mask(lambda b, h, q, kv: (kv >= ids[q] * 20) & (kv < ids[q] * 30)),  # ranges that jump
        Mask(lambda b, h, q, kv: (q >= kv) & (h * 9 + q - kv < width)),
        Mask(lambda b, h, q, kv: q < 0),
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
    st.integers(1, 70),
    st.integers(0, 7),
    st.sampled_from([1, 3, 16, 64]),
    st.sampled_from([1, 5, 16, 64]),
)
def test_tiles_by_rows_are_those_of_the_descent(
    lengths: list[int], width: int, which: int, high: int, wide: int
) -> None:
    mask, tokens = _masks(lengths, width)[which], sum(lengths)
    grids = [
        build_block_grid(mask, tokens, block_size=(high, wide), heads=2, by_rows=by_rows)
        for by_rows in (False, True)
    ]
    assert len(grids[0].runs) == len(grids[1].runs)
    assert all(a.equals(b) for a, b in zip(grids[0].runs, grids[1].runs, strict=True))


def test_a_mask_with_several_ranges_of_keys_gets_the_tiles_of_the_descent() -> None:
    mask = (masks.causal() & masks.sliding_window(40)) | masks.global_tokens(7)
    by_rows, plain = (build_block_grid(mask, 500, block_size=32, by_rows=x) for x in (True, False))
    assert len(row_ranges(plain).planes[0]) > 1
    assert by_rows.runs[0].equals(plain.runs[0])


@pytest.mark.parametrize("by_rows", [True, False])
def test_a_captured_tensor_that_is_too_short_is_named(by_rows: bool) -> None:
    ids = torch.arange(10)
    mask = Mask(lambda b, h, q, kv: ids[q // 2 + q // 2] >= kv)
    with pytest.raises(Exception, match="captured tensors that cover every position"):
        build_block_grid(mask, 64, block_size=16, by_rows=by_rows)
