"""Loss and gradients of one batch: over the ranks of a mesh, and in one process."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp import masks
from flexcp.batch import cross_entropy, shard_batch
from flexcp.masks import Mask, ids_from_lengths
from flexcp.ops import attention, flex_attention
from flexcp.plan import Plan, Ranks, make_plan
from flexcp.tools.train.config import TrainConfig
from flexcp.tools.train.data import VOCABULARY, PackedBatch
from flexcp.tools.train.model import ByteTransformer
from flexcp.tools.train.team import Team


@dataclass(frozen=True, eq=False)
class RankBatch:
    """A rank's part of a batch, with what its attention must know of the whole."""

    local: dict[str, Tensor | int]
    """Its rows of tokens, labels and positions, and the number of scored tokens of the batch."""
    masks: dict[str, Mask]
    """The mask of each kind of layer."""
    plan: Plan | None
    """Who owns which tokens of this batch; None in one process."""
    plan_seconds: float
    autocast: bool = False
    """Whether the model is computed in bfloat16."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
        """Attention of these rows over the whole sequence, in the type of the values."""
        q, k = q.to(v.dtype), k.to(v.dtype)  # rotated in float32, if autocast is on
        if self.plan is None:
            out = flex_attention(q, k, v, block_mask=self.masks[kind], enable_gqa=True)
        else:
            out = attention(q, k, v, self.plan, mask=kind)
        assert isinstance(out, Tensor)
        return out


def make_model(config: TrainConfig) -> ByteTransformer:
    """The model with its first weights, which are equal on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = ByteTransformer(
            VOCABULARY,
            dim=config.dim,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            sliding=config.window is not None,
        )
    return model.to(device=config.device, dtype=getattr(torch, config.dtype))


def masks_of(batch: PackedBatch, window: int | None) -> dict[str, Mask]:
    """Causal attention within documents; in layers of kind "sliding", not further than `window`."""
    lengths = batch.lengths[0] if len(batch.lengths) == 1 else batch.lengths
    full = masks.causal() & masks.document(lengths=lengths)
    if window is None:
        return {"full": full}
    return {"full": full, "sliding": full & masks.sliding_window(window)}


def rank_batch(batch: PackedBatch, config: TrainConfig, team: Team) -> RankBatch:
    """This rank's rows of a batch. Every batch is packed anew, so every batch has its own plan."""
    by_kind = masks_of(batch, config.window)
    sequences, tokens = batch.tokens.shape
    alone = team.mesh is None
    start = time.perf_counter()
    plan = make_plan(
        by_kind,
        tokens,
        Ranks((1,), rank=0) if alone else team.mesh,
        layout="contiguous" if alone else config.layout,
        schedule="exchange" if alone else config.schedule,
        num_heads=config.heads,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=getattr(torch, config.autocast or config.dtype),
        batch=sequences,
        machine="cpu-gloo" if config.device == "cpu" else None,
    )
    seconds = time.perf_counter() - start
    ids = torch.stack([ids_from_lengths(n) for n in batch.lengths])
    local = shard_batch(
        {"input_ids": batch.tokens, "labels": batch.tokens},
        plan,
        documents=ids,
        restart_positions=True,
    )
    local = {n: x.to(config.device) if isinstance(x, Tensor) else x for n, x in local.items()}
    half = config.autocast is not None
    return RankBatch(local, by_kind, None if alone else plan, seconds, half)


def loss_of(model: ByteTransformer, mine: RankBatch) -> Tensor:
    """This rank's part of the loss; the parts of all ranks add up to that of one process."""
    local = mine.local
    weight = model.embedding.weight
    with torch.autocast(weight.device.type, dtype=torch.bfloat16, enabled=mine.autocast):
        logits = model(local["input_ids"], local["position_ids"], mine.attend)
    logits = logits.to(weight.dtype)
    labels, scored = local["labels"], local["num_scored"]
    assert isinstance(labels, Tensor)
    assert isinstance(scored, int)
    return cross_entropy(logits, labels, scored)
