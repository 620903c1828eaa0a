"""How the operations of score functions are written in Triton, and their derivatives.

Everything acts on each score alone. What is not here is unknown: a score function that uses it is
computed by another kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexcp.kernels.triton.terms import (
    FLOATS,
    NARROW,
    Term,
    UnknownStepError,
    kind_of,
    number,
    whole,
)

_MOST_FACTORS = 8
"""The largest power that is written as a product."""


@dataclass(frozen=True)
class ScoreStep:
    """One operation of a score function, its operands written out."""

    name: str
    operands: Sequence[Any]
    """Terms, and what is no number: None, a rounding mode."""
    options: Mapping[str, Any]
    dtype: torch.dtype
    """Of the result."""

    @property
    def terms(self) -> list[Term]:
        """The operands that are numbers."""
        return [x for x in self.operands if isinstance(x, Term)]

    @property
    def kind(self) -> str:
        """The kind of the result."""
        return kind_of(self.dtype)


Write = Callable[[ScoreStep], Term]

_UNARY = {
    "abs": "tl.abs({x})",
    "ceil": "tl.ceil({x})",
    "cos": "tl.cos({x})",
    "erf": "tl.erf({x})",
    "exp": "tl.exp({x})",
    "exp2": "tl.exp2({x})",
    "floor": "tl.floor({x})",
    "log": "tl.log({x})",
    "log10": "(tl.log2({x}) * 0.3010299956639812)",
    "log1p": "log1p({x})",
    "log2": "tl.log2({x})",
    "neg": "(-{x})",
    "reciprocal": "(1.0 / {x})",
    "relu": "tl.where({x} < 0.0, 0.0, {x})",
    "rsqrt": "tl.rsqrt({x})",
    "sigmoid": "sigmoid({x})",
    "sgn": "sign({x})",
    "sign": "sign({x})",
    "silu": "({x} * sigmoid({x}))",
    "sin": "tl.sin({x})",
    "sqrt": "tl.sqrt({x})",
    "tan": "(tl.sin({x}) / tl.cos({x}))",
    "tanh": "tanh({x})",
    "trunc": "truncated({x})",
}
"""Of one number in float32."""

_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITWISE = {"and": "&", "or": "|", "xor": "^"}
_TRUTHS = {
    "and": "tl.where({0}, {1}, False)",
    "or": "tl.where({0}, True, {1})",
    "xor": "tl.where({0}, {1} == 0, {1})",
}
"""By choices, since Triton's interpreter mixes up the types of a comparison and of a tile's."""
SAME = frozenset({"alias", "clone", "detach", "lift_fresh", "lift_fresh_copy"})
_FILLED = {"zeros": 0, "new_zeros": 0, "ones": 1, "new_ones": 1, "zeros_like": 0, "ones_like": 1}


def write(step: ScoreStep) -> Term:
    """The source for the result of a step; raises `UnknownStepError` where it is not known."""
    if step.name in _UNARY:
        return _unary(step)
    if step.name in _COMPARISONS:
        return _compared(step)
    if step.name.partition("_")[0] in ("bitwise", "logical"):
        return _bits(step)
    if step.name in SAME:
        return step.terms[0]
    if step.name in _WRITTEN:
        return _WRITTEN[step.name](step)
    raise UnknownStepError(f"the operation {step.name!r}")


def _unary(step: ScoreStep) -> Term:
    x = step.terms[0]
    if step.kind == "float":
        return Term(_UNARY[step.name].format(x=x.as_float), "float")
    x = _countable(step, x)
    if step.name == "neg":
        return whole("(-{0})", -x.high, -x.low, x)
    if step.name == "abs":
        low = 0 if x.low <= 0 <= x.high else min(abs(x.low), abs(x.high))
        return whole("tl.abs({0})", low, max(abs(x.low), abs(x.high)), x)
    if step.name in ("sign", "sgn"):
        return whole("tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0))", -1, 1, x)
    if step.name == "relu":
        return whole("tl.maximum({0}, 0)", max(0, x.low), max(0, x.high), x)
    return x  # rounded already


def _countable(step: ScoreStep, x: Term) -> Term:
    if step.dtype in NARROW:
        raise UnknownStepError(f"the operation {step.name!r} on numbers of type {step.dtype}")
    return x.as_whole


def _compared(step: ScoreStep) -> Term:
    a, b = step.terms
    sign = _COMPARISONS[step.name]
    if "float" in (a.kind, b.kind):
        return Term(f"({a.as_float} {sign} {b.as_float})", "bool")
    a, b = a.as_whole, b.as_whole
    wide = a.is_wide or b.is_wide
    shown = [x.widened() if wide else x.text for x in (a, b)]
    return Term(f"({shown[0]} {sign} {shown[1]})", "bool")


def _bits(step: ScoreStep) -> Term:
    name, terms = step.name.partition("_")[2], step.terms
    if step.kind == "bool":
        shown = [term.as_truth for term in terms]
        if name == "not":
            return Term(f"({shown[0]} == 0)", "bool")
        if name in _TRUTHS:
            return Term(_TRUTHS[name].format(*shown), "bool")
    a = _countable(step, terms[0])
    if name == "right_shift" and terms[1].is_literal and 0 <= terms[1].low < 31:
        by = terms[1].low
        return whole(f"({{0}} >> {by})", a.low >> by, a.high >> by, a)
    if name in _BITWISE:
        b = terms[1].as_whole
        most = max(-a.low, a.high, -b.low, b.high)
        bits = 2 ** min(63, int(most).bit_length())
        return whole(f"({{0}} {_BITWISE[name]} {{1}})", -bits, bits - 1, a, b)
    raise UnknownStepError(f"the operation {step.name!r}")


def alpha_of(step: ScoreStep) -> Term:
    """The factor on the second operand of a sum."""
    given = step.options.get("alpha", step.operands[2] if len(step.operands) > 2 else 1)
    return given if isinstance(given, Term) else number(given)


def _sum(step: ScoreStep) -> Term:
    a, b = step.terms[:2]
    if step.name == "rsub":
        a, b = b, a
    alpha = alpha_of(step)
    sign = "+" if step.name == "add" else "-"
    if step.kind == "float":
        factor = "" if alpha.text == "1" else f"{alpha.as_float} * "
        return Term(f"({a.as_float} {sign} {factor}{b.as_float})", "float")
    if alpha.text != "1":
        raise UnknownStepError(f"alpha= of {step.name!r} on whole numbers")
    if step.kind == "bool":
        raise UnknownStepError(f"the operation {step.name!r} on truth values")
    a, b = _countable(step, a), _countable(step, b)
    if sign == "+":
        return whole("({0} + {1})", a.low + b.low, a.high + b.high, a, b)
    return whole("({0} - {1})", a.low - b.high, a.high - b.low, a, b)


def _product(step: ScoreStep) -> Term:
    a, b = step.terms
    if step.kind == "float":
        return Term(f"({a.as_float} * {b.as_float})", "float")
    if step.kind == "bool":
        return Term(_TRUTHS["and"].format(a.as_truth, b.as_truth), "bool")
    a, b = _countable(step, a), _countable(step, b)
    ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    return whole("({0} * {1})", min(ends), max(ends), a, b)


def _quotient(step: ScoreStep) -> Term:
    a, b = step.terms[:2]
    mode = "floor" if step.name == "floor_divide" else step.options.get("rounding_mode")
    if step.kind == "float":
        quotient = f"({a.as_float} / {b.as_float})"
        if mode is None:
            return Term(quotient, "float")
        return Term(
            f"tl.floor({quotient})" if mode == "floor" else f"truncated({quotient})", "float"
        )
    a, b = _countable(step, a), _countable(step, b)
    text = "floor_divided({0}, {1})" if mode == "floor" else "({0} // {1})"
    if b.low > 0:
        least = a.low // b.low if a.low < 0 else 0
        return whole(text, least, max(0, a.high) // b.low, a, b)
    most = max(abs(a.low), abs(a.high))
    return whole(text, -most - 1, most, a, b)


def _rest(step: ScoreStep) -> Term:
    a, b = step.terms
    if step.kind == "float":
        x, y = a.as_float, b.as_float
        if step.name == "fmod":
            return Term(f"({x} - truncated({x} / {y}) * {y})", "float")
        return Term(f"({x} - tl.floor({x} / {y}) * {y})", "float")
    a, b = _countable(step, a), _countable(step, b)
    most = max(abs(b.low), abs(b.high))
    if step.name == "fmod":
        return whole("({0} % {1})", -most, most, a, b)
    return whole("remainder({0}, {1})", 0 if b.low > 0 else -most, most, a, b)


def _power(step: ScoreStep) -> Term:
    base, exponent = step.terms
    if base.is_literal and step.kind == "float" and float(base.as_float) > 0.0:
        return Term(f"tl.exp2({exponent.as_float} * {math.log2(float(base.as_float))!r})", "float")
    power = float(exponent.as_float) if exponent.is_literal else None
    if step.kind == "float" and power is not None and abs(power) == 0.5:
        return Term(f"{'tl.sqrt' if power > 0 else 'tl.rsqrt'}({base.as_float})", "float")
    if power is None or power != int(power) or abs(power) > _MOST_FACTORS:
        if step.kind == "float" and (power is None or power != int(power)):
            return Term(f"powered({base.as_float}, {exponent.as_float} + 0.0)", "float")
        raise UnknownStepError(f"the power {'of whole numbers' if power is None else power}")
    if step.kind == "float":
        return Term(to_the(base.as_float, int(power)), "float")
    base = _countable(step, base)
    most = max(abs(base.low), abs(base.high)) ** int(power)
    return whole(f"({' * '.join(['{0}'] * int(power))})" if power else "1", -most, most, base)


def to_the(base: str, power: int) -> str:
    """A whole power of a number, as a product."""
    if power == 0:
        return "1.0"
    product = f"({' * '.join([base] * abs(power))})"
    return product if power > 0 else f"(1.0 / {product})"


def _extreme(step: ScoreStep) -> Term:
    a, b = step.terms
    larger = step.name == "maximum"
    if step.kind == "float":
        x, y, sign = a.as_float, b.as_float, ">" if larger else "<"
        return Term(f"tl.where({x} != {x}, {x}, tl.where({x} {sign} {y}, {x}, {y}))", "float")
    a, b = _countable(step, a), _countable(step, b)
    of = max if larger else min
    return whole(f"tl.{step.name}({{0}}, {{1}})", of(a.low, b.low), of(a.high, b.high), a, b)


def bounds_of(step: ScoreStep) -> tuple[Term | None, Term | None]:
    """The bounds of a clamp: from below and from above."""
    given = list(step.operands[1:])
    if step.name == "clamp_max":
        return None, given[0]
    low = given[0] if given else step.options.get("min")
    high = given[1] if len(given) > 1 else step.options.get("max")
    if low is not None and not isinstance(low, Term):
        low = number(low)
    if high is not None and not isinstance(high, Term):
        high = number(high)
    return low, high


def _clamped(step: ScoreStep) -> Term:
    x, (low, high) = step.terms[0], bounds_of(step)
    if step.kind == "float":
        text = x.as_float
        if low is not None:
            text = f"tl.where({text} < {low.as_float}, {low.as_float}, {text})"
        if high is not None:
            text = f"tl.where({text} > {high.as_float}, {high.as_float}, {text})"
        return Term(text, "float")
    x = _countable(step, x)
    for bound, name, of in ((low, "maximum", max), (high, "minimum", min)):
        if bound is not None:
            b = bound.as_whole
            x = whole(f"tl.{name}({{0}}, {{1}})", of(x.low, b.low), of(x.high, b.high), x, b)
    return x


def _where(step: ScoreStep) -> Term:
    if step.name == "masked_fill":
        b, condition, a = step.terms
    else:
        condition, a, b = step.terms
    test = condition.as_truth
    if step.kind == "float":
        return Term(f"tl.where({test}, {a.as_float}, {b.as_float})", "float")
    if step.kind == "bool":
        return Term(f"tl.where({test}, {a.as_truth}, {b.as_truth})", "bool")
    a, b = a.as_whole, b.as_whole
    return whole(f"tl.where({test}, {{0}}, {{1}})", min(a.low, b.low), max(a.high, b.high), a, b)


def _converted(step: ScoreStep) -> Term:
    x = step.terms[0]
    if step.kind == "float":
        kind = FLOATS[step.dtype]
        text = x.as_float
        if kind != "tl.float32":  # asked for in so many words, so numbers are rounded to it
            text = f"({text} + 0.0).to({kind}).to(tl.float32)"
        return Term(text, "float")
    if step.kind == "bool":
        return Term(x.as_truth, "bool")
    if step.dtype in NARROW:
        raise UnknownStepError(f"a conversion to {step.dtype}")
    if x.kind == "float":
        return Term(f"{x.text}.to(tl.int64)", "int")
    return x.as_whole


def _filled(step: ScoreStep) -> Term:
    value = _FILLED.get(step.name)
    if value is None:  # full_like(x, value), new_full(x, size, value)
        last = step.operands[-1]
        if not isinstance(last, Term) or not last.is_literal:
            raise UnknownStepError(f"the operation {step.name!r} with a value that is computed")
        return last if last.kind == step.kind else number(float(last.as_float), kind_of(step.dtype))
    return number(value, kind_of(step.dtype))


_WRITTEN: dict[str, Write] = {
    **dict.fromkeys(("add", "sub", "rsub"), _sum),
    **dict.fromkeys(("div", "floor_divide"), _quotient),
    **dict.fromkeys(("remainder", "fmod"), _rest),
    **dict.fromkeys(("maximum", "minimum"), _extreme),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamped),
    **dict.fromkeys(("where", "masked_fill"), _where),
    **dict.fromkeys((*_FILLED, "full_like", "new_full"), _filled),
    "mul": _product,
    "pow": _power,
    "_to_copy": _converted,
}
