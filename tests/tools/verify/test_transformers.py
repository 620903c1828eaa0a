"""Models of Transformers by name pass, and what goes wrong with them is named."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

import flexcp
from flexcp.integrations.transformers import attach


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "gpt_oss"])
def test_tiny_models_by_name_pass_every_check(name):
    verdict = flexcp.verify(name, world_size=3 if name == "qwen3" else 2, seq_len=41)
    assert {check.status for check in verdict.checks} == {"passed"}, str(verdict)


def test_packed_documents_pass():
    verdict = flexcp.verify("llama", documents=[13, 19, 9], world_size=2)
    assert {check.status for check in verdict.checks} == {"passed"}, str(verdict)
    assert "by the mask" in verdict["leakage"].found


def test_documents_that_a_model_does_not_tell_apart_are_found():
    failure = flexcp.verify("gpt_oss", documents=[13, 19, 9]).first_failure
    assert failure.name == "leakage"
    assert "in one process already" in failure.found
    assert "documents see each other" in failure.cause


def padded_batch(*, first_is_scored):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 96, (2, 41), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    mask[1, -7:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    if not first_is_scored:
        labels[0, 9] = -100
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def test_padding_on_both_sides_passes():
    verdict = flexcp.verify("llama", padded_batch(first_is_scored=False), world_size=3)
    assert {check.status for check in verdict.checks} == {"passed"}, str(verdict)


def test_scored_padding_is_named():
    batch = padded_batch(first_is_scored=True)
    batch["labels"][0, :9] = 5  # all of it, so that no run ignores what padding predicts
    failure = flexcp.verify("llama", batch).first_failure
    assert failure.name == "labels"
    assert "padding is scored" in failure.cause


TINY = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip


def test_a_configuration_is_taken_as_it_is():
    verdict = flexcp.verify(LlamaConfig(**TINY), seq_len=37, gradients="averaged")
    assert {check.status for check in verdict.checks} == {"passed"}, str(verdict)
    assert "averaged over 2 ranks" in verdict["gradients"].found


def test_a_folder_with_a_configuration_is_read(tmp_path):
    LlamaConfig(**TINY).save_pretrained(tmp_path)
    assert flexcp.verify(str(tmp_path), seq_len=37).passed


def shifts_again(model, batch, mesh):
    """Labels that were shifted go into the argument that shifts."""
    local = attach(model, mesh, block_size=8).shard(batch)
    logits = model(**{n: x for n, x in local.items() if "label" not in n}).logits
    labels = local["shift_labels"][:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum")
    return total / int((batch["labels"][:, 1:] != -100).sum())


def test_labels_shifted_twice_are_named():
    failure = flexcp.verify(
        "llama", parallel=shifts_again, single=lambda m, b: m(**b), seq_len=37
    ).first_failure
    assert failure.name == "labels"
    assert "shifted twice" in failure.cause
