"""The one error that flexcp raises, and checks of what users pass."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
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

    def __init__(self, expected: str, got: str, fix: str) -> None:  # torch.compile can follow it
        self.expected = expected
        self.got = got
        self.fix = fix

    def __str__(self) -> str:
        return f"expected {self.expected}, got {self.got}; {self.fix}"


def peer_error(expected: str, got: str, fix: str) -> FlexCPError:
    """The error for what can't be done because of what another rank did or did not do.

    >>> peer_error("rank 1 to send", "nothing", "look at its output").is_of_peer
    True
    """
    error = FlexCPError(expected, got, fix)
    error.is_of_peer = True
    return error


def quote(value: object) -> str:
    """A value as an error shows it: its repr, or its type alone if that is long or not to be had.

    >>> quote("ring"), quote(list(range(100)))
    ("'ring'", 'something of type list')
    """
    if type(value) is str:
        return repr(value if len(value) <= _LONG_TEXT else value[:_LONG_TEXT] + "…")
    try:
        text = repr(value)
    except Exception:  # the value's own, whatever it raises
        text = ""
    return text if 0 < len(text) < _LONG else f"something of type {type(value).__name__}"


_LONG = 100
"""Characters of a repr that says more than a type does."""
_LONG_TEXT = 200
"""Characters of a text, such as the name of a file, that are shown."""


def told(value: object) -> str:
    """A value of a wrong type as an error shows it.

    >>> told(3)
    '3 of type int'
    """
    text, kind = quote(value), f" of type {type(value).__name__}"
    return text if text.endswith(kind) else text + kind


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
            quote(value) if is_one else told(value),
            fix,
        )
    if number > at_most:
        raise FlexCPError(
            f"{name} to be at most {at_most:,}",
            f"{number:,}" if number < 10**24 else "more than 10^24",
            fix,
        )
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
        raise FlexCPError(f"{name} to be a {' or a '.join(names)}", told(value), fix)


def require_function(what: str, function: object, arguments: int, fix: str) -> None:
    """Raises unless something can be called with so many arguments.

    >>> require_function("plan_of, a function of a batch", len, 1, "pass one")
    >>> require_function("plan_of, a function of a batch", lambda: 0, 1, "pass one")
    Traceback (most recent call last):
    ...
    flexcp.errors.FlexCPError: expected plan_of, a function of a batch, got one that takes other
    arguments: (); pass one
    """
    if not callable(function):
        raise FlexCPError(what, told(function), fix)
    try:
        signature = inspect.signature(function)
    except Exception:  # it has none that Python knows
        return
    try:
        signature.bind(*range(arguments))
    except TypeError:
        got = f"one that takes other arguments: {signature}"
        raise FlexCPError(what, got, fix) from None


def check_flags(**flags: object) -> None:
    """Raises unless each is True or False: of a tensor nobody could tell which."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            require(name, value, bool, "pass True or False")


def finite_number(name: str, value: object, *, fix: str, least: float, most: float) -> float:
    """The number within bounds, or an error that names it; neither NaN nor True is one.

    >>> finite_number("seconds", 2, fix="pass seconds=0.2", least=0, most=60)
    2.0
    >>> finite_number("seconds", float("nan"), fix="pass seconds=0.2", least=0, most=60)
    Traceback (most recent call last):
    ...
    flexcp.errors.FlexCPError: expected seconds to be a number from 0 to 60, got nan; pass
    seconds=0.2
    """
    number = as_number(value)
    if number is None or not least <= number <= most:
        bounds = f"from {least:g} to {most:g}" if most < _NO_BOUND else f"of at least {least:g}"
        raise FlexCPError(
            f"{name} to be a number {bounds}",
            quote(value) if isinstance(value, int | float) else told(value),
            fix,
        )
    return number


_NO_BOUND = 1e300


def as_number(value: object) -> float | None:
    """The finite number, of Python's, numpy's or a tensor of one; None if it is something else.

    >>> as_number(2), as_number(True), as_number("2"), as_number(float("inf"))
    (2.0, None, None, None)
    """
    kind = str(getattr(value, "dtype", ""))  # numpy's and torch's
    if isinstance(value, bool | str | bytes) or "bool" in kind or "complex" in kind:
        return None
    if not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except Exception:  # of an object's own, whatever it raises
        return None
    return number if math.isfinite(number) else None


def is_there(path: Path) -> bool:
    """Whether a file or a folder has that name, also if none can have it.

    >>> is_there(Path("/")), is_there(Path("x" * 5000))
    (True, False)
    """
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


@contextmanager
def writing(path: str | Path) -> Iterator[Path]:
    """The path of a file to be written; what goes wrong with it is an error that names it.

    >>> with writing("/nonexistent/plan.json") as path:
    ...     path.write_text("")
    Traceback (most recent call last):
    ...
    flexcp.errors.FlexCPError: expected a file that can be written at '/nonexistent/plan.json', got
    No such file or directory; choose another place
    """
    require("path", path, (str, Path), "pass the name of a file")
    try:
        yield Path(path)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        if isinstance(error, FlexCPError):
            raise
        raise FlexCPError(
            f"a file that can be written at {quote(str(path))}",
            getattr(error, "strerror", None) or str(error)[:200],
            "choose another place",
        ) from None


def as_whole(value: object) -> int | None:
    """The integer, or None if it is something else, as True and False are.

    >>> as_whole(5), as_whole(5.0), as_whole(True)
    (5, None, None)
    """
    if isinstance(value, bool):
        return None
    if str(getattr(value, "dtype", "")).removeprefix("torch.") == "bool":  # a tensor's truth
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None


def whole_shape(value: object) -> tuple[int, ...] | None:
    """The integers of a tuple, or one by itself; None if there is anything else.

    >>> whole_shape((2, 4)), whole_shape(3), whole_shape((2, 0.5))
    ((2, 4), (3,), None)
    """
    given = value if isinstance(value, tuple) else (value,)
    found = tuple(n for n in map(as_whole, given) if n is not None)
    return found if len(found) == len(given) else None
