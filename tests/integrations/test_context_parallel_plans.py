"""The plan of a step: shared by styles, switched off, kept for recomputation, and copied along."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp import masks, testing
from flexcp.testing.tolerance import assert_close

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


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_checkpointed_around_the_module_is_recomputed_alike(reentrant):
    def run(module, x):
        return checkpoint(module, x, use_reentrant=reentrant)

    results = testing.simulate(lambda mesh: sharded(mesh, ATTENTIONS["sdpa"], run=run), 3)
    assert_same(results, whole())


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_checkpointed_within_the_module_is_recomputed_alike(reentrant):
    def attend(q, k, v):
        return checkpoint(ATTENTIONS["sdpa"], q, k, v, use_reentrant=reentrant)

    results = testing.simulate(lambda mesh: sharded(mesh, attend), 3)
    assert_same(results, whole())


OTHER = masks.causal() & masks.document(lengths=[20, 17])


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_every_step_is_recomputed_under_its_own_plan(reentrant):
    """Both forward passes come before one backward pass, which is under neither plan."""

    def rank(mesh):
        style = flexcp.ContextParallel()
        module = parallelize_module(layer(ATTENTIONS["sdpa"]), mesh, style)
        losses = []
        for mask in (PACKED, OTHER):
            with style.using(plan_for(mesh, mask)) as plan:
                x = plan.shard(X, 1).requires_grad_()
                if reentrant is None:
                    out = module(x)
                else:
                    out = checkpoint(module, x, use_reentrant=reentrant)
                losses.append(out.square().sum())
        assert style.plan is None
        sum(losses).backward()
        return [p.grad for p in module.parameters()]

    wanted = [a + b for a, b in zip(whole()[2], whole(OTHER)[2], strict=True)]
    for *parts, want in zip(*testing.simulate(rank, 2), wanted, strict=True):
        assert_close(sum(parts), want, what="a parameter's gradient")


def test_nested_checkpoints_are_recomputed_under_their_plan():
    def inner(module, x):
        return checkpoint(module, x, use_reentrant=False)

    def rank(mesh):
        style = flexcp.ContextParallel(plan_for(mesh, masks.full()))
        module = parallelize_module(layer(ATTENTIONS["flexcp flex"]), mesh, style)
        with style.using(plan_for(mesh)) as plan:
            x = plan.shard(X, 1).requires_grad_()
            loss = checkpoint(inner, module, x, use_reentrant=False).square().sum()
        loss.backward()
        return [p.grad for p in module.parameters()]

    for *parts, want in zip(*testing.simulate(rank, 2), whole()[2], strict=True):
        assert_close(sum(parts), want, what="a parameter's gradient")


def test_layers_with_several_masks_share_the_plan_of_a_step():
    model = nn.Sequential(layer(ATTENTIONS["flexcp flex"]), layer(ATTENTIONS["flexcp flex"], 1))
    two = {"full": masks.causal(), "local": masks.sliding_window(4)}
    x = X
    for module, mask in zip(model, two.values(), strict=True):
        one = copy.deepcopy(module)
        one.attend = lambda q, k, v, mask=mask: flexcp.flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True
        )
        x = one(x)

    def rank(mesh):
        cp = flexcp.ContextParallel()
        mine = parallelize_module(
            copy.deepcopy(model), mesh, {"0": cp.with_mask("full"), "1": cp.with_mask("local")}
        )
        with cp.using(plan_for(mesh, two)) as plan:
            return plan.unshard(mine(plan.shard(X, 1)), 1)

    for found in testing.simulate(rank, 2):
        assert_close(found, x, what="out")


def test_a_disabled_style_leaves_whole_sequences_to_the_module():
    def rank(mesh):
        style = flexcp.ContextParallel(plan_for(mesh))
        module = parallelize_module(layer(ATTENTIONS["sdpa"]), mesh, style)
        with style.disabled():
            return torch.equal(module(X), layer(ATTENTIONS["sdpa"])(X))

    assert testing.simulate(rank, 2) == [True, True]


def test_nothing_stays_changed_after_a_module_has_raised():
    import torch.utils.checkpoint as torch_checkpoint

    before = torch_checkpoint.CheckpointFunction
    x = torch.randn(1, 4, LENGTH, 4, dtype=torch.float64)
    want = torch_flex_attention(x, x, x)

    def attend(q, k, v):
        raise KeyError("in the middle")

    def rank(mesh):
        style = flexcp.ContextParallel()
        module = parallelize_module(layer(attend), mesh, style)
        with pytest.raises(KeyError, match="in the middle"), style.using(plan_for(mesh)) as plan:
            module(plan.shard(X, 1))
        assert style.plan is None

    testing.simulate(rank, 2)
    assert torch_checkpoint.CheckpointFunction is before
    assert torch.equal(torch_flex_attention(x, x, x), want)
    assert torch.overrides._get_current_function_mode_stack() == []


def test_a_copy_of_a_model_keeps_its_style():
    def rank(mesh):
        plan = plan_for(mesh)
        style = flexcp.ContextParallel(plan)
        module = parallelize_module(layer(ATTENTIONS["sdpa"]), mesh, style)
        other = copy.deepcopy(module)
        nn.init.zeros_(other.out.weight)
        x = plan.shard(X, 1)
        return bool(module(x).std() > 0), bool((other(x) - other.out.bias).abs().max() == 0)

    assert testing.simulate(rank, 2) == [(True, True)] * 2


def test_other_kinds_of_recomputation_are_refused_once_plans_change():
    """A module that runs in a backward pass for reasons of its own has no plan of its own."""

    def rank(mesh):
        style = flexcp.ContextParallel()
        module = parallelize_module(layer(ATTENTIONS["sdpa"]), mesh, style)
        with style.using(plan_for(mesh)) as plan:
            x = plan.shard(X, 1).requires_grad_()
            x.register_hook(lambda grad: module(x.detach()))
            x.sum().backward()

    assert "a module that runs in a backward pass, while plans change" in message_of(rank)
