"""Attaching, detaching, and what is refused by name."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MambaConfig,
    OPTConfig,
    Qwen3NextConfig,
    T5Config,
    T5Model,
)

from flexcp import FlexCPError
from flexcp.comm.rank_errors import RankError
from flexcp.integrations import transformers as hf
from flexcp.testing import simulate
from flexcp.testing.tolerance import assert_close, relative_error
from tests.integrations.tiny_models import SIZES, batch_of, make, on_rank, one_process, tokens


def attached(model, act, ranks=1):
    """Runs act(cp) on a copy of the model that is attached to simulated ranks."""
    return simulate(lambda mesh: act(hf.attach(copy.deepcopy(model), mesh)), ranks)[0]


def refused(match, fn):
    with pytest.raises(RankError, match=match) as caught:
        fn()
    assert isinstance(caught.value.__cause__, FlexCPError)


def test_detach_undoes_attach():
    model, batch = make("gemma3"), batch_of("packed")
    before, text = one_process(model, batch), model.config.to_json_string()

    def rank(mesh):
        copied = copy.deepcopy(model)
        hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in copied.modules()]
        cp = hf.attach(copied, mesh)
        assert copied.config._attn_implementation == "flexcp"
        copied(**cp.shard(batch))
        hf.detach(copied)
        cp.detach()  # once more does nothing
        assert copied.config._attn_implementation == "sdpa"
        assert copied.config.to_json_string() == text
        assert hooks == [
            len(m._forward_pre_hooks) + len(m._forward_hooks) for m in copied.modules()
        ]
        return one_process(copied, batch)

    after = simulate(rank, 2)[1]
    assert torch.equal(after[0], before[0])
    with pytest.raises(FlexCPError, match="expected an attached model"):
        hf.detach(model)


def test_saved_models_know_nothing_of_it(tmp_path):
    def rank(mesh):
        cp = hf.attach(make(), mesh)
        cp.model.save_pretrained(tmp_path)

    simulate(rank, 1)
    assert "flexcp" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"


def test_models_made_from_one_configuration_are_attached_one_by_one():
    config, ids = LlamaConfig(**SIZES), tokens()

    def rank(mesh):
        torch.manual_seed(0)
        cp = hf.attach(AutoModelForCausalLM.from_config(config), mesh)
        batch = {"input_ids": ids, "labels": ids}
        return cp.sum_over_ranks(cp.model(**cp.shard(batch)).loss)

    torch.manual_seed(0)
    alone = AutoModelForCausalLM.from_config(config)(input_ids=ids, labels=ids).loss.detach()
    assert all(relative_error(loss, alone) < 1e-6 for loss in simulate(rank, 2))
    assert config._attn_implementation == "sdpa"


def test_masks_that_come_again_are_not_planned_again():
    def act(cp):
        plans = []
        for seed, kind in enumerate(["plain", "packed", "plain", "packed", "padded"]):
            cp.shard(batch_of(kind, seed=seed))
            plans.append(cp.plan)
        ones = batch_of("plain") | {"attention_mask": torch.ones(2, 53)}
        cp.shard(ones)
        return plans[0] is plans[2] is cp.plan, plans[1] is plans[3], len(cp._plans)

    assert attached(make(), act) == (True, True, 3)


def test_all_layer_types_share_a_layout():
    def act(cp):
        cp.shard(batch_of("packed"))
        return sorted(cp.plan.grids)

    assert attached(make("gemma3"), act) == ["full_attention", "sliding_attention"]
    assert attached(make("llama4"), act) == ["chunked_attention", "full_attention"]


def test_the_batch_of_a_rank_can_be_moved_like_any_batch():
    def act(cp):
        local = {k: v.to("cpu") for k, v in cp.shard(batch_of("plain")).items()}
        return cp.model(**local).loss.item()

    assert attached(make(), act) > 0


def test_a_model_within_another_module_is_found():
    class Wrapper(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, **kwargs):
            return self.inner(**kwargs).loss

    model, batch = Wrapper(make()), batch_of("plain")

    def rank(mesh):
        copied = copy.deepcopy(model)
        cp = hf.attach(copied, mesh)
        return cp.sum_over_ranks(copied(**cp.shard(batch)))

    assert relative_error(simulate(rank, 2)[0], model(**batch).detach()) < 1e-6
    with pytest.raises(FlexCPError, match="a model from Transformers"):
        hf.attach(torch.nn.Linear(2, 2), 1)


@pytest.mark.parametrize(
    ("make_model", "what"),
    [
        (lambda: T5Model(T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=2)), "encoder"),
        (
            lambda: LlamaForSequenceClassification(LlamaConfig(**SIZES)),
            "looks at chosen tokens of the whole sequence",
        ),
        (
            lambda: AutoModelForCausalLM.from_config(
                MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=9)
            ),
            "MambaForCausalLM",
        ),
        (
            lambda: AutoModelForCausalLM.from_config(
                Qwen3NextConfig(**{**SIZES, "num_hidden_layers": 4}, num_experts=2)
            ),
            "linear_attention in Qwen3NextForCausalLM",
        ),
        (
            lambda: AutoModelForCausalLM.from_config(
                BloomConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=9)
            ),
            "AttentionInterface, got BloomForCausalLM",
        ),
    ],
    ids=["t5", "classification", "mamba", "qwen3-next", "bloom"],
)
def test_models_that_mix_tokens_otherwise_are_refused(make_model, what):
    model = make_model()
    with pytest.raises(FlexCPError, match=what):
        hf.attach(model, 1)
    with pytest.raises(FlexCPError, match="expected an attached model"):
        hf.detach(model)


def test_a_copy_of_an_attached_model_is_attached_and_detached_by_itself():
    def act(cp):
        copied = copy.deepcopy(cp.model)
        batch = batch_of("plain")
        same = torch.equal(cp.model(**cp.shard(batch)).logits, copied(**cp.shard(batch)).logits)
        hf.detach(copied)
        copied(input_ids=batch["input_ids"])
        names = [m.config._attn_implementation for m in (cp.model, copied)]
        cp.model(**cp.shard(batch))
        return same, names

    assert attached(make(), act) == (True, ["flexcp", "sdpa"])


def test_a_number_of_ranks_is_no_mesh():
    with pytest.raises(FlexCPError, match="got the number of ranks 2"):
        hf.attach(make(), 2)


def test_attaching_twice_is_refused():
    refused(
        "simulated ranks need a copy",
        lambda: attached(make(), lambda cp: hf.attach(cp.model, cp.mesh)),
    )


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ({"attention_mask": torch.ones(2, 1, 53, 53)}, "a 4-D mask"),
        ({"attention_mask": {"full_attention": None}}, "a dict mask"),
        ({"past_key_values": object()}, "past_key_values in the batch"),
        ({"use_cache": True}, "expected use_cache=False"),
        ({"output_attentions": True}, "expected output_attentions=False"),
        ({"output_router_logits": True}, "expected output_router_logits=False"),
        ({"pixel_values": torch.ones(1)}, "pixel_values in the batch"),
        ({"token_type_ids": torch.ones(2, 53)}, "token_type_ids with others"),
        ({"position_ids": torch.ones(3, 2, 53)}, r"expected position_ids \[B, S\]"),
        ({"logits_to_keep": 1}, "logits_to_keep"),
        ({"document_ids": torch.ones(2, 7)}, "documents that cover the batch"),
        ({"input_ids": None}, "a batch with input_ids"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_batches_that_mean_nothing_on_a_shard_are_refused(extra, what):
    refused(what, lambda: attached(make(), lambda cp: cp.shard(batch_of("plain") | extra)))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda local: {"input_ids": local["input_ids"]}, "what cp.shard.batch. returned"),
        (lambda local: local | {"output_attentions": True}, "output_attentions"),
        (lambda local: local | {"past_key_values": object()}, "past_key_values"),
        (lambda local: local | {"input_ids": tokens()}, r"the 2[67] tokens of this rank"),
        (
            lambda local: local | {"position_ids": torch.arange(27)[None]},
            "inferred from position_ids",
        ),
    ],
    ids=["unsharded", "attentions", "cache", "length", "positions"],
)
def test_calls_that_would_go_wrong_are_refused(change, what):
    def act(cp):
        cp.model(**change(cp.shard(batch_of("plain"))))

    refused(what, lambda: attached(make(), act, ranks=2))


def test_parts_of_the_model_and_changed_implementations_are_refused():
    def part(cp):
        local = cp.shard(batch_of("plain"))
        cp.model.model(input_ids=local["input_ids"])

    def changed(cp):
        local = cp.shard(batch_of("plain"))
        cp.model.set_attn_implementation("eager")
        cp.model(**local)

    refused("a call of one of its parts", lambda: attached(make(), part))
    refused("got 'eager'", lambda: attached(make(), changed))


def test_attention_dropout_is_that_of_one_process_in_training_only():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, attention_dropout=0.3))

    def loss(model, ranks, seed):
        def rank(mesh):
            cp = hf.attach(copy.deepcopy(model), mesh)
            out = cp.model(**cp.shard(batch_of("plain"))).loss
            out.backward()
            grad = next(cp.model.parameters()).grad
            return out.item(), grad

        torch.manual_seed(seed)
        found = simulate(rank, ranks)
        return sum(loss for loss, _ in found), sum(grad for _, grad in found)

    wanted, gradient = loss(model.train(), 1, 7)
    found, its_gradient = loss(model, 3, 7)
    assert found == pytest.approx(wanted, abs=1e-5)
    assert_close(its_gradient, gradient)
    assert loss(model, 1, 8)[0] != wanted
    assert loss(model.eval(), 1, 7)[0] == loss(model, 1, 8)[0] != wanted


def test_masks_that_are_made_inside_the_forward_pass_are_refused():
    config = Gemma3TextConfig(**SIZES, sliding_window=7, use_bidirectional_attention=True)
    model = AutoModelForCausalLM.from_config(config)

    def act(cp):
        cp.model(**cp.shard(batch_of("plain")))

    refused("a mask that the model builds inside its forward pass", lambda: attached(model, act))


def test_labels_need_a_loss_that_is_a_sum_over_tokens():
    def other_loss(cp):
        cp.model.loss_function = lambda *args, **kwargs: None
        cp.shard(batch_of("plain"))

    refused("ForCausalLMLoss", lambda: attached(make(), other_loss))
    refused(
        "language-model head",
        lambda: attached(make().model, lambda cp: cp.shard(batch_of("plain"))),
    )


class OwnLoss(LlamaForCausalLM):
    def forward(self, labels=None, **kwargs):
        out = super().forward(**kwargs)
        out.loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
        return out


def test_models_with_a_loss_of_their_own_are_refused_labels():
    model = OwnLoss(LlamaConfig(**SIZES))
    refused(
        "OwnLoss, which computes its own",
        lambda: attached(model, lambda cp: cp.shard(batch_of("plain"))),
    )


def test_a_decoder_without_a_head_returns_hidden_states():
    model, ids = make().model, tokens()
    hidden = attached(model, lambda cp: cp.unshard(cp.model(**cp.shard({"input_ids": ids}))[0]), 3)
    assert relative_error(hidden, model(input_ids=ids)[0]) < 1e-5


def test_models_with_their_own_rule_for_positions_must_be_told_them():
    config = OPTConfig(
        vocab_size=61,
        hidden_size=16,
        ffn_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        dropout=0.0,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
    )
    model = AutoModelForCausalLM.from_config(config)
    batch = batch_of("padded")
    refused("OPTForCausalLM has its own rule", lambda: attached(model, lambda cp: cp.shard(batch)))
    batch["position_ids"] = torch.arange(53).expand(2, -1)
    loss = simulate(lambda mesh: on_rank(model, mesh, batch), 2)[0][1]
    assert relative_error(loss, model(**batch).loss.detach()) < 1e-6


def test_models_that_do_not_see_documents_in_positions_say_so():
    def positions(cp):
        cp.shard(batch_of("packed"))

    def named(cp):
        cp.shard({"input_ids": tokens(), "document_ids": torch.arange(53) // 20})

    with pytest.warns(UserWarning, match="GptOssForCausalLM does not take that for documents"):
        attached(make("gpt-oss"), positions)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attached(make("gpt-oss"), named)
        attached(make("llama"), positions)


def test_more_ranks_than_tokens_are_refused():
    ids = tokens(1, 2)
    refused(
        "at least one token", lambda: attached(make(), lambda cp: cp.shard({"input_ids": ids}), 3)
    )
