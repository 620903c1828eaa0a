"""The oracle: attention written down as its definition, dense and differentiable by autograd.

It holds an S×S matrix and evaluates the mask at every pair, which is what the other kernels avoid
and what makes it easy to believe. Everything else in this package is tested against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.kernels.dropout import Dropout
from flexcp.kernels.merge import accumulation_dtype
from flexcp.kernels.score import ScoreFunction


@dataclass(frozen=True, eq=False)
class DenseResult:
    """What `dense_attention` returns."""

    out: Tensor
    """[B, H, Lq, Dv], in the type of the query."""
    lse: Tensor
    """[B, H, Lq], natural logarithm; -inf for a row that sees nothing."""
    max_scores: Tensor
    """[B, H, Lq]; the largest score of each row, -inf for a row that sees nothing."""


def dense_mask(
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    q_positions: Tensor,
    kv_positions: Tensor,
    *,
    batch: int,
    heads: int,
) -> Tensor:
    """The mask at every pair, [batch, heads, Lq, Lkv], by evaluating it as one scalar per pair.

    >>> i = torch.arange(2)
    >>> dense_mask(lambda b, h, q, kv: q >= kv, i, i, batch=1, heads=1).int()[0, 0]
    tensor([[1, 0],
            [1, 1]], dtype=torch.int32)
    """
    one = torch.func.vmap(mask_mod, in_dims=(None, None, None, 0))
    for dims in ((None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        one = torch.func.vmap(one, in_dims=dims)
    device = q_positions.device
    result: Tensor = one(
        torch.arange(batch, device=device),
        torch.arange(heads, device=device),
        q_positions,
        kv_positions,
    )
    return result


def dense_scores(
    scores: Tensor, score_mod: ScoreFunction, q_positions: Tensor, kv_positions: Tensor
) -> Tensor:
    """`score_mod` on every entry of [B, H, Lq, Lkv] scores, one scalar at a time (by vmap)."""
    one = torch.func.vmap(score_mod, in_dims=(0, None, None, None, 0))
    for dims in (
        (0, None, None, 0, None),
        (0, None, 0, None, None),
        (0, 0, None, None, None),
    ):
        one = torch.func.vmap(one, in_dims=dims)
    batch, heads = scores.shape[:2]
    device = scores.device
    result: Tensor = one(
        scores,
        torch.arange(batch, device=device),
        torch.arange(heads, device=device),
        q_positions,
        kv_positions,
    )
    return result


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    allowed: Tensor | None = None,
    score_mod: ScoreFunction | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    q_positions: Tensor | None = None,
    kv_positions: Tensor | None = None,
    dropout: Dropout | None = None,
) -> DenseResult:
    """Attention over all pairs at once.

    Args:
        q: [B, H, Lq, D].
        k: [B, G, Lkv, D] with H a multiple of G; query head h reads key head h // (H / G).
        v: [B, G, Lkv, Dv].
        allowed: bool, broadcasts to [B, H, Lq, Lkv]; None allows every pair.
        score_mod: as in FlexAttention.
        sinks: [H] logits that join each row's denominator.
        scale: factor on the scores; 1 / sqrt(D) by default.
        q_positions: [Lq] global positions, for `score_mod`; 0, 1, ... by default.
        kv_positions: [Lkv] global positions of the keys, for `score_mod`; 0, 1, ... by default.
        dropout: of the weights after softmax, by global positions.

    >>> q = torch.zeros(1, 1, 2, 4)
    >>> v = torch.tensor([[1.0], [3.0]]).reshape(1, 1, 2, 1)
    >>> causal = torch.tensor([[True, False], [True, True]])
    >>> dense_attention(q, q, v, allowed=causal).out.flatten()
    tensor([1., 2.])
    """
    dtype = accumulation_dtype(q.dtype)
    group = q.shape[1] // max(k.shape[1], 1)
    k_rep = k.to(dtype).repeat_interleave(group, dim=1)
    v_rep = v.to(dtype).repeat_interleave(group, dim=1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q.to(dtype) * scale) @ k_rep.transpose(-1, -2)
    q_pos = torch.arange(q.shape[2], device=q.device) if q_positions is None else q_positions
    kv_pos = torch.arange(k.shape[2], device=q.device) if kv_positions is None else kv_positions
    if score_mod is not None:
        scores = dense_scores(scores, score_mod, q_pos, kv_pos).to(scores.dtype)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    empty = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    logits = (
        empty
        if sinks is None
        else sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
    )
    highest = torch.cat([scores, empty], dim=-1).detach().amax(-1, keepdim=True)
    with_sinks = torch.cat([scores, logits], dim=-1)
    sees_nothing = (with_sinks == -torch.inf).all(-1, keepdim=True)
    # Zeros in place of a row of -inf keep autograd away from inf - inf; the row is cut off below.
    safe = with_sinks.masked_fill(sees_nothing, 0.0)
    lse = torch.logsumexp(safe, dim=-1, keepdim=True)
    weights = (safe - lse).exp()[..., :-1].masked_fill(sees_nothing, 0.0)
    if dropout is not None:
        kept = dropout.kept_of(q.shape[0], q.shape[1], q_pos, kv_pos)
        weights = weights.masked_fill(~kept, 0.0) * dropout.factor
    out = (weights @ v_rep).to(q.dtype)
    lse = lse.masked_fill(sees_nothing, -torch.inf)
    return DenseResult(out, lse.squeeze(-1), highest.squeeze(-1))
