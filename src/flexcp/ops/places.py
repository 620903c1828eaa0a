"""Places: rows of a tensor, side by side or picked; and how places are shared in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Places:
    """Rows of a tensor: those from `first` on, unless an index names them."""

    first: int
    rows: int
    """How many."""
    index: Tensor | None = None
    """int64 [rows] Which they are; None if they stand side by side."""

    @classmethod
    def of(cls, at: Tensor) -> Places:
        """The places of an index.

        >>> Places.of(torch.tensor([3, 4, 5]))
        Places(first=3, rows=3, index=None)
        """
        if at.numel() == 0:
            return cls(0, 0)
        if bool((at.diff() == 1).all()):
            return cls(int(at[0]), at.numel())
        return cls(0, at.numel(), at)

    def on(self, device: torch.device) -> Places:
        """The same places, with the index on a device."""
        index = None if self.index is None else self.index.to(device)
        return Places(self.first, self.rows, index)


def arranged(
    sizes: Sequence[int], born: Sequence[int], until: Sequence[int]
) -> tuple[list[int], int]:
    """First rows of buffers in one tensor, and its length; those that live at once don't overlap.

    A buffer is in use from `born` to just before `until`. Buffers are given in order of birth.

    >>> arranged([5, 3, 4], [0, 1, 2], [2, 3, 4])  # the third takes the place of the first
    ([0, 5, 0], 8)
    """
    taken: list[tuple[int, int, int]] = []  # (first, past the last, until)
    offsets, length = [], 0
    for size, begin, end in zip(sizes, born, until, strict=True):
        taken = sorted(t for t in taken if t[2] > begin)
        at = 0
        for first, last, _ in taken:
            if at + size <= first:
                break
            at = max(at, last)
        offsets.append(at)
        if size:
            taken.append((at, at + size, end))
        length = max(length, at + size)
    return offsets, length


def rows_of_spans(spans: Sequence[tuple[int, int]]) -> Tensor:
    """int64 The rows of some (start, stop) pairs."""
    parts = [torch.arange(a, b) for a, b in spans]
    return torch.cat([*parts, torch.zeros(0, dtype=torch.int64)])
