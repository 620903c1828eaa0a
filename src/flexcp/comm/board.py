"""Boards: small texts that all ranks of a group can read, beside what travels between them.

Ranks meet at the board when they do something for the first time, and when something goes wrong. A
call that has been made before does not touch it.
"""

from __future__ import annotations

from typing import Any, Protocol


class Board(Protocol):
    """Texts by key. A text is never empty."""

    def write(self, key: str, text: str) -> None:
        """Writes a text, over what was there."""
        ...

    def read(self, key: str) -> str | None:
        """The text, if there is one."""
        ...

    def first(self, key: str, text: str) -> str:
        """The text that was written first: this one, if there was none."""
        ...

    def count(self, key: str) -> int:
        """Adds one to a counter, and returns it."""
        ...

    def erase(self, key: str) -> None:
        """Removes a text or counter."""
        ...


class MemoryBoard:
    """The board of ranks that are threads of one process and run one at a time.

    >>> board = MemoryBoard()
    >>> board.first("a", "x"), board.first("a", "y"), board.count("n"), board.count("n")
    ('x', 'x', 1, 2)
    """

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def write(self, key: str, text: str) -> None:
        """Writes a text, over what was there."""
        self._texts[key] = text

    def read(self, key: str) -> str | None:
        """The text, if there is one."""
        return self._texts.get(key)

    def first(self, key: str, text: str) -> str:
        """The text that was written first: this one, if there was none."""
        return self._texts.setdefault(key, text)

    def count(self, key: str) -> int:
        """Adds one to a counter, and returns it."""
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key]

    def erase(self, key: str) -> None:
        """Removes a text or counter."""
        self._texts.pop(key, None)
        self._counts.pop(key, None)


class StoreBoard:
    """The board of a process group: its store, on the host."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def write(self, key: str, text: str) -> None:
        """Writes a text, over what was there."""
        self._store.set(self._prefix + key, text)

    def read(self, key: str) -> str | None:
        """The text, if there is one."""
        name = self._prefix + key
        return self._store.get(name).decode() if self._store.check([name]) else None

    def first(self, key: str, text: str) -> str:
        """The text that was written first: this one, if there was none."""
        found: bytes = self._store.compare_set(self._prefix + key, "", text)
        return found.decode()

    def count(self, key: str) -> int:
        """Adds one to a counter, and returns it."""
        return int(self._store.add(self._prefix + key, 1))

    def erase(self, key: str) -> None:
        """Removes a text or counter."""
        self._store.delete_key(self._prefix + key)
