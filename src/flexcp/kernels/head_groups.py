"""Head groups: the batch elements and heads that share a mask plane, run as one sub-tensor."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.kernels.interface import Shapes


@dataclass(frozen=True)
class HeadGroup:
    """Batch elements and heads that share a plane and run together.

    Each of `kv_heads` serves the same number of `q_heads`, which are in the order of KV heads.
    """

    plane: int
    batch_elements: tuple[int, ...]
    q_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]


def head_groups_of(
    shapes: Shapes, batch: int, q_heads: int, kv_heads: int
) -> tuple[HeadGroup, ...]:
    """The head groups of a call: every batch element and head is in exactly one.

    >>> from flexcp.kernels.interface import full_shapes
    >>> head_groups_of(full_shapes(8, 8), 2, 4, 2)
    (HeadGroup(plane=0, batch_elements=(0, 1), q_heads=(0, 1, 2, 3), kv_heads=(0, 1)),)
    """
    group = q_heads // kv_heads
    found: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[int]] = defaultdict(list)
    for b in range(batch):
        line = shapes.plane_of[b if shapes.batch > 1 else 0]
        by_plane: dict[int, list[int]] = defaultdict(list)
        for h in range(q_heads):
            by_plane[line[h if shapes.heads > 1 else 0]].append(h)
        for plane, heads in by_plane.items():
            for chosen, kv in _evenly_grouped(heads, group):
                found[(plane, chosen, kv)].append(b)
    return tuple(
        HeadGroup(plane, tuple(elements), heads, kv)
        for (plane, heads, kv), elements in found.items()
    )


def _evenly_grouped(heads: list[int], group: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Query heads and their KV heads, split so that all KV heads of a part serve equally many."""
    members: dict[int, list[int]] = defaultdict(list)
    for h in heads:
        members[h // group].append(h)
    by_size: dict[int, list[int]] = defaultdict(list)
    for kv, own in members.items():
        by_size[len(own)].append(kv)
    return [(tuple(h for kv in kvs for h in members[kv]), tuple(kvs)) for kvs in by_size.values()]


def select(x: Tensor, batch_elements: tuple[int, ...], heads: tuple[int, ...]) -> Tensor:
    """`x[batch_elements][:, heads]`, as a view where they are consecutive."""
    for dim, chosen in ((0, batch_elements), (1, heads)):
        if chosen == tuple(range(chosen[0], chosen[0] + len(chosen))):
            x = x.narrow(dim, chosen[0], len(chosen))
        else:
            x = x.index_select(dim, torch.tensor(chosen, device=x.device))
    return x


def place(
    target: Tensor,
    batch_elements: tuple[int, ...],
    heads: tuple[int, ...],
    source: Tensor,
    *,
    add: bool,
) -> None:
    """Writes `source` to, or adds it to, `target[batch_elements][:, heads]`."""
    b = torch.tensor(batch_elements, device=target.device)[:, None]
    h = torch.tensor(heads, device=target.device)
    target[b, h] = target[b, h] + source if add else source
