"""Torch's own flex_attention under ContextParallel: what it may ask of a plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp import masks, testing
from flexcp.comm.rank_errors import RankError
from flexcp.compat.flex_attention import flex_attention as compat_flex_attention
from flexcp.integrations._torch_flex import refusal_behind
from flexcp.testing.tolerance import assert_close

from .attention_layer import (
    LENGTH,
    PACKED,
    X,
    assert_same,
    bias,
    layer,
    message_of,
    plan_for,
    sharded,
    whole,
)

WHOLE_MASK = create_block_mask(PACKED.mask_mod, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)


def own_rows(q):
    return create_block_mask(PACKED.mask_mod, None, None, q.shape[2], q.shape[2], "cpu")


def no_rows():
    """A mask that allows nothing, in the form of the one that torch makes for a call without."""
    return BlockMask.from_kv_blocks(
        torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        BLOCK_SIZE=1 << 30,
    )  # fmt: skip


MASKED = {
    "of the whole sequence": lambda q: flex_attention(q, q, q, block_mask=WHOLE_MASK),
    "of the rank's rows": lambda q: flex_attention(q, q, q, block_mask=own_rows(q)),
    "that allows nothing": lambda q: flex_attention(q, q, q, block_mask=no_rows()),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_block_mask_is_refused_with_the_function_that_takes_it(name, ranks):
    told = message_of(lambda mesh: sharded(mesh, lambda q, k, v: MASKED[name](q)), ranks)
    assert "no block_mask in a call of torch's flex_attention" in told
    assert "or call flexcp.flex_attention" in told


@pytest.mark.parametrize("function", [compat_flex_attention, flexcp.flex_attention])
def test_the_functions_that_it_names_take_it(function):
    def attend(q, k, v):
        return function(q, k, v, block_mask=WHOLE_MASK, enable_gqa=True)

    assert_same(testing.simulate(lambda mesh: sharded(mesh, attend), 2), whole())


def test_tuning_options_are_refused_and_torchs_own_defaults_are_not():
    def attend(options):
        return lambda q, k, v: flex_attention(q, k, v, kernel_options=options, enable_gqa=True)

    told = message_of(lambda mesh: sharded(mesh, attend({"BLOCK_M": 64, "BACKEND": "FLASH"})))
    assert "got kernel_options={'BLOCK_M': 64, 'BACKEND': 'FLASH'}; leave them out" in told
    results = testing.simulate(lambda mesh: sharded(mesh, attend({"PRESCALE_QK": False})), 2)
    assert_same(results, whole())


@pytest.mark.parametrize("mod", [None, bias], ids=["no score_mod", "a score_mod"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_it_is_recomputed_over_the_same_plan(mod, reentrant):
    """Whichever of torch's graphs runs it again keeps for the backward pass what the first kept."""

    def attend(q, k, v):
        return checkpoint(
            lambda q, k, v: flex_attention(q, k, v, mod, enable_gqa=True),
            q, k, v, use_reentrant=reentrant,
        )  # fmt: skip

    torch._dynamo.reset()
    results = testing.simulate(lambda mesh: sharded(mesh, attend), 2)
    assert_same(results, whole(score_mod=mod))


@pytest.mark.parametrize("mod", [None, bias], ids=["no score_mod", "a score_mod"])
def test_every_step_has_its_own_plan(mod):
    """Torch compiles a call once for all: another plan must not run as the one before."""
    steps = [PACKED, masks.sliding_window(5), PACKED]

    def rank(mesh):
        style, outs = flexcp.ContextParallel(), []
        module = layer(lambda q, k, v: flex_attention(q, k, v, mod, enable_gqa=True))
        parallelize_module(module, mesh, style)
        for mask in steps:
            with style.using(plan_for(mesh, mask)) as plan:
                outs.append(plan.unshard(module(plan.shard(X, 1)).detach(), 1))
        return outs

    wanted = [whole(mask, score_mod=mod)[0] for mask in steps]
    for found in testing.simulate(rank, 2):
        for out, want in zip(found, wanted, strict=True):
            assert_close(out, want, what="out")


def test_gradients_of_lse_come_through():
    q = torch.randn(1, 2, LENGTH, 4, dtype=torch.float64)

    class Module(nn.Module):
        def forward(self, x):
            _, aux = flex_attention(x, x, x, return_aux=AuxRequest(lse=True))
            return aux.lse

    def rank(mesh):
        plan = plan_for(mesh)
        module = parallelize_module(Module(), mesh, flexcp.ContextParallel(plan))
        x = plan.shard(q, 2).requires_grad_()
        module(x).square().sum().backward()
        return plan.unshard(x.grad, 2)

    x = q.clone().requires_grad_()
    flexcp.flex_attention(x, x, x, block_mask=PACKED, return_lse=True)[1].square().sum().backward()
    for found in testing.simulate(rank, 2):
        assert_close(found, x.grad, what="gradient")


@pytest.mark.usefixtures("loaded_compiler")
def test_gradients_on_cpu_in_a_whole_graph_are_refused_and_compats_function_gives_them():
    def compiled(function):
        def attend(q, k, v):
            return function(q, k, v, enable_gqa=True)

        return torch.compile(attend, backend="aot_eager", fullgraph=True)

    def refused(mesh):
        sharded(mesh, compiled(flex_attention))

    with pytest.raises(RankError, match="no gradients on CPU here, where torch's own flex"):
        testing.spawn(refused, 1)
    attend = compiled(compat_flex_attention)
    assert_same(testing.spawn(lambda mesh: sharded(mesh, attend), 2), whole())


def test_outside_of_a_style_it_refuses_gradients_as_ever():
    x = torch.randn(1, 2, 8, 4, requires_grad=True)

    def rank(mesh):
        plan = plan_for(mesh)
        parallelize_module(layer(None), mesh, flexcp.ContextParallel(plan))
        with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
            flex_attention(x, x, x)

    testing.simulate(rank, 1)


def test_errors_of_others_stay_as_they_are():
    assert refusal_behind(ValueError("of the model")) is None
    own = flexcp.FlexCPError("a", "b", "c")
    assert refusal_behind(own) is None
    other = KeyError("from code that handles our errors")
    other.__context__ = own
    assert refusal_behind(other) is None
