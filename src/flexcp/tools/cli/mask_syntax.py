"""Reading a mask expression: from text to a small tree, without running any of it.

An expression has the grammar of Python, of which `ast` reads the structure: `&`, `|`, `~`, calls,
lists. Its words need not be Python's: `128K`, `lengths.csv`, `package.module:function`. So each
word is replaced by an identifier of the same width before Python sees it, and looked up in the text
by its column afterwards. Nodes that are not part of that structure are errors, and every error
points at its place.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from flexcp.errors import FlexCPError, did_you_mean, quote
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
class NamedMask:
    """A mask by name: one of the catalogue's, or `package.module:function`."""

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


@dataclass(frozen=True)
class Negated:
    """`~` of a mask."""

    part: Node


Node = NamedMask | Combined | Negated

_ATOM = re.compile(r"'[^']*'|\"[^\"]*\"|[^\s&|~()\[\],='\"]+")
_BETWEEN_OPERANDS = re.compile(r"(?<=[_'\")\]]) +(?=[_'\"])")
_WITHOUT_VALUE = re.compile(r"_+ *= *(?=[,)])")
_BEGINS_OF_OPERANDS = ("_", "'", '"', "(", "[", "~")
_ENDS_OF_OPERANDS = ("_", "'", '"', ")", "]")
_PYTHON_WORDS = {"and": "&", "or": "|", "not": "~"}
_END = "the end of the expression"
_A_VALUE = "a number, a file name or a list"
_ANY_MASK = f"write one of {', '.join(CATALOGUE)}, or module:function"
_MOST_NESTED = 200
"""Operators and brackets of one expression: far more than a person types, and no risk for the
stack of Python's parser."""


class MaskSyntaxError(FlexCPError):
    """An error that points at its place in the expression."""


