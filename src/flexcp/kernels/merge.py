"""Merging: two partial results of the same rows, over disjoint keys, become one.

Sums over keys are kept, and merged, in the accumulation type.

A partial result is the pair (out, lse): the softmax-weighted mean of some values, and the log of
the sum of their weights (natural logarithm). A row that saw nothing has lse -inf and out 0, and
changes nothing that it is merged with.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over keys are kept: float64 for float64, else float32.

    >>> accumulation_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The result over both sets of keys.

    Args:
        out: [..., L, D], in the accumulation type (float32, or float64).
        lse: [..., L], of the same type.
        other_out: [..., L, D], the result over keys that `out` did not see.
        other_lse: [..., L], that of `other_out`.

    >>> nothing = torch.zeros(1, 2), torch.full((1,), -torch.inf)
    >>> something = torch.ones(1, 2), torch.zeros(1)
    >>> merge(*nothing, *something)
    (tensor([[1., 1.]]), tensor([0.]))
    """
    total = torch.logaddexp(lse, other_lse)
    # Where both saw nothing, -inf - -inf would be NaN; any finite number gives the weights 0, 0.
    anchor = total.masked_fill(total == -torch.inf, 0.0)
    weight = (lse - anchor).exp_().unsqueeze(-1)
    other_weight = (other_lse - anchor).exp_().unsqueeze(-1)
    return (out * weight).addcmul_(other_out, other_weight), total


def merge_into(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Like `merge`, leaving the result in `out` and `lse`."""
    # The other's share of the sum of weights; where both saw nothing, -inf - -inf would be NaN.
    share = (other_lse - lse).sigmoid_().masked_fill_(other_lse == -torch.inf, 0.0)
    out.lerp_(other_out, share.unsqueeze_(-1))
    torch.logaddexp(lse, other_lse, out=lse)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Joins one extra logit per head to each row's denominator; it carries no value.

    Args:
        out: [B, H, L, D] over all keys.
        lse: [B, H, L] over all keys.
        sinks: [H] logits.

    >>> out, lse = add_sinks(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1), torch.zeros(1))
    >>> out.item(), round(lse.exp().item(), 6)
    (0.5, 2.0)
    """
    logits = sinks.to(lse.dtype).view(1, -1, 1)
    total = torch.logaddexp(lse, logits)
    anchor = total.masked_fill(total == -torch.inf, 0.0)
    return out * (lse - anchor).exp_().unsqueeze(-1), total


def sinks_gradient(
    sinks: Tensor, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> Tensor:
    """The gradient of what `add_sinks` was given as sinks, from its results and their gradients.

    A sink is a key without a value: its weight's gradient is -(delta - grad_lse).
    """
    dtype = lse.dtype
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1)
    delta = delta if grad_lse is None else delta - grad_lse
    anchor = lse.masked_fill(lse == -torch.inf, torch.inf)
    weight = (sinks.to(dtype).view(1, -1, 1) - anchor).exp_()
    return -(weight * delta).sum((0, 2)).to(sinks.dtype)
