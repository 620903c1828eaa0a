"""What is kept for a kind of call serves only calls of that kind, and transforms see through it."""

from __future__ import annotations

import pytest
import torch

import flexcp
from flexcp import FlexCPError, masks, testing
from flexcp.comm import RankError

LENGTH = 61
FULL = [torch.randn(1, h, LENGTH, 8, dtype=torch.float64) for h in (4, 2, 2)]


def plan_for(mesh, **how):
    return flexcp.make_plan(
        masks.causal(), LENGTH, mesh, num_heads=4, num_kv_heads=2, head_dim=8,
        dtype=torch.float64, **how,
    )  # fmt: skip


def expected(scale=None):
    return flexcp.flex_attention(*FULL, block_mask=masks.causal(), scale=scale, enable_gqa=True)


def test_a_scale_that_changes_in_place_is_read_at_every_call():
    def rank(mesh):
        plan, scale = plan_for(mesh), torch.tensor(0.5)
        local = [plan.shard(x, 2) for x in FULL]
        first = flexcp.attention(*local, plan, scale=scale)
        scale.fill_(2.0)
        second = flexcp.attention(*local, plan, scale=scale)
        return plan.unshard(first, 2), plan.unshard(second, 2)

    first, second = testing.simulate(rank, 3)[1]
    torch.testing.assert_close(first, expected(0.5))
    torch.testing.assert_close(second, expected(2.0))


@pytest.mark.parametrize("call", ["flex_attention", "attention"])
def test_a_scale_that_would_need_a_gradient_is_refused(call):
    scale = torch.tensor(0.5, requires_grad=True)

    def rank(mesh):
        if call == "flex_attention":
            flexcp.flex_attention(*FULL, scale=scale, enable_gqa=True)
        plan = plan_for(mesh)
        flexcp.attention(*(plan.shard(x, 2) for x in FULL), plan, scale=scale)

    with pytest.raises((RankError, FlexCPError), match="multiply the query by it"):
        testing.simulate(rank, 1)


@pytest.mark.parametrize("schedule", ["exchange", "ulysses"])
def test_torch_func_differentiates_attention_over_a_new_plan(schedule):
    def rank(mesh):
        plan = plan_for(mesh, schedule=schedule)
        local = [plan.shard(x, 2) for x in FULL]

        def loss(*tensors):
            return flexcp.attention(*tensors, plan).square().sum()

        found = torch.func.grad(loss, argnums=(0, 1, 2))(*local)
        leaves = [x.clone().requires_grad_() for x in local]
        for a, b in zip(found, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(a, b)
        return True

    assert testing.simulate(rank, 2) == [True, True]


def test_calls_that_differ_in_one_thing_do_not_share_what_is_kept():
    def rank(mesh):
        plan = plan_for(mesh)
        q, k, v = (plan.shard(x, 2) for x in FULL)
        sinks = torch.zeros(4, dtype=torch.float64)
        calls = [
            {},
            {"scale": 0.3},
            {"sinks": sinks},
            {"sinks": sinks, "scale": 0.3},
        ]
        outs = [flexcp.attention(q, k, v, plan, **call) for call in calls for _ in range(2)]
        singles = [flexcp.attention(q.float(), k.float(), v.float(), plan)]
        return [plan.unshard(x, 2) for x in (*outs[::2], *outs[1::2], *singles)]

    found = testing.simulate(rank, 2)[0]
    sinks = torch.zeros(4, dtype=torch.float64)
    want = [
        flexcp.flex_attention(*FULL, block_mask=masks.causal(), enable_gqa=True, **call)
        for call in ({}, {"scale": 0.3}, {"sinks": sinks}, {"sinks": sinks, "scale": 0.3})
    ]
    for a, b in zip(found[:8], [*want, *want], strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(found[8], want[0].float(), atol=2e-5, rtol=1e-5)
