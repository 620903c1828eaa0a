"""PlanMemo: what later stages work out once per plan, kept with the plan and bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

MOST_ENTRIES = 256
"""Entries of a memo: a plan has a few masks, and a few things are worked out for each."""


@dataclass(eq=False)
class PlanMemo:
    """A cache that lives and dies with its plan; the least recently used entries are dropped.

    A key is a frozen dataclass, or a tuple that begins with the name of what is kept: keys of
    several users meet here. Threads may share a memo. If two make the same entry at once, both get
    the one that was kept.

    >>> memo = PlanMemo()
    >>> memo.get(("double", 4), lambda: 8)
    8
    >>> memo.get(("double", 4), lambda: 0)
    8
    """

    limit: int = MOST_ENTRIES
    """How many entries are kept."""
    _entries: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was kept under a key, or what `make` makes, which is kept from now on.

        `make` runs outside of the lock: it may use the memo itself. If it raises, nothing is kept.
        """
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                found: T = self._entries[key]
                return found
        made = make()
        with self._lock:
            kept: T = self._entries.setdefault(key, made)
            self._entries.move_to_end(key)
            while len(self._entries) > self.limit:
                self._entries.popitem(last=False)
        return kept

    def __len__(self) -> int:
        """How many entries there are."""
        return len(self._entries)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins empty: what was kept can be worked out again."""
        return PlanMemo, (self.limit,)
