"""What ContextParallel can't do is refused by name, before anything is computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import flexcp
from flexcp import FlexCPError, masks, testing
from flexcp.comm.rank_errors import RankError

from .attention_layer import (
    ATTENTIONS,
    LENGTH,
    PACKED,
    X,
    assert_same,
    layer,
    message_of,
    plan_for,
    sharded,
    whole,
)

REFUSED = {
    "an attn_mask": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, q, q, torch.ones(1) > 0),
        "attn_mask=None, since a dense mask",
    ),
    "dropout": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, q, q, dropout_p=1.0),
        "dropout_p to be a number of at least 0 and below 1, got 1.0",
    ),
    "heads that differ": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v),
        "4 query heads and 2 key heads; pass enable_gqa=True",
    ),
    "a cache of keys": (
        lambda q, k, v: functional.scaled_dot_product_attention(
            q, *(torch.cat([x, x], 2) for x in (q, q))
        ),
        "k with the .* rows that rank . owns",
    ),
    "kernel options": (
        lambda q, k, v: torch_flex_attention(q, q, q, kernel_options={"BLOCK_M": 64}),
        r"no kernel_options, .* got kernel_options=\{'BLOCK_M': 64\}",
    ),
    "largest scores": (
        lambda q, k, v: torch_flex_attention(q, q, q, return_aux=AuxRequest(max_scores=True)),
        r"got AuxRequest\(max_scores=True\); ask for lse alone",
    ),
    "two requests for lse": (
        lambda q, k, v: flexcp.flex_attention(
            q, q, q, return_lse=True, return_aux=AuxRequest(lse=True)
        ),
        "return_lse or return_aux, got both",
    ),
    "a mask of the rank's rows": (
        lambda q, k, v: flexcp.flex_attention(
            q, q, q, block_mask=flexcp.build_block_grid(masks.causal(), q.shape[2])
        ),
        "a block_mask of the whole sequence, 37 x 37, or none, got one of",
    ),
    "a mask that forbids more": (
        lambda q, k, v: flexcp.flex_attention(q, q, q, block_mask=masks.sliding_window(2)),
        "forbids some of them; make the plan with this mask",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_plan_cannot_do_is_refused_by_name(name):
    attend, message = REFUSED[name]
    with pytest.raises(RankError, match=message):
        testing.simulate(lambda mesh: sharded(mesh, attend), 2)


def test_is_causal_is_refused_where_the_plan_sees_later_keys():
    def rank(mesh):
        return sharded(mesh, ATTENTIONS["sdpa"], plan_for(mesh, masks.sliding_window(5, 1)))

    with pytest.raises(RankError, match="the plan's mask lets queries see later keys, got is_caus"):
        testing.simulate(rank, 2)


@pytest.mark.parametrize(
    "block_mask",
    [
        PACKED,
        masks.causal(),
        create_block_mask(PACKED.mask_mod, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16),
        flexcp.build_block_grid(masks.causal(), LENGTH, block_size=4),
    ],
    ids=["the plan's", "a wider one", "a BlockMask", "a BlockGrid"],
)
def test_a_block_mask_that_repeats_the_plan_or_says_less_is_fine(block_mask):
    def attend(q, k, v):
        return flexcp.flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)

    results = testing.simulate(lambda mesh: sharded(mesh, attend), 2)
    assert_same(results, whole())


def test_the_lists_of_a_block_mask_count_beside_its_function():
    narrow = create_block_mask(PACKED.mask_mod, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
    narrow.kv_num_blocks.clamp_(max=1)  # the lists now leave out a tile that the function allows

    def attend(q, k, v):
        return flexcp.flex_attention(q, k, v, block_mask=narrow, enable_gqa=True)

    with pytest.raises(RankError, match="one that forbids some of them"):
        testing.simulate(lambda mesh: sharded(mesh, attend), 2)


def test_a_model_without_a_plan_says_how_to_give_one():
    def rank(mesh):
        module = parallelize_module(layer(None), mesh, flexcp.ContextParallel())
        module(X)

    assert "a plan for ContextParallel, got none; pass ContextParallel(plan)" in message_of(rank)


def test_a_plan_from_numbers_is_refused():
    with pytest.raises(FlexCPError, match="a plan that was made with a mesh"):
        flexcp.ContextParallel(flexcp.make_plan(PACKED, LENGTH, 2))
    with pytest.raises(FlexCPError, match=r"a plan, as flexcp\.make_plan returns it, got Mask"):
        flexcp.ContextParallel(PACKED)


def test_an_unknown_mask_name_is_refused_before_the_model_runs():
    def rank(mesh):
        with flexcp.ContextParallel(mask="wide").using(plan_for(mesh, {"a": PACKED})):
            pass

    assert "one of this plan's masks: 'a', got 'wide'" in message_of(rank)


def test_a_plan_for_another_mesh_is_refused():
    def rank(mesh):
        rows, cols = (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))[n] for n in names
        )
        parallelize_module(layer(None), rows, flexcp.ContextParallel(plan_for(cols)))

    names = ("dp", "cp")
    with pytest.raises(RankError, match="a plan for the mesh of parallelize_module"):
        testing.spawn(rank, 4)


def test_a_module_is_parallelized_once():
    def rank(mesh):
        model = nn.Sequential(layer(None))
        style = flexcp.ContextParallel(plan_for(mesh))
        parallelize_module(model, mesh, {"0": style})
        parallelize_module(model, mesh, style)

    assert "no ContextParallel yet, got Attention '0', which has" in message_of(rank)


def test_simulated_ranks_need_a_style_each():
    style = flexcp.ContextParallel()

    def rank(mesh):
        parallelize_module(layer(None), mesh, style)

    assert "in a simulation for each rank" in message_of(rank)
