"""Training over ranks: losses and gradients are those of one process."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from flexcp import testing
from flexcp.testing.tolerance import assert_close, relative_error
from flexcp.tools.train import PackedDocuments, load_corpus, train
from flexcp.tools.train.compare import compare_with_one_process
from flexcp.tools.train.events import CheckpointSaved, Compared, Evaluated, Started, Stepped
from flexcp.tools.train.step import loss_of, make_model, rank_batch
from flexcp.tools.train.team import Team


def heard(config, ranks):
    """The events of rank 0."""

    def one(mesh):
        events = []
        train(config, mesh, listen=events.append)
        return events

    return testing.spawn(one, ranks)[0]


def of(kind, events):
    return [e for e in events if isinstance(e, kind)]


def each_document_alone(config, batch):
    """Loss and gradients without packing, without flexcp: dense attention, one document a time."""
    model = make_model(config)
    total, scored = 0.0, 0
    for tokens, lengths in zip(batch.tokens, batch.lengths, strict=True):
        for document in tokens.split(lengths):
            places = torch.arange(len(document))

            def attend(q, k, v, kind, places=places):
                back = places[:, None] - places
                seen = (back >= 0) & (back <= (config.window if kind == "sliding" else 10**9))
                return functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=seen, enable_gqa=True
                )

            logits = model(document[None], places[None], attend)[0]
            total = total + functional.cross_entropy(logits[:-1], document[1:], reduction="sum")
            scored += len(document) - 1
    loss = total / scored
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "change"),
    [
        (2, {}),
        (3, {"window": 20, "schedule": "ring", "layout": "striped"}),
        (2, {"batch": 2, "window": 9}),
        (4, {"schedule": "hybrid", "head_ranks": 2, "heads": 4, "kv_heads": 2, "dim": 32}),
    ],
    ids=["two ranks", "three, sliding layers, ring", "two sequences", "hybrid"],
)
def test_gradients_over_ranks_are_those_of_each_document_by_itself(tiny, ranks, change):
    config = replace(tiny, dtype="float64", **change)
    corpus = load_corpus(config.data, config.seed, longest=config.document_tokens)
    batch = PackedDocuments(corpus.train, config.seed).batch(1, config.batch, config.tokens)
    assert min(map(len, batch.lengths)) > 1

    def one(mesh):
        team, model = Team(mesh), make_model(config)
        loss = loss_of(model, rank_batch(batch, config, team))
        loss.backward()
        team.sum_gradients_(model)
        team.sum_(total := loss.detach().clone())
        return total, {n: p.grad for n, p in model.named_parameters()}

    shape = (ranks // config.head_ranks, config.head_ranks) if config.head_ranks > 1 else ranks
    loss, gradients = each_document_alone(config, batch)
    for found_loss, found in testing.spawn(one, shape):
        assert_close(found_loss, loss, what="loss")
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert relative_error(found[name], gradient) < 1e-10, name


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_run_compares_itself_with_one_process(tiny, dtype):
    events = heard(replace(tiny, compare=True, dtype=dtype, steps=3), 2)
    compared = of(Compared, events)
    assert [c.step for c in compared] == [1, 2, 3]
    budget = {"float32": 1e-5, "float64": 1e-10}[dtype]
    for c, step in zip(compared, of(Stepped, events), strict=True):
        assert c.equal
        assert c.loss == step.loss
        assert c.loss_difference < budget
        assert c.gradient_difference < budget
        assert math.isclose(c.gradient_norm, c.one_process_gradient_norm, rel_tol=budget)
    assert events[-1].equal is True


def test_a_comparison_notices_a_wrong_gradient_and_leaves_the_model_alone(tiny):
    model = make_model(tiny)
    corpus = load_corpus(tiny.data, 0, longest=70)
    batch = PackedDocuments(corpus.train, 0).batch(0, 1, 150)
    loss = loss_of(model, rank_batch(batch, tiny, Team()))
    loss.backward()
    loss = loss.item()
    right = compare_with_one_process(model, batch, tiny, 1, loss)
    assert right.equal
    assert right.gradient_difference == 0
    wrong = model.layers[1].q.weight.grad
    wrong[3, 5] += 0.001 * wrong.abs().max()
    kept = {n: p.grad.clone() for n, p in model.named_parameters()}
    found = compare_with_one_process(model, batch, tiny, 1, loss)
    assert not found.equal
    assert found.parameter == "layers.1.q.weight"
    assert found.gradient_difference == pytest.approx(0.001, rel=0.01)
    assert all(torch.equal(p.grad, kept[n]) for n, p in model.named_parameters())
    assert not compare_with_one_process(model, batch, tiny, 1, loss * 1.001).equal


def test_ranks_and_one_process_train_alike(tiny, tmp_path):
    config = replace(tiny, dtype="float64")
    alone = []
    train(replace(config, out=str(tmp_path / "alone")), listen=alone.append)
    ranks = heard(config, 3)
    for kind, field in ((Stepped, "loss"), (Evaluated, "eval_loss")):
        found, expected = (
            torch.tensor([getattr(e, field) for e in of(kind, events)], dtype=torch.float64)
            for events in (ranks, alone)
        )
        assert_close(found, expected, what=field)


def test_a_run_learns(tiny, tmp_path):
    path = tmp_path / "alphabet.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz" * 200)
    ended = train(replace(tiny, data=str(path), steps=60, tokens=130, lr=2e-2, checkpoint_every=60))
    assert ended.last_loss < 1.0 < 5.0 < ended.first_loss
    assert ended.eval_loss < 1.0


def test_a_run_tells_what_it_does(tiny):
    events = heard(tiny, 2)
    started, *_, finished = events
    assert isinstance(started, Started)
    assert (started.ranks, started.steps, started.done) == (2, 6, 0)
    assert started.layout == "balanced, exchange"
    assert [e.step for e in of(Stepped, events)] == [1, 2, 3, 4, 5, 6]
    assert [e.step for e in of(Evaluated, events)] == [3, 6]
    assert [e.step for e in of(CheckpointSaved, events)] == [2, 4, 6]
    assert (finished.step, finished.interrupted, finished.equal) == (6, False, None)
    assert finished.last_loss == of(Stepped, events)[-1].loss
    assert 0 < finished.planning_share < 1
