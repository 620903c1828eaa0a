"""The one error that flexcp raises, and checks of integers that users pass."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class FlexCPError(ValueError):
    """A request that flexcp can't honour.

    >>> raise FlexCPError("a block size of at least 1", "0", "pass block_size=128")
    Traceback (most recent call last):
    ...
    flexcp.errors.FlexCPError: expected a block size of at least 1, got 0; pass block_size=128
    """

    is_of_peer = False
    """Whether another rank is the reason: the others know of it, or will find out by themselves."""

    def __init__(self, expected: str, got: str, fix: str) -> None:
        super().__init__(f"expected {expected}, got {got}; {fix}")
        self.expected = expected
        self.got = got
        self.fix = fix

    def __reduce__(self) -> tuple[type[FlexCPError], tuple[str, str, str]]:
        return type(self), (self.expected, self.got, self.fix)


def peer_error(expected: str, got: str, fix: str) -> FlexCPError:
    """The error for what can't be done because of what another rank did or did not do.

    >>> peer_error("rank 1 to send", "nothing", "look at its output").is_of_peer
    True
    """
    error = FlexCPError(expected, got, fix)
    error.is_of_peer = True
    return error


def whole_number(
    name: str, value: object, *, at_least: int, fix: str, at_most: int = 2**63 - 1
) -> int:
    """The integer, or an error that names it.

    >>> whole_number("tokens", 5, at_least=1, fix="pass how many there are")
    5
    >>> whole_number("tokens", 0, at_least=1, fix="pass how many there are")
    Traceback (most recent call last):
    ...
    flexcp.errors.FlexCPError: expected tokens to be an integer of at least 1, got 0; pass how many
    there are
    """
    number = as_whole(value)
    if number is None or number < at_least:
        is_one = number is not None or isinstance(value, bool)
        raise FlexCPError(
            f"{name} to be an integer of at least {at_least}",
            repr(value) if is_one else f"{value!r} of type {type(value).__name__}",
            fix,
        )
    if number > at_most:
        raise FlexCPError(f"{name} to be at most {at_most:,}", f"{number:,}", fix)
    return number


def did_you_mean(given: object, names: Iterable[str]) -> str:
    """The question after a name that is not known; nothing if it is like none that are.

    >>> did_you_mean("balancedd", ["contiguous", "balanced"]), did_you_mean("x", ["ring"])
    ('did you mean balanced?', '')
    """
    close = get_close_matches(given.lower(), list(names), 1) if isinstance(given, str) else []
    return f"did you mean {close[0]}?" if close else ""


def require(name: str, value: object, kind: type[Any] | tuple[type[Any], ...], fix: str) -> None:
    """Raises unless a value is of a kind.

    >>> require("plan", 3, str, "make one with make_plan")
    Traceback (most recent call last):
    ...
    flexcp.errors.FlexCPError: expected plan to be a str, got 3 of type int; make one with make_plan
    """
    if not isinstance(value, kind):
        names = [k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,))]
        told = repr(value)
        raise FlexCPError(
            f"{name} to be a {' or a '.join(names)}",
            f"{told if len(told) < 60 else 'something'} of type {type(value).__name__}",
            fix,
        )


def as_whole(value: object) -> int | None:
    """The integer, or None if it is something else, as True and False are.

    >>> as_whole(5), as_whole(5.0), as_whole(True)
    (5, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def whole_shape(value: object) -> tuple[int, ...] | None:
    """The integers of a tuple, or one by itself; None if there is anything else.

    >>> whole_shape((2, 4)), whole_shape(3), whole_shape((2, 0.5))
    ((2, 4), (3,), None)
    """
    given = value if isinstance(value, tuple) else (value,)
    found = tuple(n for n in map(as_whole, given) if n is not None)
    return found if len(found) == len(given) else None
