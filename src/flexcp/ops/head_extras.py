"""What a call keeps of each part of its heads: apart for the parts, in one tensor for a graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SWAPPED = 5
"""Extras of each part: q, k and v after the swap, and the result for them with its lse."""


def of_parts(
    extras: Sequence[Tensor], parts: int
) -> tuple[list[Sequence[Tensor]], Sequence[Tensor]]:
    """What was swapped, by part; and the kept rows, by part, if the schedule keeps any."""
    count = SWAPPED * parts
    return [extras[i : i + SWAPPED] for i in range(0, count, SWAPPED)], extras[count:]


def all_heads(swapped: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """q, k, v, out and lse of all parts' heads; none if nothing was swapped."""
    if len(swapped) == 1:
        return list(swapped[0])
    return [torch.cat(of_parts, dim=1) for of_parts in zip(*swapped, strict=True)]


def split_heads(heads: Sequence[tuple[int, int]], whole: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The extras of all parts again, from what `all_heads` made of them.

    `heads` are the query heads, and the key-value heads, of every part.
    """
    if not whole or len(heads) == 1:
        return tuple(whole)
    q, kv = ([of_part[i] for of_part in heads] for i in (0, 1))
    split = [x.split(n, dim=1) for x, n in zip(whole, (q, kv, kv, q, q), strict=True)]
    return tuple(x for of_part in zip(*split, strict=True) for x in of_part)
