"""Swapping rows for heads within a group of ranks, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flexcp.comm import Pending, RoundLabel, Transport
from flexcp.schedule import Schedule
from flexcp.schedule.heads import HeadSlice


@dataclass(frozen=True, eq=False)
class HeadsOnTheirWay:
    """All rows of the group for this rank's own heads, once they are here."""

    pending: Pending
    rows: Tensor
    """[rows, B, heads, D]"""

    def wait(self) -> Tensor:
        """[B, heads, rows, D], as a view of memory that has rows first."""
        self.pending.wait()
        return self.rows.permute(1, 2, 0, 3)


@dataclass(frozen=True, eq=False)
class RowsOnTheirWay:
    """All heads of this rank's own rows, once they are here."""

    pending: Pending
    parts: tuple[Tensor, ...]
    """[rows, B, heads of each member, D]"""
    first_heads: tuple[int, ...] | None
    """The first head of each, if several members have one; the whole has `num_heads`."""
    num_heads: int

    def wait(self) -> Tensor:
        """[B, heads, rows, D]; a head that several ranks had is summed, in order of rank."""
        self.pending.wait()
        parts = [part.permute(1, 2, 0, 3) for part in self.parts]
        if self.first_heads is None:
            return torch.cat(parts, dim=1)
        b, _, rows, d = parts[0].shape
        total = parts[0].new_zeros(b, self.num_heads, rows, d)
        for first, part in zip(self.first_heads, parts, strict=True):
            total.narrow(1, first, part.shape[1]).add_(part)
        return total


@dataclass(frozen=True, eq=False)
class Swap:
    """What one rank exchanges with the other ranks of its group.

    Outside of attention a rank has some rows of all heads; inside, all rows of its group for some
    heads. Tensors are [B, heads, rows, D]. What travels has its rows first, so that what comes is
    in the order of the group's rows.
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
        counts = schedule.layout.counts.tolist()
        return cls(
            transport,
            members,
            transport.rank - members[0],
            schedule.heads,
            tuple(counts[m] for m in members),
            num_heads,
            num_kv_heads,
        )

    def to_heads(self, *tensors: Tensor, label: RoundLabel, kv: bool = False) -> HeadsOnTheirWay:
        """Starts to swap for all rows of the group; several tensors are put side by side."""
        slices = self._slices(kv)
        b, _, rows, _ = tensors[0].shape
        each = b * sum(x.shape[3] for x in tensors)
        gives = [rows * len(s) * each for s in slices]
        packed = tensors[0].new_empty(sum(gives))
        by_row = [x.permute(2, 0, 1, 3) for x in tensors]
        if self._even(kv):
            into = packed.view(len(slices), rows, b, len(slices[0]), each // b if b else 0)
            split = [x.unflatten(2, (len(slices), -1)).permute(2, 0, 1, 3, 4) for x in by_row]
            torch.cat(split, -1, out=into)
        else:
            for s, into in zip(slices, packed.split(gives), strict=True):
                if into.numel():
                    parts = [x.narrow(2, s.start, len(s)) for x in by_row]
                    torch.cat(parts, -1, out=into.view(rows, b, len(s), -1))
        own = len(slices[self.place])
        takes = [n * own * each for n in self.rows]
        came = packed.new_empty(sum(self.rows), b, own, each // b if b else 0)
        pending = self.transport.all_to_all(
            came.view(-1), packed, takes, gives, self.members, label=label
        )
        return HeadsOnTheirWay(pending, came)

    def to_rows(self, x: Tensor, *, label: RoundLabel, kv: bool = False) -> RowsOnTheirWay:
        """Starts to swap for all heads of this rank's own rows."""
        slices = self._slices(kv)
        b, heads, _, d = x.shape
        own = self.rows[self.place]
        gives = [n * b * heads * d for n in self.rows]
        takes = [own * b * len(s) * d for s in slices]
        came = x.new_empty(sum(takes))
        pending = self.transport.all_to_all(
            came,
            x.permute(2, 0, 1, 3).contiguous().view(-1),
            takes,
            gives,
            self.members,
            label=label,
        )
        split = zip(slices, came.split(takes), strict=True)
        parts = tuple(part.view(own, b, len(s), d) for s, part in split)
        shared = kv and self._shares_kv
        first = tuple(s.start for s in slices) if shared else None
        return RowsOnTheirWay(pending, parts, first, self.num_kv_heads)

    def own_keys(self, x: Tensor) -> Tensor:
        """K and V with heads that the query heads can share evenly; repeated if they can't."""
        index = self._kv_index
        if index is None:
            return x
        rows = x.permute(2, 0, 1, 3).index_select(2, index.to(x.device))
        return rows.permute(1, 2, 0, 3)

    def own_keys_gradient(self, grad: Tensor) -> Tensor:
        """The gradient of what `own_keys` was given."""
        index = self._kv_index
        if index is None:
            return grad
        heads = len(self.heads[self.place].kv)
        total = grad.new_zeros(grad.shape[0], heads, *grad.shape[2:])
        return total.index_add_(1, index.to(grad.device), grad)

    def _slices(self, kv: bool) -> list[range]:
        return [s.kv if kv else s.q for s in self.heads]

    def _even(self, kv: bool) -> bool:
        """Whether every member has equally many heads, all different."""
        return self._even_kv if kv else self._even_q

    @cached_property
    def _even_q(self) -> bool:
        return self.num_heads % len(self.heads) == 0

    @cached_property
    def _even_kv(self) -> bool:
        return self.num_kv_heads % len(self.heads) == 0

    @cached_property
    def _shares_kv(self) -> bool:
        return sum(len(s.kv) for s in self.heads) > self.num_kv_heads

    @cached_property
    def _kv_index(self) -> Tensor | None:
        """int64 The kv head of each of the own ones, if the kernel needs them repeated."""
        each = self.heads[self.place].shared_kv(self.num_heads, self.num_kv_heads)
        return None if each is None else torch.tensor(each)
