"""flexcp's create_block_mask is torch's, field for field."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.attention import flex_attention as theirs

import flexcp
from flexcp import FlexCPError
from flexcp.compat import flex_attention as ours

DOCUMENTS = torch.arange(700) // 93
PREFIX = torch.tensor([5, 300])
MASKS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "full": theirs.noop_mask,
    "nothing": lambda b, h, q, kv: q < 0,
    "documents": lambda b, h, q, kv: (q >= kv) & (DOCUMENTS[q] == DOCUMENTS[kv]),
    "per batch": lambda b, h, q, kv: (q >= kv) | (kv < PREFIX[b]),
    "per head": lambda b, h, q, kv: (q - kv).abs() <= 50 * h,
    "combined": theirs.and_masks(
        lambda b, h, q, kv: q >= kv,
        theirs.or_masks(lambda b, h, q, kv: kv < 10, lambda b, h, q, kv: q - kv < 99),
    ),
}

compares_newer_arguments = pytest.mark.skipif(
    not ours.HAS_DQ_WRITE_ORDER, reason="torch's create_block_mask has these arguments from 2.13 on"
)


def assert_same(a, b):
    assert a.seq_lengths == b.seq_lengths
    assert a.BLOCK_SIZE == b.BLOCK_SIZE
    for name in a._TENSOR_ATTRS:
        mine, other = getattr(a, name), getattr(b, name)
        assert (mine is None) == (other is None), name
        if mine is not None:
            assert mine.dtype == other.dtype, name
            assert torch.equal(mine, other), name


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(640, 640), (700, 513), (1, 700), (129, 127)])
@pytest.mark.parametrize("block_size", [128, 64, (128, 32), (50, 70)])
def test_every_field_equals_torchs(name, q_len, kv_len, block_size):
    args = (MASKS[name], 2, 3, q_len, kv_len)
    assert_same(
        ours.create_block_mask(*args, device="cpu", BLOCK_SIZE=block_size),
        theirs.create_block_mask(*args, device="cpu", BLOCK_SIZE=block_size),
    )


@compares_newer_arguments
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("write_order", [True, False])
def test_every_option_gives_what_torch_gives(separate, write_order):
    options = {
        "device": "cpu",
        "separate_full_blocks": separate,
        "compute_dq_write_order": write_order,
        "dq_kv_order": False,
    }
    mine = ours.create_block_mask(MASKS["combined"], None, None, 700, 500, **options)
    other = theirs.create_block_mask(MASKS["combined"], None, None, 700, 500, **options)
    assert_same(mine, other)
    assert mine.dq_kv_order_spt == other.dq_kv_order_spt


@pytest.mark.parametrize("compile_it", [False, True])
def test_full_blocks_are_listed_with_the_others_on_every_torch(compile_it):
    make = ours.create_block_mask
    if compile_it:
        make = torch.compile(make, backend="aot_eager", fullgraph=True)
    args = (MASKS["combined"], 2, None, 700, 500, "cpu", (64, 32))
    mine = make(*args, separate_full_blocks=False, dq_kv_order=False)
    apart = theirs.create_block_mask(*args)
    assert int(apart.full_kv_num_blocks.sum()) > 0
    assert torch.equal(mine.to_dense(), apart.to_dense())
    assert mine.full_kv_num_blocks is mine.full_q_indices is None
    assert_same(mine, ours.create_block_mask(*args, separate_full_blocks=False))


@pytest.mark.skipif(ours.HAS_DQ_WRITE_ORDER, reason="torch has the field from 2.13 on")
def test_a_write_order_that_torch_has_no_field_for_is_refused():
    with pytest.raises(FlexCPError, match=r"expected torch 2\.13 or newer.*got torch 2\..*leave"):
        ours.create_block_mask(MASKS["causal"], 1, 1, 8, 8, "cpu", compute_dq_write_order=True)


@compares_newer_arguments
def test_arguments_and_defaults_are_torchs():
    mine, other = (inspect.signature(m.create_block_mask) for m in (ours, theirs))
    assert [(p.name, p.default, p.kind) for p in mine.parameters.values()] == [
        (p.name, p.default, p.kind) for p in other.parameters.values()
    ]


def test_the_mask_mod_is_kept_and_works_in_torchs_flex_attention():
    mask = ours.create_block_mask(MASKS["causal"], None, None, 200, 200, device="cpu")
    assert mask.mask_mod is MASKS["causal"]
    q = torch.randn(1, 2, 200, 16)
    got = theirs.flex_attention(q, q, q, block_mask=mask)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(got, expected)


def test_a_flexcp_mask_is_accepted_and_handed_on_as_a_plain_function():
    mask = ours.create_block_mask(flexcp.masks.causal(), 1, 1, 300, 300, "cpu")
    assert_same(mask, theirs.create_block_mask(MASKS["causal"], 1, 1, 300, 300, "cpu"))
    assert inspect.isfunction(mask.mask_mod)


def test_a_score_mod_raises_torchs_exception():
    with pytest.raises(AssertionError, match="requires a mask_mod function"):
        ours.create_block_mask(lambda score, b, h, q, kv: score, 1, 1, 8, 8)


def test_compile_is_accepted_with_a_warning():
    with pytest.warns(DeprecationWarning, match="_compile"):
        mask = ours.create_block_mask(MASKS["causal"], 1, 1, 300, 300, "cpu", _compile=True)
    assert_same(mask, theirs.create_block_mask(MASKS["causal"], 1, 1, 300, 300, "cpu"))


def test_an_invalid_write_order_raises_torchs_exception():
    with pytest.raises(ValueError, match="dq_kv_order must be a bool"):
        ours.create_block_mask(MASKS["causal"], 1, 1, 8, 8, dq_kv_order=torch.ones(1))


def test_create_block_mask_may_be_compiled():
    compiled = torch.compile(ours.create_block_mask, backend="aot_eager")
    assert_same(
        compiled(MASKS["causal"], 1, 1, 300, 300, "cpu"),
        theirs.create_block_mask(MASKS["causal"], 1, 1, 300, 300, "cpu"),
    )
