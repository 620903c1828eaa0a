"""Tiny random models of every family that is tried, and batches of every sort."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from flexcp.integrations import transformers as hf
from flexcp.testing.tolerance import relative_error

VOCABULARY = 61
LENGTH = 53  # fits no block and no number of ranks
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def _llama4():
    config = Llama4TextConfig(
        **SIZES,
        intermediate_size_mlp=48,
        num_local_experts=2,
        attention_chunk_size=16,
        floor_scale=8,  # so that the temperature of layers without RoPE changes in this length
        attn_scale=0.5,
        no_rope_layers=[1, 0, 1],
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
    )
    return Llama4ForCausalLM(config)


def _phi3():
    """Long RoPE: the frequencies depend on the length of the whole sequence."""
    factors = [1.0 + i for i in range(4)]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": factors,
        "original_max_position_embeddings": 40,
        "partial_rotary_factor": 1.0,
    }
    return Phi3ForCausalLM(
        Phi3Config(
            **{k: v for k, v in SIZES.items() if k != "head_dim"},
            rope_parameters=rope,
            original_max_position_embeddings=40,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, layer_types=MIXED, sliding_window=9, use_sliding_window=True)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=11)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=7)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, sliding_window=7, layer_types=MIXED)
    ),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **SIZES,
            sliding_window=7,
            layer_types=MIXED,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    ),
    "llama4": _llama4,
    "phi3-longrope": _phi3,
}


def make(family="llama"):
    torch.manual_seed(0)
    return FAMILIES[family]().train()


def tokens(batch=2, length=LENGTH, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def batch_of(kind, batch=2, length=LENGTH, seed=1):
    """Without a cache, as in training: with one, Transformers infers no documents."""
    ids = tokens(batch, length, seed)
    found = {"input_ids": ids, "labels": ids, "use_cache": False}
    if kind == "packed":  # each element has documents of its own
        cuts = [[length * 2 // 5], [7, length // 2]]
        found["position_ids"] = torch.stack([restarting(cuts[b % 2], length) for b in range(batch)])
    if kind == "padded":  # on the left and on the right
        mask = torch.ones_like(ids)
        mask[0, :13] = 0
        mask[-1, -9:] = 0
        scored = mask.clone()
        scored[0, 13] = 0  # what predicts it is padding, which eager attention fills with a mean
        found |= {"attention_mask": mask, "labels": ids.masked_fill(scored == 0, -100)}
    return found


def restarting(cuts, length):
    edges = [0, *cuts, length]
    return torch.cat([torch.arange(b - a) for a, b in pairwise(edges)])


def one_process(model, batch):
    """Logits, loss and gradients of a copy of the model."""
    model = copy.deepcopy(model)
    out = model(**batch)
    out.loss.backward()
    return out.logits.detach(), out.loss.detach(), gradients(model)


def on_rank(model, mesh, batch, **options):
    """The same over a mesh, put together."""
    model = copy.deepcopy(model)
    cp = hf.attach(model, mesh, **options)
    out = model(**cp.shard(batch))
    out.loss.backward()
    logits, loss = cp.unshard(out.logits).detach(), cp.sum_over_ranks(out.loss)
    cp.sum_gradients()
    return logits, loss, gradients(model)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(actual, expected, batch):
    """Logits of tokens, the loss to 1e-6, and every gradient to 1e-5 of its largest entry."""
    there = batch.get("attention_mask", torch.ones(actual[0].shape[:2])).bool()
    assert relative_error(actual[0][there], expected[0][there]) < 1e-5
    assert relative_error(actual[1], expected[1]) < 1e-6
    assert set(expected[2]) <= set(actual[2])
    for name, gradient in expected[2].items():
        assert relative_error(actual[2][name], gradient) < 1e-5, name
