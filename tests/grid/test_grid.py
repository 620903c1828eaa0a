"""Block grids: kinds, counts, areas, slices; small and correct at millions of tokens."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import flexcp
from flexcp import BlockGrid, BlockKind, masks

MILLION = 1 << 20


def test_kinds_of_a_causal_grid():
    grid = flexcp.build_block_grid(masks.causal(), 300, block_size=100)
    assert grid.shape == (3, 3)
    assert grid.kind(0, 0, 1, 0) is BlockKind.FULL
    assert grid.kind(0, 0, 1, 1) is BlockKind.PARTIAL
    assert grid.kind(0, 0, 1, 2) is BlockKind.EMPTY
    assert grid.counts() == {"empty": 3, "partial": 3, "full": 3}
    assert grid.area() == 300 * 301 // 2


def test_a_short_last_tile_is_full_when_all_of_its_pairs_are_allowed():
    grid = flexcp.build_block_grid(masks.full(), 130, 200, block_size=(128, 64))
    assert grid.to_dense().unique().tolist() == [BlockKind.FULL]
    assert grid.area() == 130 * 200


def test_counts_and_areas_add_up_over_batch_and_heads():
    prefix = torch.tensor([0, 50, 300])
    grid = flexcp.build_block_grid(
        lambda b, h, q, kv: (q >= kv) | (kv < prefix[b] * h), 300, block_size=64, batch=3, heads=2
    )
    dense = grid.to_dense()
    assert dense.shape == (3, 2, 5, 5)
    assert sum(grid.counts().values()) == dense.numel()
    assert grid.row_areas().shape == (3, 2, 5)
    assert grid.row_areas().sum() == grid.area()
    assert grid.column_areas().sum() == grid.area()


def test_planes_are_shared_between_batch_elements_and_heads_that_do_not_matter():
    grid = flexcp.build_block_grid(masks.causal(), 256, batch=64, heads=32)
    assert len(grid.runs) == 1
    assert grid.area() == 64 * 32 * 256 * 257 // 2
    window = torch.tensor([10, 100])
    by_head = flexcp.build_block_grid(
        lambda b, h, q, kv: q - kv < window[h], 256, batch=64, heads=2
    )
    assert len(by_head.runs) == 2


@pytest.mark.parametrize(
    ("mask", "area"),
    [
        (masks.causal(), MILLION * (MILLION + 1) // 2),
        (masks.sliding_window(4096), MILLION * 4097 - 4096 * 4097 // 2),
        (masks.document(lengths=[1000] * 1048 + [576]), 1048 * 1000**2 + 576**2),
        (masks.block_causal(MILLION // 4), (MILLION // 4) ** 2 * 10),
        (
            masks.prefix_lm(1000),
            MILLION * (MILLION + 1) // 2 + 999 * 1000 // 2,
        ),
    ],
    ids=lambda x: x.name if isinstance(x, flexcp.Mask) else "",
)
def test_areas_at_a_million_tokens_are_exact(mask, area):
    assert flexcp.build_block_grid(mask, MILLION).area() == area


def test_a_causal_grid_of_a_million_tokens_stores_two_runs_to_a_row():
    grid = flexcp.build_block_grid(masks.causal(), MILLION)
    assert grid.counts()["full"] == 8192 * 8191 // 2
    assert sum(len(runs) for runs in grid.runs) == 2 * 8192 - 1
    assert grid.effort is not None
    assert grid.effort.evaluated == 0


def test_a_lookup_without_structure_is_settled_without_looking_at_its_tiles():
    order = torch.randperm(MILLION)
    grid = flexcp.build_block_grid(lambda b, h, q, kv: order[q] >= order[kv], MILLION)
    assert grid.counts() == {"empty": 0, "partial": 8192**2, "full": 0}
    assert grid.effort is not None
    assert grid.effort.probed == 0


def test_document_ids_in_any_order_cost_no_more_than_sorted_ones():
    ids = torch.arange(MILLION // 8) // 777
    names = torch.randperm(int(ids.max()) + 1)
    ordered, shuffled = (
        flexcp.build_block_grid(masks.causal() & masks.document(x), ids.numel())
        for x in (ids, names[ids])
    )
    assert ordered == shuffled
    assert ordered.effort == shuffled.effort


def test_ids_too_large_for_a_float_are_told_apart():
    ids = (1 << 62) + torch.arange(512) // 100
    grid = flexcp.build_block_grid(masks.document(ids), 512, block_size=64)
    assert grid.area() == 5 * 100**2 + 12**2


def test_integer_overflow_in_a_mask_wraps_as_in_torch():
    def hashed(b, h, q, kv):
        return (q * 6364136223846793005 + kv * 1442695040888963407) % 5 < 2

    grid = flexcp.build_block_grid(hashed, 200, block_size=32)
    i = torch.arange(200)
    assert grid.area() == int(hashed(0, 0, i[:, None], i[None, :]).sum())


def test_not_a_number_is_neither_smaller_nor_larger():
    levels = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")]).repeat(32)
    for compare in (torch.lt, torch.ge, torch.ne):
        grid = flexcp.build_block_grid(
            lambda b, h, q, kv, compare=compare: compare(levels[q], levels[kv]), 128, block_size=16
        )
        assert grid.area() == int(compare(levels[:, None], levels[None, :]).sum())


def test_comparisons_in_single_precision_round_as_torch_does():
    tenth = torch.full((64,), 0.1)
    strict = flexcp.build_block_grid(lambda b, h, q, kv: tenth[q] > 0.1, 64, block_size=16)
    assert strict.area() == 0
    far = 1 << 24

    def beyond_the_mantissa(b, h, q, kv):
        return (q + far).float() > (kv + far).float()

    grid = flexcp.build_block_grid(beyond_the_mantissa, 64, block_size=16)
    i = torch.arange(64)
    assert grid.area() == int(beyond_the_mantissa(0, 0, i[:, None], i[None, :]).sum())


UNSTRUCTURED = """
import resource, torch, flexcp
order = torch.randperm(1 << 15)
def rare(b, h, q, kv):
    return (order[q] * 7919 + order[kv] * 104729) % 1000003 == 0
