"""PlanMemo: what later stages work out once per plan, kept with the plan and bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

MOST_ENTRIES = 256
"""Entries of a memo beside those of the masks: one for each kind of call, say."""


class PlanMemo(dict[Hashable, Any]):
    """A dict that lives and dies with its plan; its oldest entries are dropped.

    Those of the masks stay: they are few, cost the most, and others are made of them.

    A key is a frozen dataclass, or a tuple that begins with the name of what is kept: keys of
    several users meet here. Threads may share a memo. If two make the same entry at once, both get
    the one that was kept. What is kept must not hold the plan, which would then live too long.

    >>> memo = PlanMemo()
    >>> memo.kept(("double", 4), lambda: 8)
    8
    >>> memo.kept(("double", 4), lambda: 0)
    8
    >>> memo.get(("double", 4))
    8
    """

    def __init__(self, limit: int = MOST_ENTRIES) -> None:
        super().__init__()
        self.limit = limit
        self._per_mask: set[Hashable] = set()
        self._lock = threading.Lock()

    def kept(self, key: Hashable, make: Callable[[], T], *, per_mask: bool = False) -> T:
        """What is kept under a key, or what `make` makes, which is kept from now on.

        An entry of a mask of the plan, or of a part of its heads, `per_mask`, is never dropped.

        `make` runs outside of the lock: it may use the memo itself. If it raises, nothing is kept.
        """
        if key in self:
            found: T = self[key]
            return found
        made = make()
        with self._lock:
            kept: T = self.setdefault(key, made)
            if per_mask:
                self._per_mask.add(key)
            while len(self) - len(self._per_mask) > self.limit:
                del self[next(old for old in self if old not in self._per_mask)]
        return kept

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins empty: what was kept can be worked out again."""
        return PlanMemo, (self.limit,)
