"""Styles that no module has, and patterns that match none, are errors before anything is wrong."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import flexcp
from flexcp import FlexCPError, masks, testing
from flexcp.testing.tolerance import assert_close

from .attention_layer import ATTENTIONS, PACKED, X, layer, message_of, plan_for, whole

TWO = {"full": masks.causal(), "local": masks.sliding_window(4)}


def model_of(layers=2):
    attention = [layer(ATTENTIONS["sdpa"]) for _ in range(layers)]
    return nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"attn": x}) for x in attention)})


def test_a_pattern_that_matches_modules_applies_the_style_to_all_of_them():
    def rank(mesh):
        plan = plan_for(mesh)
        model = nn.Sequential(layer(ATTENTIONS["sdpa"]))
        assert flexcp.parallelize(model, mesh, {"*": flexcp.ContextParallel(plan)}) is model
        return plan.unshard(model(plan.shard(X, 1)), 1)

    for found in [*testing.simulate(rank, 2), *testing.spawn(rank, 3)]:
        assert_close(found, whole()[0], what="out")


def test_a_style_may_be_for_the_model_itself():
    def rank(mesh):
        plan = plan_for(mesh)
        style = flexcp.ContextParallel(plan)
        module = flexcp.parallelize(layer(ATTENTIONS["sdpa"]), mesh, style)
        by_name = flexcp.parallelize(layer(ATTENTIONS["sdpa"]), mesh, {"": style})
        x = plan.shard(X, 1)
        return torch.equal(module(x), by_name(x))

    assert testing.simulate(rank, 2) == [True, True]


def test_patterns_that_match_nothing_are_named_with_the_modules_that_are_meant():
    def rank(mesh):
        style = flexcp.ContextParallel(plan_for(mesh))
        styles = {"layers.*.attn": style, "layers.*.attnn": style, "block.0": style}
        flexcp.parallelize(model_of(), mesh, styles)

    message = message_of(rank)
    assert "expected patterns that match modules of ModuleDict: 'layers." in message
    assert "'layers.0.attn', 'layers.1.attn', " in message
    assert "got 'layers.*.attnn', 'block.0', which match none; write the path" in message


def test_nothing_is_applied_if_a_pattern_matches_nothing():
    def rank(mesh):
        plan, model = plan_for(mesh), model_of(1)
        for styles in ({"layers.0.attn": 0, "layer": 0}, {"layers.*.attn": 0}):
            styles = {name: flexcp.ContextParallel(plan) for name in styles}
            try:
                flexcp.parallelize(model, mesh, styles)
            except FlexCPError:
                with pytest.raises(FlexCPError, match="which no module has"):
                    plan.shard(X, 1)
        return len(plan.shard(X, 1).shape)

    assert testing.simulate(rank, 1) == [3]


def test_a_long_list_of_modules_is_cut_after_those_that_are_close():
    model = nn.Sequential(*(nn.ReLU() for _ in range(20)))
    with pytest.raises(FlexCPError, match=r"Sequential: '1', .* and 12 more, got '1x', whi"):
        flexcp.parallelize(model, None, {"1x": ColwiseParallel()})


def test_styles_of_torch_work_as_with_torch():
    def rank(mesh):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
        want = model(torch.ones(2, 6))
        mesh = init_device_mesh("cpu", (2,))
        flexcp.parallelize(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return float((model(torch.ones(2, 6)) - want).abs().max())

    assert max(testing.spawn(rank, 2)) < 1e-6


@pytest.mark.parametrize("run", [testing.simulate, testing.spawn])
def test_a_style_that_was_applied_to_nothing_is_an_error_when_its_plan_shards(run):
    def rank(mesh):
        plan, model = plan_for(mesh), model_of()
        parallelize_module(model, mesh, {"layers.*.attnn": flexcp.ContextParallel(plan)})
        messages = []
        for shard in (lambda: plan.shard(X, 1), lambda: flexcp.shard_batch(
            {"input_ids": torch.zeros(1, 37, dtype=torch.int64)}, plan)):  # fmt: skip
            with pytest.raises(FlexCPError) as caught:
                shard()
            messages.append(str(caught.value))
        flexcp.parallelize(model, mesh, {"layers.0.attn": flexcp.ContextParallel(plan)})
        return messages, plan.shard(X, 1).shape[0]

    for messages, batch in run(rank, 2):
        assert batch == 2
        for message in messages:
            assert "every style to be applied to a module before plan.shard" in message
            assert "got ContextParallel(), which no module has" in message
            assert "flexcp.parallelize(model, mesh, {pattern: style})" in message


def test_a_style_that_was_applied_to_nothing_is_an_error_however_tensors_are_sharded():
    def rank(mesh):
        plan = plan_for(mesh)
        style = flexcp.ContextParallel(plan)
        compiled = torch.compile(lambda x: plan.shard(x, 1) * 1, backend="aot_eager")
        for shard in (plan.positions, lambda: compiled(X)):
            with pytest.raises(FlexCPError, match="which no module has"):
                shard()
        return style

    testing.simulate(rank, 1)


def test_a_style_for_every_step_is_an_error_before_its_first_step():
    def rank(mesh):
        style = flexcp.ContextParallel()
        parallelize_module(model_of(), mesh, {"layers.*.attnn": style})
        with style.using(plan_for(mesh)):
            pass

    assert "before using(plan), got ContextParallel(), which no module has" in message_of(rank)


def test_of_styles_that_share_a_step_each_has_to_be_applied():
    def rank(mesh):
        cp, model = flexcp.ContextParallel(), model_of()
        styles = {"layers.0.attn": cp.with_mask("full"), "layers.2.attn": cp.with_mask("local")}
        parallelize_module(model, mesh, styles)
        with cp.using(plan_for(mesh, TWO)):
            pass

    assert "got ContextParallel(mask='local'), which no module has" in message_of(rank)


def test_the_style_that_others_are_made_of_needs_no_module():
    def rank(mesh):
        plan = plan_for(mesh, TWO)
        cp = flexcp.ContextParallel(plan)
        flexcp.parallelize(model_of(1), mesh, {"layers.0.attn": cp.with_mask("full")})
        return plan.shard(X, 1).dim()

    assert testing.simulate(rank, 1) == [3]


def test_a_batch_may_be_sharded_before_the_style_is_made():
    def rank(mesh):
        plan = plan_for(mesh)
        x = plan.shard(X, 1)
        module = flexcp.parallelize(layer(ATTENTIONS["sdpa"]), mesh, flexcp.ContextParallel(plan))
        with flexcp.ContextParallel().disabled():
            return plan.unshard(module(x), 1)

    for found in testing.simulate(rank, 2):
        assert_close(found, whole()[0], what="out")


def test_a_plan_that_waits_for_a_style_may_travel_without_it():
    plan = flexcp.make_plan(PACKED, 37, 2)
    from flexcp.plan.styles import StyleMark

    plan.unapplied_styles.expect(StyleMark("ContextParallel()"))
    assert not pickle.loads(pickle.dumps(plan.unapplied_styles)).marks