flexcp.build_block_grid(rare, 1 << 10)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
grid = flexcp.build_block_grid(rare, 1 << 14)
assert grid.effort.evaluated > 10_000
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_evaluating_every_pair_of_an_unstructured_mask_needs_a_bounded_amount_of_memory():
    run = subprocess.run(
        [sys.executable, "-c", UNSTRUCTURED], capture_output=True, text=True, check=True
    )
    # 268 million pairs of int64 would be 2 GB for each step of the mask.
    assert int(run.stdout) < 300


def test_windows_keep_global_positions():
    grid = flexcp.build_block_grid(masks.causal(), 1000, block_size=100)
    part = grid.window(rows=range(5, 7), cols=range(4, 10))
    assert (part.q_start, part.kv_start, part.q_len, part.kv_len) == (500, 400, 200, 600)
    assert part.area() == sum(min(q, 999) - 400 + 1 for q in range(500, 700))
    again = part.window(rows=range(1, 2))
    assert again.q_start == 600
    assert again.area() == sum(q - 400 + 1 for q in range(600, 700))


def test_the_block_mask_of_a_window_counts_from_its_corner():
    grid = flexcp.build_block_grid(masks.causal(), 512).window(rows=range(2, 4))
    block_mask = grid.to_block_mask()
    assert block_mask.seq_lengths == (256, 512)
    zero = torch.tensor(0)
    assert bool(block_mask.mask_mod(zero, zero, torch.tensor(0), torch.tensor(256)))
    assert not bool(block_mask.mask_mod(zero, zero, torch.tensor(0), torch.tensor(257)))


