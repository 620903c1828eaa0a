"""Reading a mask expression: from text to a small tree, without running any of it.

    expression := both ("|" both)*
    both       := not ("&" not)*
    not        := "~" not | "(" expression ")" | call
    call       := name ["(" [argument ("," argument)*] ")"]
    argument   := [word "="] value
    value      := size | word | "quoted text" | "[" [value ("," value)*] "]"

A name is one of the catalogue's, or `package.module:function`. Every node knows where it stands, so
that errors can point at it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from flexcp.errors import FlexCPError
from flexcp.units import parse_size

CATALOGUE = {
    "causal": (),
    "full": (),
    "sliding_window": ("left", "right"),
    "prefix_lm": ("length",),
    "document": ("lengths", "seed"),
    "documents": ("mean", "spread", "seed"),
    "chunked": ("size",),
    "block_causal": ("size",),
    "global_tokens": ("count",),
    "shared_prefix": ("prefix", "lengths"),
}
"""Names of masks and of their parameters."""

Value = int | float | str | list["Value"]


@dataclass(frozen=True)
class Argument:
    """What stands between a call's parentheses."""

    name: str | None
    """Given by keyword."""
    value: Value
    """Numbers, texts, lists of them."""
    at: int
    """Where it begins in the text."""


@dataclass(frozen=True)
class Call:
    """A mask by name."""

    name: str
    arguments: tuple[Argument, ...]
    """As they were written."""
    called: bool
    """Whether there were parentheses."""
    at: int
    """Where it begins in the text."""


@dataclass(frozen=True)
class Combined:
    """Masks joined by `&` or `|`."""

    operator: str
    parts: tuple[Node, ...]
    at: int


@dataclass(frozen=True)
class Negated:
    """`~` of a mask."""

    part: Node
    at: int


Node = Call | Combined | Negated

_TOKEN = re.compile(
    r"\s*(?:(?P<quoted>'[^']*'|\"[^\"]*\")|(?P<sign>[&|~()\[\],=])|(?P<word>[^\s&|~()\[\],='\"]+))"
)
_PYTHON_WORDS = {"and": "&", "or": "|", "not": "~"}


def fail_at(text: str, at: int, expected: str, got: str, fix: str) -> FlexCPError:
    """An error that shows the expression with a caret below the place."""
    shown = text.replace("\n", " ").replace("\t", " ")
    return FlexCPError(expected, got, f"{fix}\n\n    {shown}\n    {' ' * at}^")


def parse_mask(text: str) -> Node:
    """The tree of an expression.

    >>> parse_mask("causal & ~sliding_window(1K)").parts[1].part.arguments
    (Argument(name=None, value=1024, at=25),)
    >>> parse_mask("causal and full")
    Traceback (most recent call last):
    ...
    flexcp.errors.FlexCPError: expected `&`, `|` or the end of the expression, got 'and'; write `&`
    <BLANKLINE>
        causal and full
               ^
    """
    reader = _Reader(text)
    tree = reader.expression()
    if reader.kind != "end":
        fix = "combine masks with `&` (both), `|` (either) and `~` (not)"
        if reader.token in _PYTHON_WORDS:
            fix = f"write `{_PYTHON_WORDS[reader.token]}`"
        raise reader.error("`&`, `|` or the end of the expression", fix)
    return tree


class _Reader:
    """The expression's tokens, read from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.kind, self.token, self.at, self._next = "", "", 0, 0
        self.advance()

    def advance(self) -> None:
        found = _TOKEN.match(self.text, self._next)
        rest = self.text[self._next :]
        if found is None:
            self.at = len(self.text) - len(rest.lstrip())
            if rest.strip():
                self.kind, self.token = "quoted", rest.strip()
                raise self.error("the other quotation mark", "close the file name's quotes")
            self.kind, self.token, self.at = "end", "", len(self.text.rstrip())
            return
        self.kind = str(found.lastgroup)
        self.token, self.at = found[self.kind], found.start(self.kind)
        self._next = found.end()

    def error(self, expected: str, fix: str, *, at: int | None = None) -> FlexCPError:
        got = repr(self.token) if self.kind != "end" else "the end of the expression"
        return fail_at(self.text, self.at if at is None else at, expected, got, fix)

    def sign(self, *signs: str) -> bool:
        return self.kind == "sign" and self.token in signs

    def expression(self) -> Node:
        return self._joined("|", lambda: self._joined("&", self._not))

    def _joined(self, operator: str, part: Callable[[], Node]) -> Node:
        at, parts = self.at, [part()]
        while self.sign(operator):
            self.advance()
            parts.append(part())
        return parts[0] if len(parts) == 1 else Combined(operator, tuple(parts), at)

    def _not(self) -> Node:
        at = self.at
        if self.sign("~"):
            self.advance()
            return Negated(self._not(), at)
        if self.sign("("):
            self.advance()
            inside = self.expression()
            self._close(")", at)
            return inside
        return self._call()

    def _call(self) -> Call:
        if self.kind != "word":
            raise self.error("a mask", f"write one of {', '.join(CATALOGUE)}, or module:function")
        name, at = self.token, self.at
        if name in _PYTHON_WORDS:
            raise self.error("a mask", f"write `{_PYTHON_WORDS[name]}`")
        if ":" not in name and name not in CATALOGUE:
            raise self.error(f"a mask among {', '.join(CATALOGUE)}", _hint(name))
        self.advance()
        if not self.sign("("):
            return Call(name, (), False, at)
        opened = self.at
        self.advance()
        arguments: list[Argument] = []
        while not self.sign(")"):
            arguments.append(self._argument(name))
            if not self.sign(","):
                break
            self.advance()
        self._close(")", opened)
        return Call(name, tuple(arguments), True, at)

    def _argument(self, call: str) -> Argument:
        at, first, kind = self.at, self.token, self.kind
        value = self._value()
        if not self.sign("="):
            return Argument(None, value, at)
        known = CATALOGUE.get(call)
        if kind != "word" or (known is not None and first not in known):
            names = ", ".join(known) if known else "none"
            raise fail_at(
                self.text,
                at,
                f"one of {call}'s parameters: {names}",
                repr(first),
                "use those names",
            )
        self.advance()
        return Argument(first, self._value(), at)

    def _value(self) -> Value:
        if self.sign("["):
            opened, values = self.at, []
            self.advance()
            while not self.sign("]"):
                values.append(self._value())
                if not self.sign(","):
                    break
                self.advance()
            self._close("]", opened)
            return values
        if self.kind not in ("word", "quoted"):
            raise self.error("a number, a file name or a list", "write a value here")
        kind, token = self.kind, self.token
        self.advance()
        return token[1:-1] if kind == "quoted" else _number_or_text(token)

    def _close(self, sign: str, opened: int) -> None:
        if not self.sign(sign):
            what = f"`{sign}`"
            fix = f"close the `{self.text[opened]}` at column {opened + 1}"
            raise self.error(what, fix)
        self.advance()


def _number_or_text(token: str) -> Value:
    for number in (parse_size, int, float):
        try:
            return number(token)
        except ValueError:
            continue
    return token


def _hint(name: str) -> str:
    close = get_close_matches(name, CATALOGUE, 1)
    if close:
        return f"did you mean {close[0]}?"
    return "write package.module:function for a mask of your own"
