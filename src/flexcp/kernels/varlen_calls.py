"""Slabs as calls of a variable-length attention op: sequences of rows and keys, and one window.

Such an op takes sequences that follow each other among the queries and among the keys. The last
query of each is level with its last key, and sees `left` keys before and `right` keys after the
one that it is level with. So a causal mask is one sequence, packed documents are one each, and a
sliding window is one as well: a triangle, then a band.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from flexcp.kernels.interface import Shapes, Slab

MOST_CALLS = 4
"""More calls than that, and one kernel that takes any mask is ahead."""

EVERYTHING = -1
"""A side of a window without limit."""


@dataclass(frozen=True)
class SequenceOfRows:
    """Consecutive rows that see, each, one stretch of a range of keys."""

    slabs: tuple[Slab, ...]
    """From the first row to the last."""
    left: int
    right: int

    @property
    def q0(self) -> int:
        """The first row."""
        return self.slabs[0].q0

    @property
    def q1(self) -> int:
        """One past the last row."""
        return self.slabs[-1].q1

    @property
    def keys(self) -> tuple[int, int]:
        """The range of keys that the rows see."""
        return self.slabs[0].k0, _end(self.slabs[-1], self.slabs[-1].rows - 1)

    @classmethod
    def of(cls, slabs: Sequence[Slab]) -> SequenceOfRows | None:
        """The sequence of slabs that follow each other, if one window says what each row sees.

        >>> SequenceOfRows.of([Slab(0, 3, 0, 1, 0, 1), Slab(3, 9, 1, 4, 1, 1)])  # window of 3
        ... # doctest: +ELLIPSIS
        SequenceOfRows(slabs=(...), left=2, right=0)
        """
        first, last = slabs[0].k0, _end(slabs[-1], slabs[-1].rows - 1)
        level = last - slabs[-1].q1  # to a row, the key that it is level with
        starts = [level + s.q0 - s.k0 for s in slabs if s.k0_step == 1 or s.k0 > first]
        ends = [s.k1 - 1 - level - s.q0 for s in slabs if s.k1_step == 1 or s.k1 < last]
        if min([*starts, *ends], default=0) < 0:
            return None
        left, right = (sides[0] if sides else EVERYTHING for sides in (starts, ends))
        found = cls(tuple(slabs), left, right)
        return found if found.fits(left, right) else None

    def fits(self, left: int, right: int) -> bool:
        """Whether a window of these sides lets each row see what it sees.

        Ends of slabs move by 0 or 1 from row to row, and so do those of a window until they stop:
        if both agree on a slab's first row and on its last, they do on all between.
        """
        first, last = self.keys
        level = last - (self.q1 - self.q0)
        if level < first and (right > 0 or (left != EVERYTHING and right == EVERYTHING)):
            # More rows than keys: FlashAttention 2 then takes a wide window for none, or none for
            # one of all keys, which are not the same to rows that are level with no key.
            return False
        for slab in self.slabs:
            if slab.k0_step not in (0, 1) or slab.k1_step not in (0, 1):
                return False
            for i in (0, slab.rows - 1):
                at = level + slab.q0 - self.q0 + i
                start = first if left == EVERYTHING else max(first, at - left)
                end = last if right == EVERYTHING else min(last, at + right + 1)
                if (slab.k0 + i * slab.k0_step, _end(slab, i)) != (start, end):
                    return False
        return True

    def alone(self) -> list[SequenceOfRows]:
        """If each row sees the one key that it is level with, the rows as a sequence each."""
        if (self.left, self.right) != (0, 0):
            return [self]
        level = self.keys[0] - self.q0
        return [
            replace(self, slabs=(Slab(i, i + 1, level + i, level + i + 1),))
            for i in range(self.q0, self.q1)
        ]

    def moved(self, rows: int, keys: int) -> SequenceOfRows:
        """The same, so many rows and keys further on."""
        slabs = [
            replace(s, q0=s.q0 + rows, q1=s.q1 + rows, k0=s.k0 + keys, k1=s.k1 + keys)
            for s in self.slabs
        ]
        return replace(self, slabs=tuple(slabs))


@dataclass(frozen=True, eq=False)
class VarlenCall:
    """One call: where its sequences end, among rows and keys that begin somewhere."""

    rows: slice
    """Of the queries, those of all batch elements one after the other."""
    keys: slice
    q_ends: Tensor
    """int32 [sequences + 1] From 0 to the number of rows."""
    k_ends: Tensor
    """int32 [sequences + 1] From 0 to the number of keys."""
    longest_q: int
    longest_k: int
    left: int
    right: int
    idle_rows: Tensor | None
    """int64 Rows that see nothing in this call, whatever the op makes of them; None if none."""
    idle_keys: Tensor | None
    """int64 Keys that nothing sees in this call; None if none."""

    def is_whole(self, rows: int, keys: int) -> bool:
        """Whether the call takes all rows and keys, and each of them is used."""
        idle = self.idle_rows is not None or self.idle_keys is not None
        return not idle and (self.rows, self.keys) == (slice(0, rows), slice(0, keys))

    def to(self, device: torch.device) -> VarlenCall:
        """The same with tensors on a device."""
        return replace(
            self,
            q_ends=self.q_ends.to(device),
            k_ends=self.k_ends.to(device),
            idle_rows=None if self.idle_rows is None else self.idle_rows.to(device),
            idle_keys=None if self.idle_keys is None else self.idle_keys.to(device),
        )


def varlen_calls(shapes: Shapes, batch: int) -> tuple[VarlenCall, ...] | None:
    """The calls that compute all pairs of `shapes`, each pair once; None if a few can't.

    >>> from flexcp.kernels.interface import causal_shapes
    >>> (call,) = varlen_calls(causal_shapes(5), batch=2)
    >>> call.q_ends.tolist(), call.left, call.right
    ([0, 5, 10], -1, 0)
    """
    if shapes.heads > 1 or any(plane.tiles for plane in shapes.planes):
        return None
    by_plane = [_sequences(plane.slabs) for plane in shapes.planes]
    calls: list[_Call] = []
    for element in range(batch):
        found = by_plane[shapes.plane_of[element if shapes.batch > 1 else 0][0]]
        if found is None:
            return None
        for sequence in found:
            _add(calls, sequence.moved(element * shapes.q_len, element * shapes.kv_len))
            if len(calls) > MOST_CALLS:
                return None
    return tuple(_made(call) for call in calls)


def _sequences(slabs: Iterable[Slab]) -> list[SequenceOfRows] | None:
    """The slabs of a plane as sequences, as few as joining neighbours gives, in order of rows."""
    ending: dict[int, list[SequenceOfRows]] = {}
    for slab in sorted(slabs, key=lambda s: (s.q0, s.k0)):
        before = ending.get(slab.q0, [])
        for at, sequence in enumerate(before):
            joined = SequenceOfRows.of([*sequence.slabs, slab])
            if joined is None:  # a row that sees one key may be the first of another sequence
                *others, last = sequence.alone()
                joined = SequenceOfRows.of([*last.slabs, slab]) if others else None
                for one in others if joined is not None else ():
                    ending.setdefault(one.q1, []).append(one)
            if joined is not None:
                del before[at]
                break
        else:
            joined = SequenceOfRows.of([slab])
        if joined is None:
            return None
        ending.setdefault(joined.q1, []).append(joined)
    sequences = [s for found in ending.values() for s in found]
    if len({(s.left, s.right) for s in sequences}) > 1:  # so that one window may be right for all
        sequences = [one for s in sequences for one in s.alone()]
    return sorted(sequences, key=lambda s: (s.q0, s.keys))


@dataclass
class _Call:
    """A call that is being put together."""

    sequences: list[SequenceOfRows]
    left: int
    right: int

    def takes(self, new: SequenceOfRows) -> bool:
        """Adds a sequence, if it follows the last one and one window is right for all."""
        last = self.sequences[-1]
        if new.q0 < last.q1 or new.keys[0] < last.keys[1]:
            return False
        if not new.fits(self.left, self.right):
            if not all(s.fits(new.left, new.right) for s in self.sequences):
                return False
            self.left, self.right = new.left, new.right
        self.sequences.append(new)
        return True


def _add(calls: list[_Call], sequence: SequenceOfRows) -> None:
    if not any(call.takes(sequence) for call in calls):
        calls.append(_Call([sequence], sequence.left, sequence.right))


def _made(call: _Call) -> VarlenCall:
    first, last = call.sequences[0], call.sequences[-1]
    q_ends, k_ends = [first.q0], [first.keys[0]]
    idle_rows, idle_keys = [], []
    for sequence in call.sequences:
        start, stop = sequence.keys
        if sequence.q0 > q_ends[-1]:  # rows between two sequences: a sequence without keys
            idle_rows.append(torch.arange(q_ends[-1], sequence.q0))
            q_ends.append(sequence.q0)
            k_ends.append(k_ends[-1])
        if start > k_ends[-1]:  # and keys likewise
            idle_keys.append(torch.arange(k_ends[-1], start))
            q_ends.append(q_ends[-1])
            k_ends.append(start)
        q_ends.append(sequence.q1)
        k_ends.append(stop)
    return VarlenCall(
        slice(first.q0, last.q1),
        slice(first.keys[0], last.keys[1]),
        torch.tensor(q_ends, dtype=torch.int32) - first.q0,
        torch.tensor(k_ends, dtype=torch.int32) - first.keys[0],
        max(b - a for a, b in pairwise(q_ends)),
        max(b - a for a, b in pairwise(k_ends)),
        call.left,
        call.right,
        torch.cat(idle_rows) - first.q0 if idle_rows else None,
        torch.cat(idle_keys) - first.keys[0] if idle_keys else None,
    )


def _end(slab: Slab, i: int) -> int:
    """One past the last key that the i-th row of a slab sees."""
    return slab.k1 + i * slab.k1_step
