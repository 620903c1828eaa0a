"""Derivatives of the operations of score functions, as Triton source: reverse mode, step by step.

What is here is what torch's autograd does: halves where two are equally large, 0 where a function
has a kink at 0, and nothing through what is rounded or detached.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from flexcp.kernels.triton.activations import ACTIVATIONS, activation_gradients
from flexcp.kernels.triton.pointwise import SAME, ScoreStep, alpha_of, bounds_of, to_the

OperandGradients = list[str | None]
"""Source for the gradient of each operand; None for one that has none."""

_UNARY = {
    "abs": "tl.where({x} > 0.0, 1.0, tl.where({x} < 0.0, -1.0, 0.0))",
    "cos": "(-tl.sin({x}))",
    "erf": "(1.1283791670955126 * tl.exp(-{x} * {x}))",
    "exp": "{y}",
    "exp2": "({y} * 0.6931471805599453)",
    "log": "(1.0 / {x})",
    "log10": "(0.4342944819032518 / {x})",
    "log1p": "(1.0 / (1.0 + {x}))",
    "log2": "(1.4426950408889634 / {x})",
    "neg": "(-1.0)",
    "reciprocal": "(-{y} * {y})",
    "relu": "tl.where({x} > 0.0, 1.0, 0.0)",
    "rsqrt": "(-0.5 * {y} * {y} * {y})",
    "sigmoid": "({y} * (1.0 - {y}))",
    "silu": "(sigmoid({x}) + {y} * (1.0 - sigmoid({x})))",
    "sin": "tl.cos({x})",
    "sqrt": "(0.5 / {y})",
    "tan": "(1.0 + {y} * {y})",
    "tanh": "(1.0 - {y} * {y})",
}
"""Of one number: the derivative, by the operand {x} and the value {y}."""


def pulled_back(step: ScoreStep, y: str, g: str) -> OperandGradients:
    """The gradients of a step's operands, from that of its result: `y` has gradient `g`."""
    if step.name in _UNARY:
        factor = _UNARY[step.name].format(x=step.terms[0].as_float, y=y)
        return [_times(g, factor)]
    if step.name in ACTIVATIONS:
        return activation_gradients(step, g)
    if step.name in SAME:
        return [None if step.name == "detach" else g]
    if step.name == "_to_copy":
        return [g]
    if step.name in _RULES:
        found = _RULES[step.name](step, y, g)
        missing = len(step.operands) - len(found)
        return [*found[: len(step.operands)], *[None] * missing]
    return [None] * len(step.operands)


def _times(g: str, factor: str) -> str:
    return factor if g == "1.0" else g if factor == "1.0" else f"({g} * {factor})"


def _sum(step: ScoreStep, _: str, g: str) -> OperandGradients:
    alpha = alpha_of(step).as_float
    if step.name == "rsub":
        return [_times(g, f"(-{alpha})"), g]
    return [g, _times(g, alpha if step.name == "add" else f"(-{alpha})")]


def _product(step: ScoreStep, _: str, g: str) -> OperandGradients:
    a, b = step.terms
    return [_times(g, b.as_float), _times(g, a.as_float)]


def _quotient(step: ScoreStep, y: str, g: str) -> OperandGradients:
    if step.name == "floor_divide" or step.options.get("rounding_mode") is not None:
        return [None, None]
    b = step.terms[1].as_float
    return [f"({g} / {b})", f"(-({g} * {y}) / {b})"]


def _rest(step: ScoreStep, _: str, g: str) -> OperandGradients:
    a, b = (x.as_float for x in step.terms)
    rounded = f"truncated({a} / {b})" if step.name == "fmod" else f"tl.floor({a} / {b})"
    return [g, _times(g, f"(-{rounded})")]


def _power(step: ScoreStep, y: str, g: str) -> OperandGradients:
    base, exponent = step.terms
    if base.is_literal:
        return [None, _times(g, f"({y} * {math.log(float(base.as_float))!r})")]
    power = float(exponent.as_float) if exponent.is_literal else None
    if power is None or (power != int(power) and abs(power) != 0.5):
        x, p = base.as_float, f"({exponent.as_float} + 0.0)"
        of_base = f"tl.where({p} == 0.0, 0.0, {p} * powered({x}, {p} - 1.0))"
        of_exponent = f"({y} * tl.log({x}))"
        at_zero = f"tl.where({x} == 0.0, 0.0, {of_exponent})"
        of_exponent = f"tl.where({p} >= 0.0, {at_zero}, {of_exponent})"
        return [_times(g, of_base), _times(g, of_exponent)]
    if abs(power) == 0.5:
        return [_times(g, f"(0.5 / {y})" if power > 0 else f"(-0.5 * {y} * {y} * {y})")]
    return [_times(g, f"({power!r} * {to_the(base.as_float, int(power) - 1)})") if power else None]


def _extreme(step: ScoreStep, _: str, g: str) -> OperandGradients:
    a, b = (x.as_float for x in step.terms)
    sign, other = (">", "<") if step.name == "maximum" else ("<", ">")
    half = f"tl.where({a} == {b}, 0.5, 0.0)"
    return [
        _times(g, f"tl.where({a} {sign} {b}, 1.0, {half})"),
        _times(g, f"tl.where({a} {other} {b}, 1.0, {half})"),
    ]


def _clamped(step: ScoreStep, _: str, g: str) -> OperandGradients:
    x, (low, high) = step.terms[0].as_float, bounds_of(step)
    below = None if low is None else f"({x} < {low.as_float})"
    above = None if high is None else f"({x} > {high.as_float})"
    if low is not None and high is not None:
        crossed = f"({low.as_float} > {high.as_float})"
        of_low, of_high = f"({below} & ({crossed} == 0))", f"({above} | {crossed})"
    else:
        of_low, of_high = str(below), str(above)
    outside = " | ".join(test for test in (below, above) if test is not None)
    of_x = f"tl.where({outside}, 0.0, {g})"
    if step.name == "clamp_max":
        return [of_x, f"tl.where({of_high}, {g}, 0.0)"]
    return [of_x, f"tl.where({of_low}, {g}, 0.0)", f"tl.where({of_high}, {g}, 0.0)"]


def _where(step: ScoreStep, _: str, g: str) -> OperandGradients:
    if step.name == "masked_fill":
        test = step.terms[1].as_truth
        return [f"tl.where({test}, 0.0, {g})", None, f"tl.where({test}, {g}, 0.0)"]
    test = step.terms[0].as_truth
    return [None, f"tl.where({test}, {g}, 0.0)", f"tl.where({test}, 0.0, {g})"]


_RULES: dict[str, Callable[[ScoreStep, str, str], OperandGradients]] = {
    **dict.fromkeys(("add", "sub", "rsub"), _sum),
    **dict.fromkeys(("div", "floor_divide"), _quotient),
    **dict.fromkeys(("remainder", "fmod"), _rest),
    **dict.fromkeys(("maximum", "minimum"), _extreme),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamped),
    **dict.fromkeys(("where", "masked_fill"), _where),
    "mul": _product,
    "pow": _power,
}
