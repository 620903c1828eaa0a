"""Models with vision towers on text, layers that differ, and models that are refused at once."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertModel,
    DogeConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3nTextConfig,
    LlamaConfig,
    LlamaForQuestionAnswering,
    LlamaForTokenClassification,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    RobertaConfig,
    SmolLM3Config,
)

from flexcp import FlexCPError
from flexcp.integrations import transformers as hf
from flexcp.integrations.transformers.unsupported import check_labels
from flexcp.testing import simulate
from flexcp.testing.tolerance import relative_error
from tests.integrations.tiny_models import (
    MIXED,
    SIZES,
    assert_same,
    batch_of,
    on_rank,
    one_process,
)

NO_HEAD_DIM = {name: size for name, size in SIZES.items() if name != "head_dim"}
IMAGES = {"image_token_id": 57, "video_token_id": 58}  # which no batch of text has
BORDERS = {"vision_start_token_id": 55, "vision_end_token_id": 56}
TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}


def _rope(*sections):
    return {"rope_type": "default", "mrope_section": list(sections), "rope_theta": 10000.0}


def _qwen25_vl():
    tower = {**TOWER, "out_hidden_size": 32, "fullatt_block_indexes": [0]}
    text = {**SIZES, "rope_parameters": _rope(1, 1, 2)}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, **IMAGES, **BORDERS)
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl():
    tower = {**TOWER, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    text = {**SIZES, "rope_parameters": _rope(2, 1, 1)}
    config = Qwen3VLConfig(text_config=text, vision_config=tower, **IMAGES, **BORDERS)
    return Qwen3VLForConditionalGeneration(config)


def _gemma3_with_images():
    tower = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    config = Gemma3Config(
        text_config={**SIZES, "sliding_window": 7, "layer_types": MIXED},
        vision_config=tower,
        mm_tokens_per_image=4,
        image_token_index=57,
        boi_token_index=55,
        eoi_token_index=56,
    )
    return Gemma3ForConditionalGeneration(config)


def _smollm3():  # every third layer is without RoPE
    config = SmolLM3Config(**NO_HEAD_DIM, no_rope_layers=[1, 1, 0], no_rope_layer_interval=3)
    return AutoModelForCausalLM.from_config(config)


def _gemma3n():
    config = Gemma3nTextConfig(
        **SIZES,
        sliding_window=9,
        layer_types=MIXED,
        vocab_size_per_layer_input=61,
        hidden_size_per_layer_input=4,
        num_kv_shared_layers=0,
        altup_num_inputs=2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0, 0.0, 0.0],
    )
    return AutoModelForCausalLM.from_config(config)


FAMILIES = {
    "qwen2.5-vl": _qwen25_vl,
    "qwen3-vl": _qwen3_vl,
    "gemma3-images": _gemma3_with_images,
    "smollm3": _smollm3,
    "gemma3n": _gemma3n,
}


@pytest.mark.filterwarnings("ignore:position_ids start again, but Qwen2_5")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_on_three_ranks_is_the_text_on_one(family):
    torch.manual_seed(0)
    model = FAMILIES[family]().train()
    skip_without_the_causal_loss(model)
    for kind in ("packed", "padded"):
        batch = batch_of(kind)
        batch["input_ids"] = batch["input_ids"].clamp(max=50)
        if family == "gemma3-images":
            batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
        expected = one_process(model, batch)
        actual = simulate(lambda mesh, batch=batch: on_rank(model, mesh, batch), 3)[1]
        assert_same(actual, expected, batch)


def skip_without_the_causal_loss(model):
    """Some versions of Transformers compute a loss of their own for some models."""
    try:
        check_labels(model)
    except FlexCPError as error:
        pytest.skip(f"in this version of Transformers: {error}")


def test_layers_may_have_heads_of_different_sizes():
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("Transformers has no Gemma 4 yet")
    config = transformers.Gemma4TextConfig(
        **SIZES,
        sliding_window=9,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        global_head_dim=16,
        vocab_size_per_layer_input=61,
        hidden_size_per_layer_input=4,
    )
    torch.manual_seed(0)
    model, batch = AutoModelForCausalLM.from_config(config).train(), batch_of("packed")
    expected = one_process(model, batch)
    assert_same(simulate(lambda mesh: on_rank(model, mesh, batch), 3)[2], expected, batch)


SMALL = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}


def _bert(**changes):
    return BertConfig(vocab_size=61, num_hidden_layers=1, **SMALL, **changes)


REFUSED = {
    "bert": (lambda: BertModel(_bert()), "BertModel, an encoder"),
    "masked-bert": (
        lambda: AutoModelForMaskedLM.from_config(_bert()),
        "BertForMaskedLM, an encoder",
    ),
    "roberta": (
        lambda: AutoModelForMaskedLM.from_config(
            RobertaConfig(vocab_size=61, num_hidden_layers=1, **SMALL)
        ),
        "RobertaForMaskedLM, an encoder",
    ),
    "token-classes": (
        lambda: LlamaForTokenClassification(LlamaConfig(**SIZES)),
        "scores classes of each token",
    ),
    "answers": (
        lambda: LlamaForQuestionAnswering(LlamaConfig(**SIZES)),
        "compares all tokens of the sequence",
    ),
    "doge": (
        lambda: AutoModelForCausalLM.from_config(DogeConfig(**SIZES)),
        "DogeAttention, which makes one of its own",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_are_refused_at_once_for_the_true_reason(name):
    made, reason = REFUSED[name]
    with pytest.raises(FlexCPError, match=reason):
        hf.attach(made(), 1)


def test_compressed_attention_is_refused_by_its_name():
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("Transformers has no DeepSeek-V4 yet")
    model = AutoModelForCausalLM.from_config(transformers.DeepseekV4Config(**SIZES))
    with pytest.raises(FlexCPError, match="got heavily_compressed_attention in DeepseekV4"):
        hf.attach(model, 1)


def test_a_bert_that_runs_as_a_decoder_is_one():
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = AutoModelForCausalLM.from_config(_bert(is_decoder=True, **quiet))
    batch = batch_of("plain") | {"position_ids": torch.arange(53).expand(2, -1)}
    loss = simulate(lambda mesh: on_rank(model, mesh, batch), 2)[0][1]
    assert relative_error(loss, model(**batch).loss.detach()) < 1e-6