def test_transposed_grids_list_the_rows_that_use_a_column():
    grid = flexcp.build_block_grid(masks.sliding_window(250), 1000, block_size=100)
    column = grid.transposed().plane(0, 0)
    first, last = int(column.row_ptr[4]), int(column.row_ptr[5])
    assert column.start[first] == 4
    assert column.stop[last - 1] == 8


def test_transposing_a_million_tokens_stores_no_more():
    grid = flexcp.build_block_grid(masks.causal(), MILLION)
    assert len(grid.transposed().runs[0]) == len(grid.runs[0])
    assert grid.transposed().transposed() == grid


def test_grids_are_equal_when_their_tiles_are():
    a = flexcp.build_block_grid(masks.causal(), 300, batch=2)
    b = flexcp.build_block_grid(lambda b, h, q, kv: ~(q < kv), 300, batch=2)
    assert a == b
    assert a != flexcp.build_block_grid(masks.causal(), 301, batch=2)
    assert a != flexcp.build_block_grid(masks.full(), 300, batch=2)
    assert a != "a grid"


def test_a_block_mask_whose_lists_are_narrower_than_its_mask_keeps_its_lists():
    from torch.nn.attention.flex_attention import BlockMask

    lists = BlockMask.from_kv_blocks(
        torch.tensor([[[1, 1]]], dtype=torch.int32),
        torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32),
        BLOCK_SIZE=64,
        mask_mod=masks.causal().mask_mod,
    )
    grid = BlockGrid.from_block_mask(lists)
    assert grid.to_dense().tolist() == [[[[1, 0], [0, 1]]]]
    assert grid.area() == 2 * 64 * 65 // 2


def test_repr_shows_the_grid():
    text = repr(flexcp.build_block_grid(masks.causal(), 1 << 20, batch=2))
    assert text.startswith("BlockGrid(1048576 x 1048576 tokens, blocks of 128 x 128, batch 2")
    assert len(text.splitlines()) == 25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q_len": 0}, "expected q_len to be an integer of at least 1, got 0"),
        ({"q_len": -5}, "got -5; leave out empty sequences"),
        ({"q_len": 5, "kv_len": 0}, "expected kv_len to be an integer of at least 1"),
        ({"q_len": 5.0}, "expected q_len to be an integer of at least 1, got 5.0 of type float"),
        ({"q_len": 5, "block_size": 0}, "expected block_size .*, got 0; pass block_size=128"),
        ({"q_len": 5, "block_size": (128, 0)}, "expected block_size .* at least 1, got 0"),
        (
            {"q_len": 5, "block_size": (1, 2, 3)},
            r"a pair of integers .* got \(1, 2",
        ),
        ({"q_len": 5, "batch": 0}, "expected batch to be an integer of at least 1, got 0"),
        ({"q_len": 5, "heads": -1}, "expected heads to be an integer of at least 1, got -1"),
    ],
)
def test_bad_sizes_are_named(arguments, message):
    with pytest.raises(flexcp.FlexCPError, match=message):
        flexcp.build_block_grid(masks.causal(), **arguments)


def test_tiles_outside_the_grid_are_refused():
    grid = flexcp.build_block_grid(masks.causal(), 300)
    with pytest.raises(flexcp.FlexCPError, match="expected j between 0 and 2, got 3"):
        grid.kind(0, 0, 0, 3)
    with pytest.raises(flexcp.FlexCPError, match="expected b between 0 and 0, got 1"):
        grid.plane(1, 0)
    with pytest.raises(flexcp.FlexCPError, match=r"expected rows as a range of tiles .* got range"):
        grid.window(rows=range(2, 5))


def test_from_block_mask_refuses_what_is_not_one():
    with pytest.raises(flexcp.FlexCPError, match="expected a torch BlockMask, got int"):
        BlockGrid.from_block_mask(5)


