"""Batches that `shard_batch` cuts up: losses over real ranks add up to that of one process."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import flexcp
from flexcp import masks, testing

LENGTH, BATCH, VOCABULARY, HEADS, DIM = 61, 2, 23, 2, 4
_DRAW = torch.Generator().manual_seed(0)
TOKENS = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=_DRAW)
EMBED, PLACE = (
    torch.randn(n, HEADS * DIM, generator=_DRAW, dtype=torch.float64) for n in (VOCABULARY, LENGTH)
)
LENGTHS = [[13, 30, 18], [1, 40, 20]]
IDS = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(n)) for n in LENGTHS])
RIGHT = torch.ones(BATCH, LENGTH, dtype=torch.int64)
RIGHT[0, 50:] = 0
LEFT = RIGHT.flip(1)
NAMELESS = torch.tensor([[7, 7, 3], [5, 9, 5]]).gather(1, IDS)  # an id may come again

CASES = {
    "ids of every batch element": {"documents": IDS, "ids": IDS},
    "ids in any order": {"documents": NAMELESS, "ids": NAMELESS},
    "lengths of every batch element": {"documents": LENGTHS, "ids": IDS},
    "the same ids for all": {"documents": IDS[0], "ids": IDS[:1].expand(BATCH, -1)},
    "padding on the right": {"there": RIGHT},
    "padding on the left": {"there": LEFT},
    "documents and padding on the right": {"documents": IDS, "ids": IDS, "there": RIGHT},
    "lengths and padding on the left": {"documents": LENGTHS, "ids": IDS, "there": LEFT},
    "positions that restart": {"documents": LENGTHS, "ids": IDS, "there": LEFT, "restart": True},
    "labels of some tokens only": {"documents": IDS, "ids": IDS, "unscored": slice(20, 30)},
}


def logits_of(embed, tokens, positions, attend):
    x = embed[tokens] + PLACE[positions]
    heads = x.unflatten(2, (HEADS, DIM)).transpose(1, 2)
    return attend(heads, heads.sin(), heads.cos()).transpose(1, 2).flatten(2) @ embed.T


def mask_of(ids, there):
    mask = masks.causal()
    if ids is not None:
        mask = mask & masks.document(ids)
    if there is not None:
        mask = mask & masks.Mask(lambda b, h, q, kv: there[b, kv] > 0)
    return mask


def positions_of(ids, restart):
    if not restart:
        return torch.arange(LENGTH).expand(BATCH, LENGTH)
    rows = []
    for row in ids.tolist():
        counted = []
        for s, document in enumerate(row):
            counted.append(counted[-1] + 1 if s and row[s - 1] == document else 0)
        rows.append(counted)
    return torch.tensor(rows)


def labels_of(unscored):
    labels = TOKENS.clone()
    if unscored is not None:
        labels[:, unscored] = -100
    return labels


def one_process(documents=None, ids=None, there=None, restart=False, unscored=None):
    """How many tokens are scored, the loss, and its gradient: one token after the other."""
    embed, labels = EMBED.clone().requires_grad_(), labels_of(unscored)
    logits = logits_of(
        embed, TOKENS, positions_of(ids, restart),
        lambda q, k, v: flexcp.flex_attention(q, k, v, block_mask=mask_of(ids, there)),
    )  # fmt: skip
    losses = []
    for b in range(BATCH):
        for s in range(LENGTH - 1):
            same = ids is None or ids[b, s] == ids[b, s + 1]
            real = there is None or (there[b, s] and there[b, s + 1])
            if same and real and labels[b, s + 1] != -100:
                losses.append(functional.cross_entropy(logits[b, s], labels[b, s + 1]))
    loss = torch.stack(losses).mean()
    loss.backward()
    return len(losses), loss.detach(), embed.grad


def over_ranks(mesh, documents=None, ids=None, there=None, restart=False, unscored=None):
    """What one rank finds of the same."""
    plan = flexcp.make_plan(
        mask_of(ids, there), LENGTH, mesh, num_heads=HEADS, head_dim=DIM, dtype=torch.float64,
        block_size=16, batch=BATCH,
    )  # fmt: skip
    batch = {"input_ids": TOKENS, "labels": labels_of(unscored), "attention_mask": there}
    local = flexcp.shard_batch(batch, plan, documents=documents, restart_positions=restart)
    embed = EMBED.clone().requires_grad_()
    logits = logits_of(
        embed, local["input_ids"], local["position_ids"],
        lambda q, k, v: flexcp.attention(q, k, v, plan),
    )  # fmt: skip
    loss = flexcp.cross_entropy(logits, local["labels"], local["num_scored"])
    loss.backward()
    return local["num_scored"], loss.detach(), embed.grad


def test_losses_of_real_ranks_add_up_whatever_is_packed_or_padded():
    ranks = 3

    def rank(mesh):
        return {name: over_ranks(mesh, **case) for name, case in CASES.items()}

    results = testing.spawn(rank, ranks)
    for name, case in CASES.items():
        scored, loss, gradient = one_process(**case)
        assert [r[name][0] for r in results] == [scored] * ranks, name
        for i, want in ((1, loss), (2, gradient)):
            torch.testing.assert_close(
                sum(r[name][i] for r in results), want, rtol=1e-10, atol=1e-12, msg=name
            )


def test_documents_of_another_number_of_batch_elements_are_refused():
    plan = flexcp.make_plan(masks.causal(), LENGTH, 2)
    with pytest.raises(
        flexcp.FlexCPError, match=r"documents of 2 batch elements, or of one for all, got 3"
    ):
        flexcp.shard_batch({"labels": TOKENS}, plan, documents=IDS[:1].expand(3, -1))
