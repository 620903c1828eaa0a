"""A small decoder as people write it, and a rank's step with places to make mistakes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import flexcp
from flexcp import masks

VOCABULARY = 61


class Attention(nn.Module):
    def __init__(self, width=24, heads=6, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head)
        self.out = nn.Linear(width, width)

    def forward(self, x, rotate):
        sizes = [n * self.head for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (
            part.unflatten(-1, (-1, self.head)).transpose(1, 2)
            for part in self.qkv(x).split(sizes, dim=-1)
        )
        out = functional.scaled_dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, enable_gqa=True
        )
        return self.out(out.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Two layers with rotary positions, that takes positions, or counts its rows."""

    def __init__(self, layers=2, width=24, counts=False, dropout=0.0):
        super().__init__()
        self.counts = counts
        self.embed = nn.Embedding(VOCABULARY, width)
        self.attention = nn.ModuleList(Attention(width) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens, positions=None):
        if self.counts or positions is None:
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.embed(tokens)
        angle = positions[:, None, :, None] / 10.0 ** torch.arange(2)

        def rotate(x):
            a, b = x.chunk(2, dim=-1)
            cos, sin = angle.cos().to(x), angle.sin().to(x)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = x + attention(self.norm(x), rotate)
            x = x + mlp(self.norm(x))
        return self.head(self.dropout(self.norm(x)))


LENGTHS = [23, 41, 9, 28]
TOTAL = sum(LENGTHS)
DOCUMENTS = masks.causal() & masks.document(lengths=LENGTHS)


def make_batch(rows=1, total=TOTAL):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (rows, total), generator=generator)
    tokens[0, 0] = VOCABULARY - 1
    return {"input_ids": tokens, "labels": tokens.clone()}


class over_plan(torch.overrides.TorchFunctionMode):  # noqa: N801
    """SDPA over a plan."""

    def __init__(self, plan, **options):
        super().__init__()
        self.plan, self.options = plan, options

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.scaled_dot_product_attention:
            return flexcp.attention(*args[:3], self.plan, **self.options)
        return func(*args, **(kwargs or {}))


def plan_for(mesh, mask=DOCUMENTS, total=TOTAL, batch=1, layout="auto"):
    return flexcp.make_plan(
        mask, total, mesh, layout=layout, block_size=8, num_heads=6, num_kv_heads=2, head_dim=4,
        dtype=torch.float64, batch=batch,
    )  # fmt: skip


def whole_mask(mask):
    """The step of one process under a mask, written apart from flexcp's sharding."""

    class Masked(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is functional.scaled_dot_product_attention:
                return flexcp.flex_attention(*args[:3], block_mask=mask, enable_gqa=True)
            return func(*args, **(kwargs or {}))

    return Masked()


def one_process(model, batch, mask=DOCUMENTS, lengths=LENGTHS):
    positions = torch.cat([torch.arange(n) for n in lengths]).expand_as(batch["input_ids"])
    with whole_mask(mask):
        logits = model(batch["input_ids"], positions)
    labels = batch["labels"].clone()
    labels[:, torch.tensor([0, *lengths[:-1]]).cumsum(0)] = -100
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def right_step(model, batch, mesh):
    plan = plan_for(mesh, batch=batch["input_ids"].shape[0])
    local = flexcp.shard_batch(batch, plan, documents=LENGTHS, restart_positions=True)
    with over_plan(plan):
        logits = model(local["input_ids"], local["position_ids"])
    return flexcp.cross_entropy(logits, local["labels"], local["num_scored"])
