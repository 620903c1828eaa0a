"""Swapping rows for heads within a group of ranks, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from flexcp.comm import RoundLabel, Transport
from flexcp.schedule import Schedule
from flexcp.schedule.heads import HeadSlice


@dataclass(frozen=True, eq=False)
class Swap:
    """What one rank exchanges with the other ranks of its group.

    Outside of attention a rank has some rows of all heads; inside, all rows of its group for some
    heads. Tensors are [B, heads, rows, ...].
    """

    transport: Transport
    members: tuple[int, ...]
    """The ranks of the group."""
    place: int
    """This rank's place among them."""
    heads: tuple[HeadSlice, ...]
    """The heads of each member."""
    rows: tuple[int, ...]
    """The rows of each member, in each batch element."""
    num_heads: int
    num_kv_heads: int

    @classmethod
    def of(
        cls, schedule: Schedule, transport: Transport, num_heads: int, num_kv_heads: int
    ) -> Swap | None:
        """None if there is nothing to swap."""
        if schedule.heads_group_size == 1:
            return None
        members = tuple(schedule.members(transport.rank))
        counts = schedule.layout.counts
        return cls(
            transport,
            members,
            transport.rank - members[0],
            schedule.heads,
            tuple(int(counts[m]) for m in members),
            num_heads,
            num_kv_heads,
        )

    def to_heads(self, x: Tensor, label: RoundLabel, *, kv: bool = False) -> Tensor:
        """All rows of the group, for this rank's own heads."""
        slices = [s.kv if kv else s.q for s in self.heads]
        parts = [x[:, s.start : s.stop] for s in slices]
        own = len(slices[self.place])
        shapes = [(x.shape[0], own, n, *x.shape[3:]) for n in self.rows]
        came = self._all_to_all(parts, shapes, label)
        return torch.cat(came, dim=2)

    def to_rows(self, x: Tensor, label: RoundLabel, *, kv: bool = False) -> Tensor:
        """All heads of this rank's own rows; a kv head that several ranks used is added up."""
        slices = [s.kv if kv else s.q for s in self.heads]
        parts = list(x.split(list(self.rows), dim=2))
        own = self.rows[self.place]
        shapes = [(x.shape[0], len(s), own, *x.shape[3:]) for s in slices]
        came = self._all_to_all(parts, shapes, label)
        if not kv:
            return torch.cat(came, dim=1)
        total = x.new_zeros(x.shape[0], self.num_kv_heads, own, *x.shape[3:])
        for s, part in zip(slices, came, strict=True):
            total[:, s.start : s.stop] += part
        return total

    def own_keys(self, x: Tensor) -> Tensor:
        """K or V with heads that the query heads can share evenly; repeated if they can't."""
        index = self._kv_index
        return x if index is None else x.index_select(1, index.to(x.device))

    def own_keys_gradient(self, grad: Tensor, heads: int) -> Tensor:
        """The gradient of what `own_keys` was given."""
        index = self._kv_index
        if index is None:
            return grad
        total = grad.new_zeros(grad.shape[0], heads, *grad.shape[2:])
        return total.index_add_(1, index.to(grad.device), grad)

    @cached_property
    def _kv_index(self) -> Tensor | None:
        """int64 The kv head of each of the own ones, if the kernel needs them repeated."""
        each = self.heads[self.place].shared_kv(self.num_heads, self.num_kv_heads)
        return None if each is None else torch.tensor(each)

    def _all_to_all(
        self, parts: list[Tensor], shapes: list[tuple[int, ...]], label: RoundLabel
    ) -> list[Tensor]:
        flat = torch.cat([part.reshape(-1) for part in parts])
        takes = [prod(shape) for shape in shapes]
        out = flat.new_empty(sum(takes))
        gives = [part.numel() for part in parts]
        self.transport.all_to_all(out, flat, takes, gives, self.members, label=label).wait()
        return [x.view(shape) for x, shape in zip(out.split(takes), shapes, strict=True)]
