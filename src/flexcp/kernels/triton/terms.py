"""Terms: values in generated Triton source, each with its type and, if whole, the range it is in.

Numbers with a fraction are computed in float32. Whole numbers are 32 bits wide where the ranges of
what they are made of show that this is enough, and 64 otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["float", "int", "bool"]

LARGEST_POSITION = 2**30 - 1
"""Of a token, batch element or head, so that a difference or a sum of two fits into 32 bits."""
_LARGEST = 2**31 - 1
_LEAST, _MOST = -(2**63), 2**63 - 1

NARROW = (torch.uint8, torch.int8, torch.int16)
"""Whole numbers that may be looked up, but not computed with: they would wrap around."""
FLOATS = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
}
INTEGERS = (*NARROW, torch.int32, torch.int64)


class UnknownStepError(Exception):
    """A step of a score function that can't be written as Triton source; says which."""


@dataclass(frozen=True)
class Term:
    """A value: Triton source for it, and what is known of it."""

    text: str
    kind: Kind
    low: int = _LEAST
    high: int = _MOST
    is_literal: bool = False

    @property
    def is_wide(self) -> bool:
        """Whether it is a whole number that takes 64 bits."""
        return self.kind == "int" and max(-self.low, self.high) > _LARGEST

    @property
    def as_float(self) -> str:
        """The source for it in float32."""
        if self.kind == "float":
            return self.text
        if self.kind == "bool":
            return f"tl.where({self.text}, 1.0, 0.0)"
        return repr(float(self.low)) if self.is_literal else f"{self.text}.to(tl.float32)"

    @property
    def as_whole(self) -> Term:
        """As a whole number; a truth value is 0 or 1."""
        if self.kind == "float":
            raise UnknownStepError("a number with a fraction used as a whole one")
        return self if self.kind == "int" else Term(f"tl.where({self.text}, 1, 0)", "int", 0, 1)

    @property
    def as_truth(self) -> str:
        """The source for whether it is not 0."""
        return self.text if self.kind == "bool" else f"({self.text} != 0)"

    def widened(self) -> str:
        """The source for it in 64 bits."""
        return self.text if self.is_literal or self.is_wide else f"{self.text}.to(tl.int64)"


def whole(text: str, low: int, high: int, *operands: Term) -> Term:
    """A whole number in a range: in 64 bits where it needs them.

    `text` has a place {0}, {1}, ... for each operand; they are widened if the result is wide. What
    may not fit into 64 bits wraps around, as torch's does: then it may be anything.
    """
    if low < _LEAST or high > _MOST:
        low, high = _LEAST, _MOST
    found = Term("", "int", low, high)
    some_wide = found.is_wide or any(term.is_wide for term in operands)
    shown = [term.widened() if some_wide else term.text for term in operands]
    made = text.format(*shown)
    if some_wide and not found.is_wide:
        made = f"({made}).to(tl.int32)"
    return Term(made, "int", low, high)


def number(value: float | int | bool, kind: Kind | None = None) -> Term:
    """A number that is written into the source.

    >>> number(2.5).text, number(-float("inf")).text, number(3, "float").text
    ('2.5', 'float("-inf")', '3.0')
    """
    if isinstance(value, bool) and kind in (None, "bool"):
        return Term(repr(value), "bool", is_literal=True)
    if kind == "bool":
        return Term(repr(bool(value)), "bool", is_literal=True)
    if kind == "float" or (kind is None and isinstance(value, float)):
        text = repr(float(value))
        if text.lstrip("-") in ("inf", "nan"):
            text = f'float("{text}")'
        return Term(text, "float", is_literal=True)
    return Term(repr(int(value)), "int", int(value), int(value), is_literal=True)


def kind_of(dtype: torch.dtype) -> Kind:
    """The kind of values of a type.

    >>> kind_of(torch.bfloat16), kind_of(torch.int32)
    ('float', 'int')
    """
    if dtype in FLOATS:
        return "float"
    if dtype == torch.bool:
        return "bool"
    if dtype in INTEGERS:
        return "int"
    raise UnknownStepError(f"values of type {dtype}")


def looked_up(text: str, dtype: torch.dtype) -> Term:
    """What is read from a tensor of a type."""
    kind = kind_of(dtype)
    if kind == "float":
        return Term(f"{text}.to(tl.float32)", "float")
    if kind == "bool":
        return Term(f"({text} != 0)", "bool")
    if dtype == torch.int64:
        return Term(text, "int")
    info = torch.iinfo(dtype)
    return Term(f"{text}.to(tl.int32)", "int", int(info.min), int(info.max))
