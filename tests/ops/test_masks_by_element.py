"""Masks that depend on the batch element or head, made for one of them and used for several."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import flexcp
from flexcp import FlexCPError, masks
from flexcp.compat.flex_attention import flex_attention as flex_attention_of_torch
from flexcp.kernels.reference import dense_attention, dense_mask
from flexcp.testing import simulate
from flexcp.testing.tolerance import assert_close

BATCH, HEADS, LENGTH, DIM = 2, 3, 150, 8
_DRAW = torch.Generator().manual_seed(0)
TENSORS = [torch.randn(BATCH, HEADS, LENGTH, DIM, generator=_DRAW).double() for _ in range(3)]
IDS = torch.stack([torch.arange(LENGTH) // 20, torch.arange(LENGTH) // 70])
MODS = {
    "b": lambda b, h, q, kv: (q >= kv) & (kv >= 10 * b),
    "h": lambda b, h, q, kv: (q >= kv) & (kv % 7 != h),
    "b and h": lambda b, h, q, kv: (q >= kv) & (kv >= 10 * b) & (kv % 7 != h),
    "documents": lambda b, h, q, kv: (q >= kv) & (IDS[b, q] == IDS[b, kv]),
}


@pytest.mark.parametrize("attend", [flexcp.flex_attention, flex_attention_of_torch])
@pytest.mark.parametrize("name", MODS)
def test_lists_of_a_block_mask_are_shared_but_its_function_sees_each_element(name, attend):
    """As torch has it. The lists must not leave out what other elements see: one block has all."""
    block_mask = create_block_mask(
        MODS[name], None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=256
    )
    q, k, v = (x.clone().requires_grad_() for x in TENSORS)
    out = attend(q, k, v, block_mask=block_mask)
    want = [x.clone().requires_grad_() for x in TENSORS]
    rows = torch.arange(LENGTH)
    allowed = dense_mask(MODS[name], rows, rows, batch=BATCH, heads=HEADS)
    expected = dense_attention(*want, allowed=allowed).out
    assert_close(out, expected, what="out")
    got = torch.autograd.grad(out.sum(), (q, k, v))
    for name_of, x, y in zip("qkv", got, torch.autograd.grad(expected.sum(), want), strict=True):
        assert_close(x, y, what=f"gradient of {name_of}")


@pytest.mark.parametrize(("name", "why"), [("b", "batch=2, since"), ("h", "heads=3, since")])
def test_a_grid_of_one_element_is_not_taken_for_all(name, why):
    grid = flexcp.build_block_grid(MODS[name], LENGTH)
    with pytest.raises(FlexCPError, match=f"a block_mask for {why} its mask reads {name}, got"):
        flexcp.flex_attention(*TENSORS, block_mask=grid)
    sizes = {"batch": BATCH, "num_heads": HEADS, "head_dim": DIM}
    with pytest.raises(FlexCPError, match=f"a block_mask for {why} its mask reads {name}, got"):
        flexcp.make_plan(grid, LENGTH, 2, **sizes)


@pytest.mark.parametrize("name", ["b", "documents"])
def test_a_plan_for_one_element_is_not_taken_for_all(name):
    def rank(mesh):
        plan = flexcp.make_plan(masks.Mask(MODS[name]), LENGTH, mesh, num_heads=HEADS, head_dim=DIM)
        return flexcp.attention(*(plan.shard(x, 2) for x in TENSORS), plan)

    with pytest.raises(FlexCPError, match=r"1 batch elements, between which .* make the plan with"):
        simulate(rank, 2)


def test_what_does_not_depend_on_elements_serves_any_number_of_them():
    grid = flexcp.build_block_grid(masks.causal(), LENGTH)
    expected = flexcp.flex_attention(*TENSORS, block_mask=masks.causal())
    assert torch.equal(flexcp.flex_attention(*TENSORS, block_mask=grid), expected)

    def rank(mesh):
        plan = flexcp.make_plan(masks.causal(), LENGTH, mesh, num_heads=HEADS, head_dim=DIM)
        return plan.unshard(flexcp.attention(*(plan.shard(x, 2) for x in TENSORS), plan), 2)

    assert_close(simulate(rank, 2)[0], expected, what="out")
