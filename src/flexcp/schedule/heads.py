"""Splitting heads over the ranks of a group: any counts, kv heads repeated where they must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexcp.errors import FlexCPError


@dataclass(frozen=True)
class HeadSlice:
    """The heads that one rank of a group computes."""

    q: range
    """Query heads."""
    kv: range
    """The kv heads that those use; neighbours may share one."""

    def kv_of(self, q_head: int, num_heads: int, num_kv_heads: int) -> int:
        """Which of the slice's own kv heads a query head uses."""
        return q_head * num_kv_heads // num_heads - self.kv.start

    def shared_kv(self, num_heads: int, num_kv_heads: int) -> list[int] | None:
        """The own kv head of every query head, if they can't share them evenly; else None."""
        each = [self.kv_of(h, num_heads, num_kv_heads) for h in self.q]
        ratio = len(self.q) // max(len(self.kv), 1)
        even = each == [i // ratio for i in range(len(self.q))] if ratio else True
        return None if even and ratio * len(self.kv) == len(self.q) else each

    def cut(self, parts: int, num_heads: int, num_kv_heads: int) -> tuple[HeadSlice, ...]:
        """So many slices of it, no kv head in two; some are empty if it has fewer kv heads.

        >>> HeadSlice(range(4, 8), range(2, 4)).cut(2, 8, 4)[1]
        HeadSlice(q=range(6, 8), kv=range(3, 4))
        """
        ratio = num_heads // num_kv_heads
        found = []
        for i in range(parts):
            first, last = (self.kv.start + n * len(self.kv) // parts for n in (i, i + 1))
            q = range(max(self.q.start, first * ratio), min(self.q.stop, last * ratio))
            found.append(HeadSlice(q, range(first, last)) if first < last else _NO_HEADS)
        return tuple(found)


_NO_HEADS = HeadSlice(range(0), range(0))


def split_heads(num_heads: int, num_kv_heads: int, parts: int) -> tuple[HeadSlice, ...]:
    """Query heads as even as possible; each part gets the kv heads that its query heads use.

    >>> split_heads(8, 2, 4)[1]
    HeadSlice(q=range(2, 4), kv=range(0, 1))
    >>> [len(s.q) for s in split_heads(5, 5, 3)]
    [1, 2, 2]
    >>> [len(s.q) for s in split_heads(2, 1, 4)]
    [0, 1, 0, 1]
    """
    require_heads(num_heads, num_kv_heads)
    slices = []
    for i in range(parts):
        q = range(i * num_heads // parts, (i + 1) * num_heads // parts)
        ratio = num_heads // num_kv_heads
        kv = range(q.start // ratio, -(-q.stop // ratio)) if len(q) else range(0)
        slices.append(HeadSlice(q, kv))
    return tuple(slices)


def are_even(slices: Sequence[range], heads: int) -> bool:
    """Whether each is as far into its share of the heads as the first, and as long.

    >>> are_even([range(1, 2), range(3, 4)], 4), are_even([range(0, 1), range(3, 4)], 4)
    (True, False)
    """
    share, rest = divmod(heads, len(slices))
    return rest == 0 and all(
        len(s) == len(slices[0]) and s.start - i * share == slices[0].start
        for i, s in enumerate(slices)
    )


def require_heads(num_heads: int, num_kv_heads: int) -> None:
    """Query heads must be a multiple of kv heads."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise FlexCPError(
            "num_heads to be a multiple of num_kv_heads, both at least 1",
            f"num_heads={num_heads}, num_kv_heads={num_kv_heads}",
            "pass the model's numbers of query heads and of key-value heads",
        )
