"""Attached models as graphs of torch.compile: one for all batches, equal to one process."""

from __future__ import annotations

import copy

import pytest
import torch

from flexcp import FlexCPError
from flexcp.integrations import transformers as hf
from flexcp.integrations.transformers.global_masks import known_before_it_runs
from flexcp.integrations.transformers.traced_functions import asked_while_traced
from flexcp.testing import simulate, spawn
from tests.integrations.test_transformers_families import (
    _gemma3_with_images,
    skip_without_the_causal_loss,
)
from tests.integrations.tiny_models import (
    assert_same,
    batch_of,
    gradients,
    make,
    one_process,
)

pytestmark = pytest.mark.usefixtures("loaded_compiler")


class Graphs:
    """A backend that counts graphs, and runs them as they are."""

    def __init__(self):
        self.made = 0

    def __call__(self, graph, _):
        self.made += 1
        return graph.forward


def shallow(model):
    """With two layers, one of each kind that the family has: tracing takes seconds for each."""
    model.model.layers = model.model.layers[:2]
    return model


def compiled(model, way, **options):
    if way == "torch.compile(model)":
        return torch.compile(model, **options)
    model.compile(**options)
    return model


def step(call, model, cp, batch):
    """Logits, loss and gradients of one process, from those of the ranks."""
    model.zero_grad(set_to_none=True)
    out = call(**cp.shard(batch))
    out.loss.backward()
    found = cp.unshard(out.logits).detach(), cp.sum_over_ranks(out.loss)
    cp.sum_gradients()
    return *found, gradients(model)


def graphs_over(mesh, family, batches, way, **options):
    """How many graphs there were after each batch, each of which is as in one process."""
    torch._dynamo.reset()
    model = shallow(make(family)) if isinstance(family, str) else family()
    attached, graphs, counts = copy.deepcopy(model), Graphs(), []
    cp = hf.attach(attached, mesh)
    call = compiled(attached, way, backend=graphs, **options)
    for batch in batches:
        assert_same(step(call, attached, cp, batch), one_process(model, batch), batch)
        counts.append(graphs.made)
    return counts


KINDS = ("plain", "packed", "padded")


@pytest.mark.parametrize("way", ["torch.compile(model)", "model.compile()"])
def test_an_attached_model_is_one_graph_for_all_masks_of_a_length(way):
    """Documents are planned for, and padding: neither is part of the graph."""
    batches = [batch_of(kind, seed=seed) for seed, kind in enumerate(KINDS)]

    def run(mesh):
        return graphs_over(mesh, "qwen3", batches, way, fullgraph=True)

    assert simulate(run, 1) == [[1, 1, 1]]


LENGTHS = (("packed", 53), ("packed", 47), ("plain", 70), ("packed", 71))


def graphs_over_lengths(mesh, family):
    batches = [batch_of(kind, length=length, seed=length) for kind, length in LENGTHS]
    return graphs_over(mesh, family, batches, "torch.compile(model)", fullgraph=True)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen3", id="windows"),
        pytest.param("llama4", id="chunks, and temperatures by global positions"),
    ],
)
def test_other_lengths_are_served_by_a_second_graph_on_ranks(family):
    for counts in spawn(lambda mesh: graphs_over_lengths(mesh, family), 2):
        assert counts[-1] <= 2


def test_the_last_position_of_a_batch_is_no_part_of_the_graph():
    """The third is for what Transformers adds to its own module."""
    alone = torch.compile(shallow(make("phi3-longrope")), backend="eager", fullgraph=True)
    try:
        alone(**batch_of("plain"))
    except torch._dynamo.exc.Unsupported:
        pytest.skip("this version of Transformers branches on positions: no model is one graph")
    ((*_, graphs),) = simulate(lambda mesh: graphs_over_lengths(mesh, "phi3-longrope"), 1)
    assert graphs <= 3


def test_overlays_of_images_are_looked_at_between_graphs():
    """Whether they add something depends on what is in the batch."""
    skip_without_the_causal_loss(_gemma3_with_images())
    batches = [batch_of(kind, seed=seed) for seed, kind in enumerate(KINDS[:2])]
    for batch in batches:
        batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])

    def run(mesh):
        return graphs_over(mesh, _gemma3_with_images, batches, "torch.compile(model)")

    ((first, second),) = simulate(run, 1)
    assert first == second > 1


def test_a_compiled_model_refuses_tokens_that_are_not_the_ranks_own():
    def run(mesh):
        torch._dynamo.reset()
        model = shallow(make())
        cp = hf.attach(model, mesh)
        local = cp.shard(batch_of("plain"))
        for name in ("input_ids", "position_ids"):
            local[name] = local[name][:, :-1]
        for name in ("labels", "shift_labels"):
            del local[name]
        with pytest.raises(FlexCPError, match="52"):
            torch.compile(model, backend="eager")(**local)

    simulate(run, 1)


def test_what_a_traced_function_captures_is_known():
    from transformers.masking_utils import and_masks, packed_sequence_mask_function

    def with_documents(ids, window):
        def overlay(b, h, q, kv):
            return kv > q - window

        function = and_masks(overlay, packed_sequence_mask_function(ids))
        kind, separates = asked_while_traced(known_before_it_runs, function)
        return ids + len(kind) if separates else ids

    run = torch.compile(with_documents, backend="eager", fullgraph=True)
    ids = torch.zeros(1, 4, dtype=torch.long)
    name = "test_what_a_traced_function_captures_is_known(7)"
    assert run(ids, 7).unique().tolist() == [len(name)]
