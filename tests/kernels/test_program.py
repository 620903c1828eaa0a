import pytest
import torch

import flexcp
from flexcp import masks
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.interface import Plane, Shapes, Slab, allowed_pairs, causal_shapes
from flexcp.kernels.program import STRIP_ROWS, Program, make_program
from flexcp.kernels.shapes import shapes_of
from kernels.cases import MASKS


def _covered(program: Program, q_len: int, kv_len: int) -> torch.Tensor:
    """How often each pair is computed and not forbidden."""
    times = torch.zeros(q_len, kv_len, dtype=torch.int32)
    for piece in program.pieces:
        allowed = torch.ones(piece.rows, piece.keys, dtype=torch.int32)
        for edge in piece.forbidden:
            allowed[:, edge.c0 : edge.c1] -= edge.pairs.int()
        times[piece.q0 : piece.q1, piece.k0 : piece.k1] += allowed
        assert piece.has_fully_masked_rows == (not bool(allowed.any(1).all()))
    return times


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_pieces_compute_each_allowed_pair_once(name: str, fused: bool) -> None:
    shapes = shapes_of(flexcp.build_block_grid(MASKS[name](), 600))
    expected = torch.zeros(600, 600, dtype=torch.int32)
    for slab in shapes.planes[0].slabs:
        for i in range(slab.rows):
            expected[slab.q0 + i, slab.k0 + i * slab.k0_step : slab.k1 + i * slab.k1_step] += 1
    for tile in shapes.planes[0].tiles:
        expected[tile.q0 : tile.q1, tile.k0 : tile.k1] += tile.bits
    program = make_program(shapes.planes[0], 600, fused=fused)
    assert torch.equal(_covered(program, 600, 600), expected)


@pytest.mark.parametrize(
    "slab",
    [
        Slab(0, 5000, 0, 1, 0, 1),
        Slab(7, 4100, 0, 2000, 0, 1),
        Slab(3, 4100, 0, 5000, 1, 0),
        Slab(1, 4096, 2, 3500, 1, 1),
        Slab(0, 2000, 0, 6000),
        Slab(0, 1500, 0, 10, 0, 3),
        Slab(0, 1200, 5000, 6000, -2, -1),
    ],
)
def test_large_slabs_are_cut_without_loss(slab: Slab) -> None:
    program = make_program(Plane((slab,)), 5000, fused=True)
    times = _covered(program, 5000, 8000)
    assert int(times.max()) == 1
    assert int(times.sum()) == slab.area
    row = slab.q0 + 700
    start, stop = slab.k0 + 700 * slab.k0_step, slab.k1 + 700 * slab.k1_step
    assert times[row].nonzero()[:, 0].tolist() == list(range(start, stop))


def test_a_long_causal_mask_is_nearly_all_rectangles() -> None:
    program = make_program(causal_shapes(8192).planes[0], 8192, fused=True)
    assert program.computed < 1.02 * causal_shapes(8192).area(1, 1)
    in_rectangles = sum(p.rows * p.keys for p in program.pieces if p.fused)
    assert in_rectangles > 0.85 * program.computed


def test_a_staircase_of_blocks_is_cut_like_a_triangle() -> None:
    shapes = shapes_of(flexcp.build_block_grid(masks.block_causal(250), 8000))
    program = make_program(shapes.planes[0], 8000, fused=True)
    assert len(program.pieces) < 90
    assert program.computed < 1.02 * shapes.area(1, 1)
    assert sum(p.rows * p.keys for p in program.rectangles) > 0.8 * program.computed


def test_slabs_that_dont_continue_each_other_are_cut_alone() -> None:
    documents = (Slab(0, 1500, 0, 1, 0, 1), Slab(1500, 3000, 1500, 1501, 0, 1))
    both = make_program(Plane(documents), 3000, fused=True)
    alone = [make_program(Plane((slab,)), 3000, fused=True) for slab in documents]
    assert both.computed == sum(program.computed for program in alone)


@pytest.mark.parametrize("fused", [True, False])
def test_stacks_of_any_slopes_are_cut_without_loss(fused: bool) -> None:
    """Edges that rise, fall and jump, at lengths that nothing divides."""
    slabs = (
        Slab(5, 1201, 100, 3000, 1, 0),
        Slab(1201, 2407, 1296, 3000, -1, 2),
        Slab(2407, 2408, 7, 4999),
        Slab(2408, 3777, 600, 4100, 0, -1),
        Slab(3777, 4999, 0, 2731, 1, 1),
    )
    program = make_program(Plane(slabs), 5000, fused=fused)
    times = _covered(program, 5000, 8000)
    expected = torch.zeros_like(times)
    for slab in slabs:
        for i in range(slab.rows):
            expected[slab.q0 + i, slab.k0 + i * slab.k0_step : slab.k1 + i * slab.k1_step] = 1
    assert torch.equal(times, expected)
    assert bool(program.rectangles) == fused


def test_strips_of_equal_form_share_what_is_forbidden() -> None:
    shapes = shapes_of(flexcp.build_block_grid(masks.sliding_window(500), 4096))
    program = make_program(shapes.planes[0], 4096, fused=False)
    edges = {id(edge.pairs) for piece in program.pieces for edge in piece.forbidden}
    assert len(program.pieces) > 30
    assert len(edges) < 12


def test_short_documents_are_computed_several_at_a_time() -> None:
    mask = masks.causal() & masks.document(lengths=[20] * 100)
    shapes = shapes_of(flexcp.build_block_grid(mask, 2000))
    program = make_program(shapes.planes[0], 2000, fused=True)
    assert len(program.pieces) <= 40
    assert max(piece.rows for piece in program.pieces) <= STRIP_ROWS


def test_programs_are_made_once() -> None:
    compiled = CompiledShapes(causal_shapes(300))
    assert compiled.program(0, fused=True) is compiled.program(0, fused=True)
    assert compiled.head_groups(2, 4, 2) is compiled.head_groups(2, 4, 2)


def test_large_triangles_are_single_squares_for_the_own_causal_mode_of_the_op() -> None:
    slabs = tuple(
        Slab(q0, q1, q0, q0 + 1, 0, 1) for q0, q1 in ((0, 1100), (1100, 1300), (1300, 2600))
    )
    program = make_program(Plane(slabs), 2600, fused=True, causal_rows=1024)
    squares = [(p.q0, p.q1, p.k0, p.k1) for p in program.pieces if p.causal]
    assert squares == [(0, 1100, 0, 1100), (1300, 2600, 1300, 2600)]  # the short one is in strips
    assert all(p.fused and p.first_write for p in program.pieces if p.causal)
    assert not any(p.causal for p in make_program(Plane(slabs), 2600, fused=True).pieces)


def test_strips_are_widened_to_whole_vectors_of_keys_that_there_are() -> None:
    band = Plane((Slab(0, 512, 1, 1001, 1, 1),))
    shapes = Shapes(512, 1600, ((0,),), (band,))
    program = make_program(band, 512, fused=False, kv_len=1600)
    assert all(piece.keys % 16 == 0 for piece in program.strips)
    for kv_len in (1600, 1512, None):
        program = make_program(band, 512, fused=False, kv_len=kv_len)
        assert torch.equal(_covered(program, 512, 1600).bool(), allowed_pairs(shapes))
        assert all(piece.k0 >= 0 and piece.k1 <= (kv_len or 1600) for piece in program.strips)
