"""`flexcp verify` answers with a table and an exit code."""

from __future__ import annotations

import json

import pytest

MODULE = """
import torch
from torch.nn import functional

class Tiny(torch.nn.Module):
    def __init__(self, counts=False):
        super().__init__()
        self.counts = counts
        self.embed = torch.nn.Embedding(32, 8)
        self.place = torch.nn.Embedding(128, 8)

    def forward(self, tokens, positions):
        if self.counts:
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = (self.embed(tokens) + self.place(positions))[:, None]
        x = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return x[:, 0] @ self.embed.weight.T

def make():
    return Tiny()

def counting():
    return Tiny(counts=True)

def batch():
    tokens = torch.arange(41)[None] % 31
    return {"input_ids": tokens, "labels": tokens}

def unsharded(model, batch, mesh):
    logits = model(batch["input_ids"], torch.arange(41)[None])
    return functional.cross_entropy(logits[0], batch["labels"][0])
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "tiny_for_verify.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_right_model_passes(flexcp):
    out = flexcp("verify", "tiny_for_verify:make", "--tokens", 45, "--ranks", 3).out
    assert "tiny_for_verify:make on 3 simulated ranks, 1 × 45 tokens: passed" in out
    assert "| gradients  | passed" in out


def test_documents_and_masks_are_read_as_people_type_them(flexcp):
    args = ("--mask", "causal & document([20, 25])", "--documents", "20,25", "--json")
    found = json.loads(flexcp("verify", "tiny_for_verify:make", *args).out)
    assert found["passed"]
    assert "1 × 45 tokens" in found["title"]
    assert all(check["status"] == "passed" for check in found["checks"])


def test_a_wrong_model_ends_with_1_and_names_the_cause(flexcp):
    done = flexcp("verify", "tiny_for_verify:counting", "--tokens", 45, code=1)
    assert "FAILED at positions" in done.out
    assert "counted from 0 on every rank" in done.out


def test_own_steps_and_batches_are_run(flexcp):
    args = ("--step", "tiny_for_verify:unsharded", "--batch", "tiny_for_verify:batch", "--json")
    found = json.loads(flexcp("verify", "tiny_for_verify:make", *args, code=1).out)
    assert found["first_failure"] == "tokens"
    assert "not sharded" in next(c["cause"] for c in found["checks"] if c["status"] == "failed")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere:make"], "a module that Python can import, got 'nowhere'"),
        (["tiny_for_verify:nothing"], "it has Tiny"),
        (["no_such_model"], "a model type of Transformers, a folder with a config.json"),
        (["tiny_for_verify:make", "--documents", "a,b"], "such as --documents 40,25,32"),
        (["tiny_for_verify:make", "--documents", "4,5", "--tokens", 11], "leave --tokens out"),
        (["tiny_for_verify:make", "--gradients", "mean"], '"summed", "averaged" or "reduced"'),
    ],
)
def test_requests_that_make_no_sense_end_with_2(flexcp, args, message):
    assert message in flexcp("verify", *args, code=2).err


def test_real_ranks_are_processes(flexcp):
    out = flexcp("verify", "tiny_for_verify:make", "--tokens", 37, "--real").out
    assert "on 2 gloo ranks, 1 × 37 tokens: passed" in out
