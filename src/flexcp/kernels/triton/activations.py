"""Activation functions and sums of products as steps of score functions: values and derivatives.

Each is written in Triton from its operand's source, and the numbers that it was called with.
"""

from __future__ import annotations

from flexcp.kernels.triton.pointwise import ScoreStep
from flexcp.kernels.triton.terms import Term, UnknownStepError, number

_ROOT_2 = 1.4142135623730951
_OF_GELU = 0.7978845608028654  # sqrt(2 / pi)


def write_activation(step: ScoreStep) -> Term | None:
    """The source for a step that is one of those known here; None if it is not."""
    if step.name not in ACTIVATIONS or not step.terms:
        return None
    x = step.terms[0].as_float
    if step.name == "isnan":
        return Term(f"({x} != {x})", "bool")
    if step.kind != "float":
        raise UnknownStepError(f"the operation {step.name!r} on whole numbers")
    return Term(_value(step, x), "float")


def activation_gradients(step: ScoreStep, g: str) -> list[str | None]:
    """The gradients of such a step's operands, from that of its result."""
    missing: list[str | None] = [None] * (len(step.operands) - 1)
    if step.name == "addcmul":
        b, c = (term.as_float for term in step.terms[1:3])
        factor = _option(step, "value", 1)
        return [g, f"({g} * {factor} * {c})", f"({g} * {factor} * {b})"]
    slope = _slope(step, step.terms[0].as_float)
    return [None if slope is None else f"({g} * {slope})", *missing]


def _value(step: ScoreStep, x: str) -> str:
    if step.name == "addcmul":
        b, c = (term.as_float for term in step.terms[1:3])
        return f"({x} + {_option(step, 'value', 1)} * {b} * {c})"
    if step.name == "leaky_relu":
        return f"tl.where({x} > 0.0, {x}, {x} * {_given(step, 1, 0.01)})"
    if step.name == "hardtanh":
        low, high = _given(step, 1, -1.0), _given(step, 2, 1.0)
        return f"tl.where({x} < {low}, {low}, tl.where({x} > {high}, {high}, {x}))"
    if step.name == "softplus":
        beta, threshold = _given(step, 1, 1.0), _given(step, 2, 20.0)
        soft = f"(log1p(tl.exp(tl.minimum({x} * {beta}, {threshold}))) / {beta})"
        return f"tl.where({x} * {beta} > {threshold}, {x}, {soft})"
    if step.name == "elu":
        alpha, scale, inner = (_given(step, i, 1.0) for i in (1, 2, 3))
        below = f"({alpha} * {scale} * (tl.exp(tl.minimum({x} * {inner}, 0.0)) - 1.0))"
        return f"tl.where({x} > 0.0, {x} * {scale}, {below})"
    if _is_approximate(step):
        return f"(0.5 * {x} * (1.0 + tanh({_inside_of_gelu(x)})))"
    return f"(0.5 * {x} * (1.0 + tl.erf({x} / {_ROOT_2})))"


def _slope(step: ScoreStep, x: str) -> str | None:
    """The derivative by the first operand; None where there is none."""
    if step.name == "isnan":
        return None
    if step.name == "leaky_relu":
        return f"tl.where({x} > 0.0, 1.0, {_given(step, 1, 0.01)})"
    if step.name == "hardtanh":
        low, high = _given(step, 1, -1.0), _given(step, 2, 1.0)
        return f"tl.where({x} > {low}, tl.where({x} < {high}, 1.0, 0.0), 0.0)"
    if step.name == "softplus":
        beta, threshold = _given(step, 1, 1.0), _given(step, 2, 20.0)
        return f"tl.where({x} * {beta} > {threshold}, 1.0, sigmoid({x} * {beta}))"
    if step.name == "elu":
        alpha, scale, inner = (_given(step, i, 1.0) for i in (1, 2, 3))
        below = f"({alpha} * {scale} * {inner} * tl.exp(tl.minimum({x} * {inner}, 0.0)))"
        return f"tl.where({x} > 0.0, {scale}, {below})"
    if _is_approximate(step):
        bent = f"tanh({_inside_of_gelu(x)})"
        steep = f"({_OF_GELU} * (1.0 + 0.134145 * {x} * {x}))"
        return f"(0.5 * (1.0 + {bent}) + 0.5 * {x} * (1.0 - {bent} * {bent}) * {steep})"
    density = f"(0.3989422804014327 * tl.exp(-0.5 * {x} * {x}))"
    return f"(0.5 * (1.0 + tl.erf({x} / {_ROOT_2})) + {x} * {density})"


def _inside_of_gelu(x: str) -> str:
    return f"{_OF_GELU} * ({x} + 0.044715 * {x} * {x} * {x})"


def _is_approximate(step: ScoreStep) -> bool:
    return "tanh" in (step.options.get("approximate"), *step.operands[1:])


def _given(step: ScoreStep, place: int, default: float) -> str:
    """The source for a number that a step was called with."""
    given = step.operands[place] if len(step.operands) > place else number(default)
    assert isinstance(given, Term)
    return given.as_float


def _option(step: ScoreStep, name: str, default: float) -> str:
    given = step.options.get(name, default)
    return (given if isinstance(given, Term) else number(given)).as_float


ACTIVATIONS = frozenset({"addcmul", "elu", "gelu", "hardtanh", "isnan", "leaky_relu", "softplus"})