def fail_at(text: str, at: int, expected: str, got: str, fix: str) -> FlexCPError:
    """An error that shows the expression with a caret below the place."""
    first = max(0, at - _SHOWN // 2) if len(text) > _SHOWN else 0
    shown = re.sub(r"\s", " ", text[first : first + _SHOWN])
    return MaskSyntaxError(expected, got, f"{fix}\n\n    {shown}\n    {' ' * (at - first)}^")


_SHOWN = 240
"""Characters of an expression that an error shows, around the place."""


def parse_mask(text: str) -> Node:
    """The tree of an expression.

    >>> parse_mask("causal & ~sliding_window(1K)").parts[1].part.arguments
    (Argument(name=None, value=1024, at=25),)
    >>> parse_mask("causal and full")
    Traceback (most recent call last):
    ...
    flexcp.tools.cli.mask_syntax.MaskSyntaxError: expected `&`, `|` or the end of the expression,
    got 'and'; write `&`
    <BLANKLINE>
        causal and full
               ^
    """
    python = _ATOM.sub(_as_python, re.sub(r"\s", " ", text))
    _refuse_early(text, python)
    try:
        # Parentheses around it all would make sense of "causal) & (full".
        tree = ast.parse(python.lstrip(), mode="eval")
    except SyntaxError as error:
        raise _not_python(text, python, error) from None
    return _Reader(text, len(python) - len(python.lstrip())).mask(tree.body)


def _as_python(atom: re.Match[str]) -> str:
    """An identifier instead of a word, a harmless text instead of a quoted one, equally wide."""
    found = atom[0]
    if found[0] in "'\"":
        return found[0] + "_" * (len(found) - 2) + found[0]
    return "_" * len(found)


def _refuse_early(text: str, python: str) -> None:
    """Raises for what Python would not call by its name."""
    for atom in _ATOM.finditer(text):
        if (sign := _PYTHON_WORDS.get(atom[0])) is not None:
            expected = "a mask" if sign == "~" else f"`&`, `|` or {_END}"
            raise fail_at(text, atom.start(), expected, quote(atom[0]), f"write `{sign}`")
    lone = re.search(r"['\"]", _ATOM.sub(lambda atom: " " * len(atom[0]), text))
    if lone is not None:
        at = lone.start()
        raise fail_at(
            text, at, "the other quotation mark", quote(text[at:]), "close the file name's quotes"
        )
    nested = list(re.finditer(r"[&|~(\[]", python))
    if len(nested) > _MOST_NESTED:
        raise FlexCPError(
            f"a mask expression of at most {_MOST_NESTED} operators and brackets",
            f"one of {len(nested):,}",
            "write a function that makes the mask, and pass package.module:function",
        )


def _not_python(text: str, python: str, error: SyntaxError) -> FlexCPError:
    """What is wrong where an expression stops being one.

    Of Python's error only the place counts: its words change from version to version.
    """
    end = len(text.rstrip())
    at = len(python) - len(python.lstrip()) + error.offset - 1 if error.offset else end
    if named := _WITHOUT_VALUE.match(python, at):  # from Python 3.12 on, its name is pointed at
        at = named.end()
    unclosed = at in _open_brackets(python)  # Python points at the bracket, which has to end
    at = end if unclosed else _second_operand(python, at)
    got = quote(_word_at(text, at)) if at < end else _END
    before = python[:at].rstrip()
    around = next(reversed(_open_brackets(before)), None)
    if not before.endswith(_ENDS_OF_OPERANDS) and not unclosed:
        if around is not None and (python[around] == "[" or python[:around].endswith("_")):
            return fail_at(text, at, _A_VALUE, got, "write a value here")
        return fail_at(text, at, "a mask", got, _ANY_MASK)
    if around is not None and python[around] + python[at : at + 1] == "()":
        return fail_at(text, at, "no value without a name after one with", got, "name it too")
    if around is not None:
        closing = f"`{')' if text[around] == '(' else ']'}`"
        fix = f"close the `{text[around]}` at column {around + 1}"
        return fail_at(text, at, closing, got, fix)
    fix = "combine masks with `&` (both), `|` (either) and `~` (not)"
    return fail_at(text, at, f"`&`, `|` or {_END}", got, fix)


def _second_operand(python: str, at: int) -> int:
    """Where the second of two operands begins that have no sign between them.

    Python points at the first of them, or at the second. Any other place is returned as it is.
    """
    if python[at : at + 1] not in _BEGINS_OF_OPERANDS:
        return at
    if python[:at].rstrip().endswith(_ENDS_OF_OPERANDS):
        return at
    gap = _BETWEEN_OPERANDS.search(python, at)
    return at if gap is None else gap.end()


def _word_at(text: str, at: int) -> str:
    found = _ATOM.match(text, at)
    return found[0] if found else text[at]


def _open_brackets(python: str) -> list[int]:
    """Where brackets stand that are not closed, the innermost last."""
    opened: list[int] = []
    for at, sign in enumerate(python):
        if sign in "([":
            opened.append(at)
        elif sign in ")]" and opened:
            opened.pop()
    return opened


class _Reader:
    """Turns those nodes of Python's tree that an expression may have into our own."""

    def __init__(self, text: str, start: int) -> None:
        self.text = text
        self.start = start
        """Columns before the text that Python has read."""

    def mask(self, node: ast.expr) -> Node:
        match node:
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr()):
                return self._combined(node)
            case ast.UnaryOp(op=ast.Invert(), operand=part):
                return Negated(self.mask(part))
            case ast.Name():
                return self._named(node, (), called=False)
            case ast.Call(func=ast.Name() as name, args=values, keywords=keywords):
                known = CATALOGUE.get(self._written(name))
                given = [Argument(None, self._value(x), self._at(x)) for x in values]
                given += [self._keyword(self._written(name), known, x) for x in keywords]
                return self._named(name, tuple(given), called=True)
        raise self._error(node, "a mask", _ANY_MASK)

    def _combined(self, node: ast.BinOp) -> Combined:
        """A chain of one operator as one node: Python nests it to the left."""
        sign = type(node.op)
        parts: list[Node] = []
        rest: ast.expr = node
        while isinstance(rest, ast.BinOp) and isinstance(rest.op, sign):
            parts.append(self.mask(rest.right))
            rest = rest.left
        parts.append(self.mask(rest))
        return Combined("&" if sign is ast.BitAnd else "|", tuple(reversed(parts)))

    def _named(self, node: ast.Name, arguments: tuple[Argument, ...], *, called: bool) -> NamedMask:
        name = self._written(node)
        if ":" not in name and name not in CATALOGUE:
            raise self._error(node, f"a mask among {', '.join(CATALOGUE)}", _hint(name))
        return NamedMask(name, arguments, called, self._at(node))

    def _keyword(self, mask: str, known: tuple[str, ...] | None, keyword: ast.keyword) -> Argument:
        at = self._at(keyword)
        name = _word_at(self.text, at)
        if known is not None and name not in known:
            names = ", ".join(known) or "none"
            expected = f"one of {mask}'s parameters: {names}"
            raise fail_at(self.text, at, expected, quote(name), "use those names")
        return Argument(name, self._value(keyword.value), at)

    def _value(self, node: ast.expr) -> Value:
        written = self._written(node)
        match node:
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self._value(part) for part in parts]
            case ast.Name():
                return _number_or_text(written)
            case ast.Constant(value=str()) if _ATOM.fullmatch(written):
                return written[1:-1]
        raise self._error(node, _A_VALUE, "write a value here")

    def _at(self, node: ast.expr | ast.keyword) -> int:
        return self.start + node.col_offset

    def _written(self, node: ast.expr) -> str:
        """What the text says where Python saw the node."""
        assert node.end_col_offset is not None
        return self.text[self._at(node) : self.start + node.end_col_offset]

    def _error(self, node: ast.expr, expected: str, fix: str) -> FlexCPError:
        return fail_at(self.text, self._at(node), expected, quote(self._written(node)), fix)


def _number_or_text(word: str) -> Value:
    for number in (parse_size, int, float):
        try:
            return number(word)
        except ValueError:
            continue
    return word


def _hint(name: str) -> str:
    return did_you_mean(name, CATALOGUE) or "write package.module:function for a mask of your own"
