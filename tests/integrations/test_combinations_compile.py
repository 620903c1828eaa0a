"""Compiled models with ContextParallel are whole graphs, and train as one process does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import flexcp
from flexcp import FlexCPError, masks, testing
from flexcp.testing.tolerance import assert_close

from .decoder import BATCHES, LENGTH, assert_same_training
from .test_combinations import (
    one_process,
    parallel_decoder,
    plan_of,
    sharded_decoder,
    sum_gradients,
    train,
)

pytestmark = pytest.mark.usefixtures("loaded_compiler")


def test_a_compiled_model_is_a_whole_graph_that_serves_other_plans():
    def rank(cp):
        graphs = CompileCounterWithBackend("eager")
        model, style = parallel_decoder(cp)
        compiled = torch.compile(model, backend=graphs, fullgraph=True)
        record = train(compiled, style, cp, after_backward=sum_gradients)
        before = graphs.frame_count
        for cut in range(3, 11):
            documents = masks.document(lengths=[2 * cut, LENGTH - 3 * cut, cut])
            with style.using(plan_of(masks.causal() & documents, cp)) as plan:
                compiled(plan.shard(BATCHES[0], 1), plan.positions().expand(2, -1).contiguous())
        return record, graphs.frame_count - before

    for record, added in testing.spawn(rank, 2, timeout=300.0):
        assert_same_training(record, one_process())
        assert added <= 1  # of 8 more plans


def test_compiled_layers_that_are_recomputed_and_fully_sharded():
    def rank(_):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
        model, style = sharded_decoder(mesh, use_reentrant=False)
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        return train(model, style, mesh["cp"], averaged_over=2)

    for record in testing.spawn(rank, 2, timeout=300.0):
        assert_same_training(record, one_process())


def test_a_compiled_model_may_recompute_its_layers():
    def rank(cp):
        model, style = parallel_decoder(cp)
        model.recompute = {"use_reentrant": False}
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        # A function mode that is on while a layer runs counts as its side effect.
        with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
            return train(compiled, style, cp, after_backward=sum_gradients)

    for record in testing.spawn(rank, 2, timeout=300.0):
        assert_same_training(record, one_process())


class Everything(nn.Module):
    """Attention with what attention modules have around it, in many spellings."""

    def __init__(self):
        super().__init__()
        self.qkv, self.norm = nn.Linear(16, 48), nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.rand(4))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).split(16, dim=-1)
        q = q.unflatten(-1, (2, 8)).transpose(1, 2)
        k = k.reshape(*k.shape[:2], 2, -1).permute(0, 2, 1, 3).contiguous()
        v = torch.stack(v.chunk(2, dim=-1), dim=1)
        turn = torch.polar(torch.ones(4), torch.arange(4.0))
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.float().unflatten(-1, (-1, 2))) * turn)
            .flatten(-2)
            .type_as(x)
            for y in (q, k)
        )
        q = functional.rms_norm(q, (8,)) * self.scale.repeat_interleave(2)
        first = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        second = torch_flex_attention(k, q, v, lambda s, b, h, i, j: s - 0.1 * (i - j))
        out = torch.cat([first, second], dim=1).masked_fill(torch.zeros((), dtype=torch.bool), 0.0)
        out = torch.einsum("bhld,d->bhld", out, self.scale.repeat(2))[..., :8]
        return x + self.drop((out @ out.new_ones(8, 4)).movedim(1, 2).flatten(2))


def test_what_surrounds_attention_is_traced_through_the_style():
    torch.manual_seed(0)
    module, x = Everything().eval(), torch.randn(2, 21, 16)

    def parallel(mesh):
        plan = flexcp.make_plan(masks.causal(), 21, mesh, num_heads=2, head_dim=8, block_size=8)
        parallelize_module(module, mesh, flexcp.ContextParallel(plan))
        return plan

    def plain(mesh):
        with torch.no_grad():
            return module(parallel(mesh).shard(x, 1))

    def traced(mesh):
        plan = parallel(mesh)
        with torch.no_grad():
            out = torch.compile(module, backend="eager", fullgraph=True)(plan.shard(x, 1))
        return plan.unshard(out, 1)

    found = testing.spawn(traced, 2, timeout=300.0)
    assert torch.equal(found[0], found[1])
    assert_close(found[0], testing.spawn(plain, 1)[0], what="out")


def test_errors_of_calls_come_out_of_compiled_models():
    class Module(nn.Module):
        def forward(self, x):
            return functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    def rank(mesh):
        plan = flexcp.make_plan(masks.full(), 9, mesh, num_heads=2, head_dim=8)
        module = parallelize_module(Module(), mesh, flexcp.ContextParallel(plan))
        compiled = torch.compile(module, backend="eager")
        with pytest.raises(FlexCPError, match="the plan's mask lets queries see later keys"):
            compiled(plan.shard(torch.randn(1, 2, 9, 8), 2))

    testing.spawn(rank, 1)
