"""Models from Transformers compute over several ranks what they compute in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from flexcp import FlexCPError
from flexcp.integrations import transformers as hf
from flexcp.testing import simulate, spawn
from flexcp.testing.tolerance import relative_error
from tests.integrations.tiny_models import (
    FAMILIES,
    LENGTH,
    assert_same,
    batch_of,
    gradients,
    make,
    on_rank,
    one_process,
    restarting,
    tokens,
)

KINDS = ["plain", "packed", "padded"]

pytestmark = pytest.mark.filterwarnings("ignore:position_ids start again, but GptOss")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_on_three_ranks_is_the_model_on_one(family, kind):
    model, batch = make(family), batch_of(kind)
    expected = one_process(model, batch)
    for actual in simulate(lambda mesh: on_rank(model, mesh, batch), 3):
        assert_same(actual, expected, batch)


@pytest.mark.parametrize("layers", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_a_model_may_make_masks_that_none_of_its_layers_uses(family, layers):
    config = make(family).config
    config.layer_types = [layers] * config.num_hidden_layers
    torch.manual_seed(0)
    model, batch = AutoModelForCausalLM.from_config(config).train(), batch_of("packed")
    expected = one_process(model, batch)
    assert_same(simulate(lambda mesh: on_rank(model, mesh, batch), 2)[1], expected, batch)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt-oss"])
def test_a_model_on_two_processes_is_the_model_on_one(family):
    model, batch = make(family), batch_of("padded")
    expected = one_process(model, batch)
    for actual in spawn(lambda mesh: on_rank(model, mesh, batch), 2):
        assert_same(actual, expected, batch)


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_one_rank_has_nothing_to_exchange(family):
    model, batch = make(family), batch_of("packed")
    expected = one_process(model, batch)
    assert_same(simulate(lambda mesh: on_rank(model, mesh, batch), 1)[0], expected, batch)


@pytest.mark.parametrize("schedule", ["ring", "allgather", "ulysses", "exchange"])
def test_schedules_make_no_difference(schedule):
    model, batch = make("qwen3"), batch_of("packed")
    expected = one_process(model, batch)
    actual = simulate(lambda mesh: on_rank(model, mesh, batch, schedule=schedule), 2)[0]
    assert_same(actual, expected, batch)


def test_a_mesh_of_two_dimensions_shares_heads_too():
    model, batch = make("gpt-oss"), batch_of("plain")
    expected = one_process(model, batch)
    actual = simulate(lambda mesh: on_rank(model, mesh, batch, schedule="hybrid"), (2, 2))[3]
    assert_same(actual, expected, batch)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss"])
def test_layers_may_be_computed_again_in_backward(family, reentrant):
    model, batch = make(family), batch_of("packed")
    expected = one_process(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    actual = simulate(lambda mesh: on_rank(model, mesh, batch), 3)[1]
    assert_same(actual, expected, batch)


@pytest.mark.parametrize("reentrant", [False, True])
def test_every_backward_pass_uses_the_plan_of_its_own_forward_pass(reentrant):
    model = make("qwen3")
    first, second = batch_of("packed"), batch_of("plain", batch=1, length=38)
    expected = [one_process(model, batch) for batch in (first, second)]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def rank(mesh):
        copied = copy.deepcopy(model)
        cp = hf.attach(copied, mesh)
        parts = [cp.shard(batch) for batch in (first, second)]
        losses = [copied(**part).loss for part in parts]
        sum(losses).backward()
        cp.sum_gradients()
        return [cp.sum_over_ranks(loss) for loss in losses], gradients(copied)

    losses, summed = simulate(rank, 3)[0]
    for loss, one in zip(losses, expected, strict=True):
        assert relative_error(loss, one[1]) < 1e-6
    for name, gradient in summed.items():
        assert relative_error(gradient, expected[0][2][name] + expected[1][2][name]) < 1e-5


@pytest.mark.parametrize("how", ["document_ids", "seq_idx", "cu_seq_lens_q", "lengths"])
def test_documents_may_be_named_in_several_ways(how):
    model, ids = make("qwen3"), tokens(1)
    positions = restarting([20, 27], LENGTH)[None]
    expected = one_process(
        model, {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}
    )
    names = torch.tensor([4] * 20 + [2] * 7 + [9] * 26)
    extra = {
        "document_ids": {"document_ids": names},
        "seq_idx": {"seq_idx": names[None].int()},
        "cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, 20, 27, 53]), "max_length_q": 26},
        "lengths": {},
    }[how]
    batch = {"input_ids": ids, "labels": ids, **extra}
    named = {"documents": [20, 7, 26]} if how == "lengths" else {}

    def rank(mesh):
        copied = copy.deepcopy(model)
        cp = hf.attach(copied, mesh)
        out = copied(**cp.shard(batch, **named))
        out.loss.backward()
        cp.sum_gradients()
        return cp.unshard(out.logits).detach(), cp.sum_over_ranks(out.loss), gradients(copied)

    assert_same(simulate(rank, 2)[0], expected, batch)


def test_named_documents_and_padding_go_together():
    model, ids = make(), tokens(1)
    documents = torch.tensor([0] * 20 + [1] * 33)[None]
    mask = torch.ones_like(ids)
    mask[:, -9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    whole = {"input_ids": ids, "attention_mask": mask, "document_ids": documents}

    def rank(mesh):
        copied = copy.deepcopy(model)
        cp = hf.attach(copied, mesh)
        return cp.unshard(copied(**cp.shard({**whole, "labels": labels})).logits).detach()

    logits = simulate(rank, 3)[0]
    for start, stop in ((0, 20), (20, 44)):
        alone = model(input_ids=ids[:, start:stop]).logits
        assert relative_error(logits[:, start:stop], alone) < 1e-5


def test_labels_across_documents_count_as_in_transformers_unless_declined():
    model, batch = make(), batch_of("packed")
    starts = batch["position_ids"] == 0
    within = {**batch, "labels": batch["labels"].masked_fill(starts, -100)}

    def rank(mesh, choice):
        cp = hf.attach(copy.deepcopy(model), mesh)
        return cp.sum_over_ranks(cp.model(**cp.shard(batch, score_across_documents=choice)).loss)

    for choice, reference in ((True, batch), (False, within)):
        loss = simulate(lambda mesh, choice=choice: rank(mesh, choice), 2)[0]
        assert relative_error(loss, model(**reference).loss.detach()) < 1e-6


def test_embeddings_may_be_given_instead_of_tokens():
    model, ids = make(), tokens()
    embeddings = model.get_input_embeddings()(ids).detach()
    expected = one_process(model, {"inputs_embeds": embeddings, "labels": ids})
    batch = {"inputs_embeds": embeddings, "labels": ids}
    assert_same(simulate(lambda mesh: on_rank(model, mesh, batch), 3)[2], expected, batch)


def test_averaged_gradients_are_those_of_one_process():
    model, batch = make(), batch_of("padded")
    expected = one_process(model, batch)

    def rank(mesh):
        logits, loss, summed = on_rank(model, mesh, batch, gradients="averaged")
        return logits, loss / 3, {name: x / 3 for name, x in summed.items()}

    assert_same(simulate(rank, 3)[0], expected, batch)


def test_parameters_may_be_sharded_too():
    model, batch = make("gemma3"), batch_of("packed")
    expected = one_process(model, batch)

    def rank(mesh):
        copied = copy.deepcopy(model)
        for layer in copied.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(copied, mesh=mesh)
        cp = hf.attach(copied, mesh, gradients="averaged")
        out = copied(**cp.shard(batch))
        out.loss.backward()
        with pytest.raises(FlexCPError, match="leave gradients to FSDP"):
            cp.sum_gradients()
        whole = {name: x.full_tensor() for name, x in gradients(copied).items()}
        return cp.unshard(out.logits).detach(), cp.sum_over_ranks(out.loss) / 2, whole

    assert_same(spawn(rank, 2)[1], expected, batch)


def test_a_given_number_of_items_is_what_the_loss_is_divided_by():
    model, batch = make(), batch_of("plain") | {"num_items_in_batch": 1000}
    expected = one_process(model, batch)
    assert_same(simulate(lambda mesh: on_rank(model, mesh, batch), 2)[0], expected, batch)


def test_a_bidirectional_decoder_keeps_seeing_both_ways():
    model, batch = make("mistral"), batch_of("padded")
    model.config.is_causal = False
    expected = one_process(model, batch)
    assert_same(simulate(lambda mesh: on_rank(model, mesh, batch), 3)[0], expected, batch)


@pytest.mark.parametrize("ranks", [1, 2])
def test_autocast_casts_as_it_does_for_torch(ranks):
    model, batch = make("qwen3"), batch_of("plain")

    def rank(mesh):
        with torch.autocast("cpu", torch.bfloat16):
            return on_rank(model, mesh, batch)

    with torch.autocast("cpu", torch.bfloat16):
        expected = one_process(model, batch)
    assert relative_error(simulate(rank, ranks)[0][1], expected[1]) < 0.01


def test_bfloat16_models_agree_as_far_as_their_type_does():
    model, batch = make("gemma3").bfloat16(), batch_of("plain")
    expected = one_process(model, batch)
    actual = simulate(lambda mesh: on_rank(model, mesh, batch), 2)[0]
    assert relative_error(actual[1], expected[1]) < 0.01
