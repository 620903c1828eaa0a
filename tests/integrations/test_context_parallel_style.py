"""ContextParallel makes a module's own attention calls those of the whole sequence."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import flexcp
from flexcp import FlexCPError, masks, testing
from flexcp.comm.rank_errors import RankError
from flexcp.testing.tolerance import assert_close

from .attention_layer import (
    ATTENTIONS,
    LENGTH,
    PACKED,
    X,
    assert_same,
    bias,
    plan_for,
    sharded,
    whole,
)


@pytest.mark.parametrize("name", [n for n in ATTENTIONS if n != "compiled torch flex"])
def test_every_attention_function_is_that_of_the_whole_sequence(name):
    results = testing.simulate(lambda mesh: sharded(mesh, ATTENTIONS[name]), 3)
    assert_same(results, whole())


@pytest.mark.usefixtures("loaded_compiler")
@pytest.mark.parametrize("name", ["sdpa", "compiled torch flex"])
def test_it_is_so_between_processes(name):
    results = testing.spawn(lambda mesh: sharded(mesh, ATTENTIONS[name]), 2)
    assert_same(results, whole())


def test_score_mods_see_positions_and_heads_of_the_whole_model():
    def attend(q, k, v):
        return torch_flex_attention(q, k, v, bias, scale=0.3, enable_gqa=True)

    results = testing.simulate(lambda mesh: sharded(mesh, attend), 2)
    assert_same(results, whole(score_mod=bias, scale=0.3))


def test_lse_is_returned_as_the_function_returns_it():
    q = torch.randn(1, 2, LENGTH, 4, dtype=torch.float64)
    _, want = flexcp.flex_attention(q, q, q, block_mask=PACKED, return_lse=True)

    class Module(nn.Module):
        def forward(self, x):
            _, lse = flexcp.flex_attention(x, x, x, return_lse=True)
            _, aux = torch_flex_attention(x, x, x, return_aux=AuxRequest(lse=True))
            assert_close(lse, aux.lse, what="lse")  # torch has it in base 2 on the way
            return lse

    def rank(mesh):
        plan = plan_for(mesh)
        module = parallelize_module(Module(), mesh, flexcp.ContextParallel(plan))
        return plan.unshard(module(plan.shard(q, 2)), 2)

    for found in testing.simulate(rank, 2):
        assert_close(found, want, what="lse")


def test_a_head_offset_counts_heads_across_tensor_parallel_ranks():
    q = torch.randn(1, 4, LENGTH, 4, dtype=torch.float64)
    want = flexcp.flex_attention(q, q, q, bias, block_mask=PACKED)

    class Module(nn.Module):
        def forward(self, x):
            return torch_flex_attention(x, x, x, bias)

    def rank(mesh):
        plan = plan_for(mesh)
        parts = []
        for first in (0, 2):  # as two ranks of a tensor-parallel mesh would
            style = flexcp.ContextParallel(plan, first_head=first)
            module = parallelize_module(Module(), mesh, style)
            parts.append(plan.unshard(module(plan.shard(q[:, first : first + 2], 2)), 2))
        return torch.cat(parts, dim=1)

    for found in testing.simulate(rank, 2):
        assert_close(found, want, what="out")


def test_dropout_is_that_of_the_whole_sequence_and_of_all_heads():
    q = torch.zeros(2, 4, 13, 4)
    v = torch.eye(13).expand(2, 4, 13, 13)

    class Layer(nn.Module):
        def forward(self, q, v):
            return functional.scaled_dot_product_attention(q, q, v, dropout_p=0.4, is_causal=True)

    def rank(mesh, heads):
        plan = flexcp.make_plan(masks.causal(), 13, mesh, num_heads=2, head_dim=4, batch=2)
        style = flexcp.ContextParallel(plan, first_head=heads)
        layer = parallelize_module(Layer(), mesh, style)
        own = slice(heads, heads + 2)
        return plan.unshard(layer(plan.shard(q[:, own], 2), plan.shard(v[:, own], 2)), 2)

    torch.manual_seed(9)
    wanted = flexcp.flex_attention(q, q, v, block_mask=masks.causal(), dropout_p=0.4)
    for heads in (0, 2):
        torch.manual_seed(9)
        found = testing.simulate(functools.partial(rank, heads=heads), 2)[0]
        assert_close(found, wanted[:, heads : heads + 2])


def test_tensors_without_a_head_dimension_keep_their_shape():
    x = torch.randn(3, LENGTH, 4, dtype=torch.float64)

    class Module(nn.Module):
        def forward(self, x):
            return functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    def rank(mesh):
        plan = plan_for(mesh, masks.causal())
        module = parallelize_module(Module(), mesh, flexcp.ContextParallel(plan))
        return plan.unshard(module(plan.shard(x, 1)), 1)

    for found in testing.simulate(rank, 2):
        assert_close(found, Module()(x), what="out")


def test_autocast_lowers_the_type_as_it_does_for_torch():
    x = torch.randn(1, 2, LENGTH, 4)

    class Module(nn.Module):
        def forward(self, x):
            return functional.scaled_dot_product_attention(x, x, x)

    def rank(mesh):
        plan = plan_for(mesh)
        module = parallelize_module(Module(), mesh, flexcp.ContextParallel(plan))
        with torch.autocast("cpu", torch.bfloat16):
            return module(plan.shard(x, 2)).dtype

    assert testing.simulate(rank, 2) == [torch.bfloat16] * 2


def test_multihead_attention_of_torch_runs_without_its_weights():
    torch.manual_seed(0)
    original = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    square = masks.causal().mask_mod(0, 0, torch.arange(LENGTH)[:, None], torch.arange(LENGTH))
    want, _ = original(X, X, X, attn_mask=~square, need_weights=False)

    def rank(mesh):
        plan = plan_for(mesh, masks.causal())
        module = parallelize_module(copy.deepcopy(original), mesh, flexcp.ContextParallel(plan))
        x = plan.shard(X, 1)
        out, _ = module(x, x, x, need_weights=False)
        with pytest.raises(FlexCPError, match="MultiheadAttention, whose forward called neither"):
            module(x, x, x, need_weights=True)
        return plan.unshard(out, 1)

    for found in testing.simulate(rank, 2):
        assert_close(found, want, what="out")


def test_an_encoder_layer_of_torch_does_not_go_around_its_attention_module():
    original = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double().eval()
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    with torch.no_grad():
        want = original(X, src_mask=later)

    def rank(mesh):
        plan = plan_for(mesh, masks.causal())
        style = flexcp.ContextParallel(plan)
        module = parallelize_module(copy.deepcopy(original), mesh, {"self_attn": style})
        with torch.no_grad():
            return plan.unshard(module(plan.shard(X, 1)), 1)

    for found in testing.simulate(rank, 2):
        assert_close(found, want, what="out")


class SelfAttention(nn.Module):
    def forward(self, x):
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_heads_may_be_sharded_as_dtensors():
    x = torch.randn(1, 4, LENGTH, 4, dtype=torch.float64)

    def rank(_):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        plan = plan_for(mesh["cp"], masks.causal())
        module = parallelize_module(SelfAttention(), mesh["cp"], flexcp.ContextParallel(plan))
        heads = distribute_tensor(plan.shard(x, 2), mesh["tp"], [Shard(1)]).requires_grad_()
        out = module(heads)
        assert out.placements == (Shard(1),)
        out.full_tensor().square().sum().backward()
        return [plan.unshard(y.full_tensor(), 2) for y in (out.detach(), heads.grad)]

    whole = x.clone().requires_grad_()
    want = SelfAttention()(whole)
    want.square().sum().backward()
    for out, grad in testing.spawn(rank, 4):
        assert_close(out, want.detach(), what="out")
        assert_close(grad, whole.grad, what="gradient")


def test_dtensors_that_are_sharded_along_the_sequence_are_refused():
    def rank(mesh):
        plan = plan_for(mesh, masks.causal(), layout="contiguous")
        module = parallelize_module(SelfAttention(), mesh, flexcp.ContextParallel(plan))
        module(distribute_tensor(torch.randn(1, 4, LENGTH, 4), mesh, [Shard(2)]))

    with pytest.raises(
        RankError, match=r"sharded alike along batch or heads, got \(Shard\(dim=2\)"
    ):
        testing.spawn(rank, 2)


BOUND_EARLY = {
    "an attribute": functional.scaled_dot_product_attention,
    "a partial": functools.partial(functional.scaled_dot_product_attention, is_causal=True),
    "torch._C": torch._C._nn.scaled_dot_product_attention,
    "an operator": torch.ops.aten.scaled_dot_product_attention,
}


@pytest.mark.parametrize("ranks", [2, 3])
def test_functions_that_were_bound_before_are_seen_between_processes(ranks):
    def attend(function):
        return lambda q, k, v: function(q, k, v, enable_gqa=True)

    def rank(mesh):
        return [sharded(mesh, attend(f)) for f in BOUND_EARLY.values()]

    for results in zip(*testing.spawn(rank, ranks), strict=True):
        assert_same(results, whole())


def test_an_operator_that_goes_around_flex_attention_is_refused():
    def attend(q, k, v):
        return torch.ops.higher_order.flex_attention(q, q, q, bias, (), 1.0, {})

    with pytest.raises(RankError, match=r"got a call of torch\.ops\.higher_order"):
        testing.simulate(lambda mesh: sharded(mesh, attend), 2)
