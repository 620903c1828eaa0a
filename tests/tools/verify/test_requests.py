"""Requests that make no sense are refused, and verdicts can be read by people and programs."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import flexcp
from flexcp import masks
from flexcp.tools.verify import Check, Verdict, VerificationError
from verify.decoder import Decoder, make_batch, right_step


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "at least 1 rank, got 0"),
        ({"ranks": "threads"}, '"simulated" or "gloo", got \'threads\''),
        ({"gradients": "mean"}, 'gradients to be "summed", "averaged" or "reduced"'),
        ({"losses": "mean"}, 'losses to be "summed", "averaged" or "reduced"'),
        ({"batch": torch.zeros(1, 4)}, "a batch: names and tensors"),
        ({"batch": {"speech": torch.zeros(1, 4)}}, "a batch with tokens: integers"),
        ({"batch": {"input_ids": torch.zeros(1, 4).long()}}, "more than one kind of token"),
        ({"documents": [3, 4], "batch": make_batch()}, "cover the 101 tokens of the batch, got 7"),
        ({"single": lambda model, batch: None}, "parallel= beside single="),
        ({"parallel": right_step, "layout": "ring"}, "layout= for a model without parallel="),
        ({"parallel": right_step, "documents": [101]}, "documents= for a model without parallel="),
        ({"gradients": "reduced"}, "for a model without parallel="),
        ({"mask": {"full": masks.causal()}}, "one mask, for a plain model"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(flexcp.FlexCPError, match=message):
        flexcp.verify(Decoder, options.pop("batch", None), **options)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (5, "a model, a function that builds one, or a name"),
        (lambda: "a model", "a factory that returns an nn.Module, got str"),
        (lambda: torch.nn.Linear(4, 4), "a model with an nn.Embedding"),
        ("nobody_has_this:make", "a module that Python can import"),
        ("no_such_model", "a model type of Transformers"),
    ],
)
def test_what_is_no_model_is_refused(model, message):
    with pytest.raises(flexcp.FlexCPError, match=message):
        flexcp.verify(model)


def test_a_model_whose_attention_cannot_be_seen_needs_a_step():
    class Sums(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(9, 9)

        def forward(self, tokens):
            return self.embed(tokens).cumsum(1)

    with pytest.raises(flexcp.FlexCPError, match="one whose attention can't be seen; pass paral"):
        flexcp.verify(Sums)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (masks.causal(), "got torch's flex_attention; import flex_attention from flexcp.compat"),
        (None, "no gradients on CPU here, where torch's own flex_attention refuses them"),
    ],
)
def test_torchs_own_flex_attention_is_refused_with_what_to_call(mask, message):
    class Flex(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(9, 8)

        def forward(self, tokens):
            x = self.embed(tokens)[:, None]
            return flex_attention(x, x, x)[:, 0]

    with pytest.raises(flexcp.FlexCPError, match=message):
        flexcp.verify(Flex, mask=mask)


def test_a_step_that_updates_parameters_is_refused():
    def step(model, batch, mesh):
        loss = right_step(model, batch, mesh)
        with torch.no_grad():
            model.head.bias.add_(1)
        return loss

    verdict = flexcp.verify(lambda: Decoder(layers=1), make_batch(), parallel=step)
    assert "one that changes the parameter 'head.bias'" in verdict.first_failure.cause


def test_a_step_without_a_loss_is_refused():
    verdict = flexcp.verify(
        lambda: Decoder(layers=1), make_batch(), parallel=lambda m, b, mesh: torch.zeros(3)
    )
    assert "a step that returns its loss" in verdict.first_failure.cause
    assert "got shape (3,)" in verdict.first_failure.cause


def test_the_model_that_was_given_is_left_alone():
    model = Decoder(layers=1)
    before = {n: p.clone() for n, p in model.named_parameters()}
    assert flexcp.verify(model, seq_len=37).passed
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())
    assert next(model.parameters()).dtype == torch.float32


def test_a_narrower_mask_than_the_one_given_is_found():
    verdict = flexcp.verify(
        lambda: Decoder(layers=1), make_batch(), parallel=right_step, mask=masks.causal()
    )
    assert verdict.first_failure.name == "reach"
    assert "in one process already" in verdict.first_failure.found
    assert "narrower mask" in verdict.first_failure.cause


def test_verdicts_are_read_by_people_and_programs():
    good = Check("loss", "passed", "equal", 1e-16, 1e-10)
    bad = Check("gradients", "failed", "differ", 0.5, 1e-10, "head.weight", "a cause", "a fix")
    verdict = Verdict((good, bad), "a model")
    data = json.loads(verdict.to_json())
    assert data["first_failure"] == "gradients"
    assert data["checks"][1]["cause"] == "a cause"
    assert "FAILED at gradients" in str(verdict)
    with pytest.raises(VerificationError, match="a cause"):
        verdict.raise_if_failed()
    assert Verdict((good,)).raise_if_failed().passed
    with pytest.raises(KeyError):
        verdict["logits"]


def test_a_loss_that_is_not_a_number_is_named():
    batch = make_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    failure = flexcp.verify(lambda: Decoder(layers=1), batch).first_failure
    assert failure.name == "repeatable"
    assert "the loss of one process is nan" in failure.found
    assert "a mean over no token" in failure.cause


def test_a_verdict_fits_a_narrow_terminal():
    found = "q and k of the first attention agree, as do those of all others"
    bad = Check("loss", "failed", found, 1.0, 1e-10, "ranks have 1, 2", "a mean " * 20, "sum " * 30)
    said = Verdict((Check("runs", "passed", found), bad), title="x").to_text(columns=60)
    assert max(map(len, said.splitlines())) <= 60
    assert "FAILED  loss" in said


def test_losses_that_are_means_over_a_ranks_own_tokens_are_named_so_without_logits():
    class Embedded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(16, 16)

    def mean_of_own(model, batch, mesh):
        plan = flexcp.make_plan(masks.causal(), 40, mesh)
        local = flexcp.shard_batch(batch, plan)
        x = model.table(local["input_ids"])[:, None]
        logits = flexcp.attention(x, x, x, plan)[:, 0]
        return torch.nn.functional.cross_entropy(logits[0], local["labels"][0])

    loss = flexcp.verify(Embedded, parallel=mean_of_own, seq_len=40)["loss"]
    assert "a mean over the rank's own tokens" in loss.cause
    assert loss.fix.startswith("return the sum of the rank's losses")
