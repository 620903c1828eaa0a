"""PlanMemo: what later stages work out once per plan, kept with the plan and bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

MOST_ENTRIES = 256
"""Entries of a memo: a plan has a few masks, and a few things are worked out for each."""


@dataclass(eq=False)
class PlanMemo:
    """A cache that lives and dies with its plan; beyond its limit, the oldest entries are dropped.

    A key is a frozen dataclass, or a tuple that begins with the name of what is kept: keys of
    several users meet here. Threads may share a memo: if two make the same entry at once, both get
    the one that was kept.

    >>> memo = PlanMemo()
    >>> memo.get(("double", 4), lambda: 8)
    8
    >>> memo.get(("double", 4), lambda: 0)
    8
    """

    limit: int = MOST_ENTRIES
    """How many entries are kept."""
    _entries: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was kept under a key, or what `make` makes, which is kept from now on.

        `make` may use the memo itself; if it raises, nothing is kept.
        """
        # Found without the lock, which torch.compile can't trace.
        kept: T | _Missing = self._entries.get(key, _MISSING)
        return self._keep(key, make()) if isinstance(kept, _Missing) else kept

    def _keep(self, key: Hashable, made: T) -> T:
        with self._lock:
            kept: T = self._entries.setdefault(key, made)
            while len(self._entries) > self.limit:
                del self._entries[next(iter(self._entries))]
        return kept

    def __len__(self) -> int:
        """How many entries there are."""
        return len(self._entries)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins empty: what was kept can be worked out again."""
        return PlanMemo, (self.limit,)


class _Missing:
    """Says that there is no entry: entries may be None."""


_MISSING = _Missing()
