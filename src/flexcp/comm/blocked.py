"""Ranks that wait for each other, found out on the board once a rank has waited for long.

A rank that waits for long writes down what it waits for, from whom, and which steps it has begun
itself. From what others have written it sees whether one of them has begun what it waits for, or
waits in turn. Ranks that wait for steps which the others have not begun, in a circle, will wait for
ever: whoever finds that twice in a row tells all of them, and each raises.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flexcp.comm.board import Board

_BEGUN = 4096
"""Steps that a rank remembers to have begun."""


@dataclass(frozen=True)
class Blocked:
    """What one rank waits for."""

    wait: int
    """Which of its waits, so that two looks can tell whether it is still the same."""
    step: str
    """What errors call the step."""
    needs: Mapping[int, int]
    """The tag of the step that each of these ranks has to begin."""
    begun: frozenset[int]
    """Tags of the steps that it has begun itself."""

    def as_text(self) -> str:
        """As the board keeps it."""
        needs = [[rank, tag] for rank, tag in self.needs.items()]
        return json.dumps([self.wait, self.step, needs, sorted(self.begun)])

    @classmethod
    def of(cls, text: str) -> Blocked:
        """From what `as_text` gave."""
        wait, step, needs, begun = json.loads(text)
        return cls(wait, step, dict(needs), frozenset(begun))


class Waits:
    """The waits of one rank, as others may learn of them."""

    def __init__(self, rank: int, board: Board) -> None:
        self._rank, self._board = rank, board
        self.begun: deque[int] = deque(maxlen=_BEGUN)
        """Tags of the steps in which this rank has sent, or come, what others wait for."""
        self._number = 0
        self._before: dict[int, int] = {}

    def begin_wait(self, step: str, needs: Iterable[tuple[int, int]]) -> None:
        """Writes down that this rank waits, for so long already that others should know."""
        self._number += 1
        own = Blocked(self._number, step, dict(needs), frozenset(self.begun))
        self._board.write(f"blocked/{self._rank}", own.as_text())
        self._before = {}

    def end_wait(self) -> None:
        """Strikes out what `begin_wait` wrote."""
        self._board.erase(f"blocked/{self._rank}")

    def verdict(self) -> str | None:
        """Who waits for whom in a circle, if this rank is or waits for one of them."""
        told = self._board.read(f"verdict/{self._rank}/{self._number}")
        if told is not None:
            return told
        found = stuck(self._rank, self._read)
        numbers = {rank: each.wait for rank, each in found.items()}
        if not found or numbers != self._before:
            self._before = numbers
            return None
        text = "; ".join(_waits_for(rank, found) for rank in sorted(found))
        for rank, number in numbers.items():
            self._board.write(f"verdict/{rank}/{number}", text)
        return text

    def _read(self, rank: int) -> Blocked | None:
        text = self._board.read(f"blocked/{rank}")
        return None if text is None else Blocked.of(text)


def _waits_for(rank: int, found: Mapping[int, Blocked]) -> str:
    own = found[rank]
    whom = [r for r, tag in own.needs.items() if r in found and tag not in found[r].begun]
    return f"rank {rank} waits for rank {' and '.join(map(str, whom))} in {own.step}"


def stuck(start: int, read: Callable[[int], Blocked | None]) -> dict[int, Blocked]:
    """All ranks that wait for each other for ever, as far as `start` waits for them.

    Empty if `start` may still get what it waits for. `read` gives what a rank waits for, if it has
    written that down.
    """
    found: dict[int, Blocked] = {}
    ahead = [start]
    while ahead:
        rank = ahead.pop()
        blocked = read(rank) if rank not in found else None
        if blocked is not None:
            found[rank] = blocked
            ahead += blocked.needs
    while True:
        free = [rank for rank, each in found.items() if not _is_held_up(each, found)]
        if not free:
            return found if start in found else {}
        for rank in free:
            del found[rank]


def _is_held_up(blocked: Blocked, by: Mapping[int, Blocked]) -> bool:
    """Whether one of these ranks has not begun what is needed of it."""
    return any(r in by and tag not in by[r].begun for r, tag in blocked.needs.items())
