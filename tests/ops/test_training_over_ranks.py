"""A model's loss and gradients over sharded batches equal those of one process."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp import masks, testing

LENGTHS = [13, 30, 7, 41]
TOTAL = sum(LENGTHS)


class Block(torch.nn.Module):
    def __init__(self, width=16, heads=4, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        head = width // heads
        self.qkv = torch.nn.Linear(width, (heads + 2 * kv_heads) * head)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x, attend):
        batch, length, width = x.shape
        head = width // self.heads
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = (
            part.view(batch, length, -1, head).transpose(1, 2)
            for part in self.qkv(x).split([n * head for n in sizes], dim=-1)
        )
        return x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.place = torch.nn.Embedding(TOTAL, 16)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(16, 50)

    def forward(self, tokens, positions, attend, reentrant=None):
        x = self.embed(tokens) + self.place(positions)
        for block in self.blocks:
            if reentrant is None:
                x = block(x, attend)
            else:
                x = checkpoint(block, x, attend, use_reentrant=reentrant)
        return self.head(x)


def make_model():
    torch.manual_seed(0)
    return Model().double()


TOKENS = torch.randint(0, 50, (2, TOTAL), generator=torch.Generator().manual_seed(3))
MASK = masks.causal() & masks.document(lengths=LENGTHS)


def one_process():
    model = make_model()
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, TOTAL)
    logits = model(
        TOKENS, positions,
        lambda q, k, v: flexcp.flex_attention(q, k, v, block_mask=MASK, enable_gqa=True),
    )  # fmt: skip
    losses = []
    for documents in zip(TOKENS.split(LENGTHS, 1), logits.split(LENGTHS, 1), strict=True):
        tokens, scores = documents
        losses.append(
            torch.nn.functional.cross_entropy(
                scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
            )
        )
    loss = sum(losses) / (2 * (TOTAL - len(LENGTHS)))
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "reentrant", [None, False, True], ids=["plain", "checkpointed", "reentrant"]
)
@pytest.mark.parametrize("gradients", ["summed", "averaged"])
@pytest.mark.parametrize(("start", "ranks"), [(testing.simulate, 3), (testing.spawn, 2)])
def test_losses_and_gradients_add_up_to_those_of_one_process(start, ranks, gradients, reentrant):
    def rank(mesh):
        model = make_model()
        plan = flexcp.make_plan(
            MASK, TOTAL, mesh, num_heads=4, num_kv_heads=2, head_dim=4, dtype=torch.float64,
            block_size=16, batch=2,
        )  # fmt: skip
        local = flexcp.shard_batch(
            {"input_ids": TOKENS, "labels": TOKENS},
            plan,
            documents=LENGTHS,
            restart_positions=True,
        )
        logits = model(
            local["input_ids"],
            local["position_ids"],
            lambda q, k, v: flexcp.attention(q, k, v, plan),
            reentrant,
        )
        loss = flexcp.cross_entropy(
            logits, local["labels"], local["num_scored"], gradients=gradients, ranks=ranks
        )
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in model.named_parameters()}

    results = start(rank, ranks)
    share = 1 if gradients == "summed" else 1 / ranks
    loss, grads = one_process()
    total = sum(r[0] for r in results) * share
    torch.testing.assert_close(total, loss, rtol=1e-12, atol=0)
    for name, expected in grads.items():
        found = sum(r[1][name] for r in results) * share
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_labels_are_shifted_before_sharding_and_padding_is_not_scored():
    tokens = torch.arange(12)[None]
    padding = torch.tensor([[1] * 9 + [0] * 3])

    def rank(mesh):
        plan = flexcp.make_plan(masks.causal(), 12, mesh, layout="head_tail", block_size=1)
        local = flexcp.shard_batch(
            {"input_ids": tokens, "labels": tokens, "attention_mask": padding, "name": "x"}, plan
        )
        assert local["name"] == "x"
        return plan.unshard(local["labels"], 1), plan.unshard(local["position_ids"], 1), local

    labels, positions, local = testing.simulate(rank, 2)[1]
    assert labels.tolist() == [[*range(1, 9), -100, -100, -100, -100]]
    assert positions.tolist() == [list(range(12))]
    assert local["num_scored"] == 8


def test_labels_that_are_shifted_already_stay():
    tokens = torch.arange(6)[None]

    def rank(mesh):
        plan = flexcp.make_plan(masks.causal(), 6, mesh, layout="contiguous")
        return flexcp.shard_batch({"labels": tokens}, plan, shift_labels=False)["labels"].tolist()

    assert testing.simulate(rank, 2) == [[[0, 1, 2]], [[3, 4, 5]]]


def test_the_last_label_that_is_shifted_already_is_scored_unless_padding_follows():
    tokens = torch.arange(6)[None].expand(2, 6)
    there = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": there}

    def rank(mesh):
        plan = flexcp.make_plan(masks.causal(), 6, mesh)
        local = flexcp.shard_batch(batch, plan, shift_labels=False)
        return plan.unshard(local["labels"], 1).tolist()

    assert testing.simulate(rank, 2)[0] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, -100, -100, -100]]


@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 6)])
def test_positions_may_be_given_once_for_the_batch(shape):
    ids = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1]])  # layouts that differ
    batch = {"position_ids": torch.arange(10, 16).expand(shape), "input_ids": ids, "labels": None}

    def rank(mesh):
        plan = flexcp.make_plan(masks.document(ids), 6, mesh, batch=2)
        local = flexcp.shard_batch(batch, plan)
        assert "num_scored" not in local
        return plan.unshard(local["position_ids"], 1).tolist()

    assert testing.simulate(rank, 2)[0] == [list(range(10, 16))] * 2


@pytest.mark.parametrize("name", ["labels", "attention_mask", "position_ids"])
def test_a_part_of_a_batch_that_has_another_length_is_refused(name):
    plan = flexcp.make_plan(masks.causal(), 12, 2)
    batch = {"input_ids": torch.zeros(2, 12).long(), name: torch.zeros(2, 11).long()}
    with pytest.raises(flexcp.FlexCPError, match=rf"{name} of shape \[2, 12\].*got \(2, 11\)"):
        flexcp.shard_batch(batch, plan)


def test_a_batch_of_another_length_is_refused():
    plan = flexcp.make_plan(masks.causal(), 12, 2)
    with pytest.raises(flexcp.FlexCPError, match=r"12 tokens along dim 1, got input_ids \(1, 5\)"):
        flexcp.shard_batch({"input_ids": torch.zeros(1, 5)}, plan)


def test_documents_that_do_not_cover_the_batch_are_refused():
    plan = flexcp.make_plan(masks.causal(), 12, 2)
    batch = {"labels": torch.zeros(1, 12)}
    with pytest.raises(flexcp.FlexCPError, match="cover the 12 tokens of the batch, got 9"):
        flexcp.shard_batch(batch, plan, documents=[4, 5])


def test_cross_entropy_refuses_to_guess_what_the_trainer_does():
    with pytest.raises(flexcp.FlexCPError, match='gradients to be "summed" or "averaged"'):
        flexcp.cross_entropy(torch.zeros(1, 2, 3), torch.zeros(1, 2).long(), 2, gradients="mean")
    with pytest.raises(flexcp.FlexCPError, match="number of ranks, if their gradients are avera"):
        flexcp.cross_entropy(
            torch.zeros(1, 2, 3), torch.zeros(1, 2).long(), 2, gradients="averaged"
        )
