"""Caches that are declared, typed and bounded: with the value they belong to, or by bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

Kind = TypeVar("Kind")
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Derived:
    """What later stages work out from a value, kept with it: one object of each kind.

    It is a field of the value that it belongs to, and dies with it.

    >>> derived = Derived()
    >>> derived.once(list, lambda: [1, 2]) is derived.once(list, lambda: [3])
    True
    """

    __slots__ = ("_by_kind",)

    def __init__(self) -> None:
        self._by_kind: dict[type[Any], Any] = {}

    def once(self, kind: type[Kind], make: Callable[[], Kind]) -> Kind:
        """The object of this kind, made on first use."""
        found: Kind | None = self._by_kind.get(kind)
        if found is None:
            # Two threads may both make it; both then use the first that was stored.
            found = self._by_kind.setdefault(kind, make())
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept, as far as it says how many."""
        return sum(getattr(kept, "nbytes", 0) for kept in tuple(self._by_kind.values()))


class Newest(Generic[Key, Value]):
    """A map that forgets what was added longest ago, beyond a number of entries.

    >>> sizes = Newest[str, int](most=2)
    >>> for name in "abc":
    ...     sizes.add(name, ord(name))
    >>> [sizes.get(name) for name in "abc"]
    [None, 98, 99]
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[Key, Value] = {}
        self._lock = threading.Lock()

    def get(self, key: Key) -> Value | None:
        """What is kept under a key; None if nothing is."""
        return self._kept.get(key)

    def add(self, key: Key, value: Value) -> None:
        """Keeps a value under a key."""
        with self._lock:
            self._kept[key] = value
            while len(self._kept) > self._most:
                del self._kept[next(iter(self._kept))]


class BoundedByBytes(Generic[Key, Value]):
    """A map that forgets what was used longest ago, beyond a number of bytes or of entries.

    Sizes are asked for whenever something is added, since what is kept may grow with use. That, and
    working out the hash of a key, may take long, and is done before the lock is taken.

    >>> kept = BoundedByBytes[str, bytes](5, size_of=lambda key, value: len(value))
    >>> for name in ("ab", "cd", "ef"):
    ...     _ = kept.add(name, name.encode())
    >>> [kept.get(name) for name in ("ab", "cd", "ef")]
    [None, b'cd', b'ef']
    """

    def __init__(
        self, most_bytes: int, size_of: Callable[[Key, Value], int], *, most_entries: int = 128
    ) -> None:
        self._most_bytes = most_bytes
        self._most_entries = most_entries
        self._size_of = size_of
        self._kept: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Value | None:
        """What is kept under a key; None if nothing is."""
        hash(key)
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def add(self, key: Key, value: Value) -> Value:
        """Keeps a value, drops what was used longest ago; returns what was kept first, if any."""
        hash(key)
        size = self._size_of(key, value)
        with self._lock:
            found, _ = self._kept.setdefault(key, (value, size))
            self._kept.move_to_end(key)
            entries = list(self._kept.items())
        sizes = [(k, v, self._size_of(k, v)) for k, (v, _) in entries]
        with self._lock:
            for k, v, size in sizes:
                if k in self._kept and self._kept[k][0] is v:
                    self._kept[k] = (v, size)
            total = sum(size for _, size in self._kept.values())
            # The newest stays however large it is: it would be made again by the next call.
            while len(self._kept) > 1 and (
                total > self._most_bytes or len(self._kept) > self._most_entries
            ):
                total -= self._kept.popitem(last=False)[1][1]
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        with self._lock:
            entries = list(self._kept.items())
        return sum(self._size_of(k, v) for k, (v, _) in entries)

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._kept.clear()
