"""A call of a public function, with what its arguments are and what else they may be."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flexcp import FlexCPError
from tests.junk.values import JUNK, Fits


@dataclass(frozen=True)
class Argument:
    """What is passed while another argument is junk, and which junk is none here."""

    valid: Any
    fits: Fits


@dataclass(frozen=True)
class Call:
    """A public function with arguments that it takes."""

    function: Callable[..., Any]
    arguments: Mapping[str, Argument]
    positional: bool = False
    only_refusals: bool = False
    """Whether junk that fits is left out, because what it asks for would take long."""
    raises_as_torch: bool = False
    """Whether it has errors of its own classes, as the function of torch's that it stands for."""

    def run(self, place: str, junk: Any) -> Any:
        """Calls it with junk in one place."""
        values = {n: junk if n == place else g.valid for n, g in self.arguments.items()}
        if self.positional:
            return self.function(*values.values())
        return self.function(**values)


def call(function: Callable[..., Any], *positional: Any, **arguments: Any) -> Call:
    """Arguments are pairs: a valid value, and what else fits."""
    if positional:
        named = {str(i): Argument(*given) for i, given in enumerate(positional)}
        return Call(function, named, positional=True)
    return Call(function, {name: Argument(*given) for name, given in arguments.items()})


def refusals(function: Callable[..., Any], **arguments: Any) -> Call:
    """As `call`, of a function whose fitting arguments take it long."""
    return replace(call(function, **arguments), only_refusals=True)


def places(calls: Mapping[str, Call]) -> Iterator[tuple[str, str, str]]:
    """All there is to try: the call, the argument and the junk for it, by their names."""
    for name, one in calls.items():
        for place in one.arguments:
            for junk in JUNK:
                yield name, place, junk


def complaint(call: Call, place: str, junk: str) -> str:
    """What is wrong with how a call takes junk: empty if it is refused in words, or fits."""
    value = JUNK[junk]()
    fits = call.arguments[place].fits(value)
    if fits and call.only_refusals:
        return ""
    try:
        call.run(place, value)
    except FlexCPError as error:
        return "" if len(str(error)) < _LONG else f"says {len(str(error))} characters"
    except Exception as error:
        if call.raises_as_torch and _is_of_compat(error):
            return ""
        return f"raises {type(error).__name__}: {error}"[:200]
    return "" if fits else "is accepted"


_LONG = 1000
"""Characters of a message that nobody reads."""


def _is_of_compat(error: Exception) -> bool:
    """Whether an error was raised on purpose, in the words of the function of torch's."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return False
    file = frame.tb_frame.f_code.co_filename
    return "/compat/" in file and linecache.getline(file, frame.tb_lineno).strip()[:6] == "raise "
