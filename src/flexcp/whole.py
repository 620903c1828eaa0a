"""Whole numbers from users: Python's and numpy's integers, and nothing that only looks like one."""

from __future__ import annotations

import operator

from flexcp.errors import FlexCPError


def whole_number(name: str, value: object, *, at_least: int, fix: str) -> int:
    """The integer, or an error that names it.

    >>> whole_number("tokens", 5, at_least=1, fix="pass how many there are")
    5
    >>> whole_number("tokens", 0, at_least=1, fix="pass how many there are")
    Traceback (most recent call last):
    ...
    flexcp.errors.FlexCPError: expected tokens to be an integer of at least 1, got 0; pass how many
    there are
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < at_least:
        raise FlexCPError(
            f"{name} to be an integer of at least {at_least}",
            repr(value) if number is not None else f"{value!r} of type {type(value).__name__}",
            fix,
        )
    return number