def test_integers_of_numpy_are_integers():
    numpy = pytest.importorskip("numpy")
    grid = flexcp.build_block_grid(masks.sliding_window(numpy.int64(3)), numpy.int64(64))
    assert grid.area() == 64 * 4 - 6
    assert masks.document(lengths=numpy.array([3, 5])).name == "document"


def test_a_default_device_elsewhere_does_not_matter():
    with torch.device("meta"):
        grid = flexcp.build_block_grid(masks.causal(), 300)
        assert grid.area() == 300 * 301 // 2
        assert grid.to_block_mask().kv_indices.device.type == "cpu"


@pytest.mark.parametrize("block_size", [1000, (3000, 100), (64, 5000)])
def test_blocks_larger_than_memory_allows_are_taken_in_pieces(block_size):
    def wave(b, h, q, kv):
        return torch.sin((q - kv) * 1.0) < 0.99

    grid = flexcp.build_block_grid(wave, 3000, block_size=block_size)
    i = torch.arange(3000)
    assert grid.area() == int(wave(0, 0, i[:, None], i[None, :]).sum())


def test_areas_of_large_blocks_are_found_by_going_down():
    for block_size in (1 << 16, 1 << 20, 50_000):
        grid = flexcp.build_block_grid(masks.causal(), MILLION, block_size=block_size)
        assert grid.area() == MILLION * (MILLION + 1) // 2


def test_ids_that_only_matter_in_places_are_followed():
    """Images within text: every image sees itself whole, text is -1 everywhere."""
    image = torch.full((1 << 17,), -1)
    starts = torch.arange(0, image.numel() - 2000, 5000)
    for n, start in enumerate(starts.tolist()):
        image[start : start + 700] = n

    def mask(b, h, q, kv):
        return (q >= kv) | ((image[q] == image[kv]) & (image[q] >= 0))

    grid = flexcp.build_block_grid(mask, image.numel())
    assert grid.effort is not None
    assert grid.effort.visited < 40_000
    assert grid.area() == image.numel() * (image.numel() + 1) // 2 + len(starts) * 700 * 699 // 2


def test_tables_of_blocks_are_read_as_a_whole():
    table = torch.rand(256, 256, generator=torch.Generator().manual_seed(0)) < 0.02
    grid = flexcp.build_block_grid(lambda b, h, q, kv: table[q // 512, kv // 512], 1 << 17)
    assert grid.area() == int(table.sum()) * 512**2
    assert grid.effort is not None
    assert grid.effort.visited < 200_000


def test_a_remainder_that_every_block_meets_is_settled_at_once():
    grid = flexcp.build_block_grid(lambda b, h, q, kv: q % 3 == kv % 3, MILLION)
    assert grid.counts()["partial"] == 8192**2
    assert grid.effort is not None
    assert grid.effort.visited < 2000


def test_a_squared_distance_is_as_good_as_a_window():
    grid = flexcp.build_block_grid(lambda b, h, q, kv: (q - kv) ** 2 <= 4096**2, MILLION)
    assert grid == flexcp.build_block_grid(masks.sliding_window(4096, 4096), MILLION)


def test_infinities_are_compared_like_numbers():
    def biased(b, h, q, kv):
        return torch.where(q >= kv, 0.0, -torch.inf) == 0

    assert flexcp.build_block_grid(biased, MILLION) == flexcp.build_block_grid(
        masks.causal(), MILLION
    )


def test_a_block_mask_for_many_heads_shares_what_is_the_same():
    from torch.nn.attention.flex_attention import create_block_mask

    same = create_block_mask(lambda b, h, q, kv: q >= kv, 4, 8, 300, 300, device="cpu")
    assert len(BlockGrid.from_block_mask(same).runs) == 1
    by_head = create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (q - kv < 50 * (h % 2 + 1)), 2, 4, 300, 300, device="cpu"
    )
    grid = BlockGrid.from_block_mask(by_head)
    assert len(grid.runs) == 8
    assert grid.area() == flexcp.build_block_grid(by_head.mask_mod, 300, batch=2, heads=4).area()
