import pytest
import torch

import flexcp
from flexcp import FlexCPError, Mask, masks
from flexcp.kernels.interface import Shapes, Slab, allowed_pairs
from flexcp.kernels.reference import dense_mask
from flexcp.kernels.shapes import shapes_of
from kernels.cases import MASKS, SIZE


def _grid(
    mask: Mask, q_len: int, kv_len: int | None = None, block_size: int = 128
) -> flexcp.BlockGrid:
    return flexcp.build_block_grid(mask, q_len, kv_len, block_size=block_size, batch=2, heads=3)


def _slabs(mask: Mask, length: int) -> tuple[Slab, ...]:
    plane = shapes_of(flexcp.build_block_grid(mask, length)).planes[0]
    assert not plane.tiles
    return plane.slabs


def _check(shapes: Shapes, dense: torch.Tensor) -> None:
    for b in range(2):
        for h in range(3):
            plane = shapes.plane_of[b if shapes.batch > 1 else 0][h if shapes.heads > 1 else 0]
            assert torch.equal(allowed_pairs(shapes, plane), dense[b, h])


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("q_len", "kv_len", "block_size"), [(333, 333, 128), (129, 500, 48)])
def test_shapes_cover_each_allowed_pair_once_and_nothing_else(
    name: str, q_len: int, kv_len: int, block_size: int
) -> None:
    mask = MASKS[name]()
    shapes = shapes_of(_grid(mask, q_len, kv_len, block_size))
    dense = dense_mask(mask.mask_mod, torch.arange(q_len), torch.arange(kv_len), batch=2, heads=3)
    _check(shapes, dense)
    assert shapes.area(2, 3) == int(dense.sum())


@pytest.mark.parametrize("name", MASKS)
def test_shapes_of_some_rows_and_keys_are_those_of_the_mask_at_their_positions(name: str) -> None:
    mask = MASKS[name]()
    q_rows = torch.cat([torch.arange(300, 400), torch.arange(20, 77), torch.arange(500, 513)])
    kv_rows = torch.cat([torch.arange(0, 50), torch.arange(130, 390), torch.arange(401, 600, 3)])
    shapes = shapes_of(_grid(mask, SIZE), q_positions=q_rows, kv_positions=kv_rows)
    _check(shapes, dense_mask(mask.mask_mod, q_rows, kv_rows, batch=2, heads=3))
    assert shapes.q_positions is not None
    assert torch.equal(shapes.q_positions, q_rows)


def test_a_causal_mask_is_one_trapezoid() -> None:
    assert _slabs(masks.causal(), 1000) == (Slab(0, 1000, 0, 1, 0, 1),)


def test_packed_documents_are_one_triangle_each() -> None:
    mask = masks.causal() & masks.document(lengths=[300, 1, 450, 249])
    assert _slabs(mask, 1000) == (
        Slab(0, 300, 0, 1, 0, 1),
        Slab(300, 301, 300, 301),
        Slab(301, 751, 301, 302, 0, 1),
        Slab(751, 1000, 751, 752, 0, 1),
    )


def test_a_window_is_a_triangle_and_a_band() -> None:
    assert _slabs(masks.sliding_window(99), 1000) == (
        Slab(0, 99, 0, 1, 0, 1),
        Slab(99, 1000, 0, 100, 1, 1),
    )


def test_a_prefix_is_a_rectangle_above_a_trapezoid() -> None:
    assert _slabs(masks.prefix_lm(300), 1000) == (
        Slab(0, 299, 0, 300),
        Slab(299, 1000, 0, 300, 0, 1),
    )


def test_branches_that_share_a_prefix_share_one_rectangle() -> None:
    slabs = _slabs(masks.shared_prefix(100, [200, 300]), 600)
    assert slabs == (
        Slab(0, 300, 0, 1, 0, 1),
        Slab(300, 600, 0, 100),
        Slab(300, 600, 300, 301, 0, 1),
    )


def test_a_striped_layout_keeps_the_causal_slope() -> None:
    grid = flexcp.build_block_grid(masks.causal(), 1000)
    mine, theirs = torch.arange(1, 1000, 4), torch.arange(2, 1000, 4)
    shapes = shapes_of(grid, q_positions=mine, kv_positions=theirs)
    assert shapes.planes[0].slabs == (Slab(1, 250, 0, 1, 0, 1),)


def test_masks_without_a_pattern_keep_their_bits() -> None:
    shapes = shapes_of(flexcp.build_block_grid(MASKS["noise"](), 300))
    assert shapes.planes[0].tiles


def test_equal_patterns_of_several_heads_are_one_plane() -> None:
    mask = Mask(lambda b, h, q, kv: (q >= kv) & (h >= 0))
    shapes = shapes_of(flexcp.build_block_grid(mask, 300, batch=2, heads=4))
    assert (shapes.plane_of, len(shapes.planes)) == (((0,),), 1)


def test_keys_out_of_order_are_refused() -> None:
    grid = flexcp.build_block_grid(masks.causal(), 10)
    with pytest.raises(FlexCPError, match=r"expected kv_positions that ascend.*sort the keys"):
        shapes_of(grid, kv_positions=torch.tensor([3, 2]))


def test_positions_outside_of_the_grid_are_refused() -> None:
    grid = flexcp.build_block_grid(masks.causal(), 10)
    with pytest.raises(FlexCPError, match=r"q_positions in \[0, 10\).*from 3 to 10"):
        shapes_of(grid, q_positions=torch.tensor([3, 10]))
