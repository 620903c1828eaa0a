"""What each ATen operation makes of ranges, its rounding and overflow included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flexcp.grid.analysis import ranges
from flexcp.grid.analysis.ranges import Range
from flexcp.masks.graph import MaskGraph, Node, Ref


@dataclass(frozen=True, eq=False)
class RuleInputs:
    """What a rule gets: an operation of the mask's graph and the ranges of its operands."""

    node: Node
    """The operation and its operands."""
    graph: MaskGraph
    """The graph that it is part of."""
    known: Mapping[int, Range]
    """What is known of its operands."""

    @cached_property
    def disjoint(self) -> bool:
        """Whether the operands read different axes (b and h are fixed within a rectangle)."""
        seen: set[str] = set()
        for index in self.node.operands:
            axes = self.graph.nodes[index].reads & {"q", "kv"}
            if seen & axes:
                return False
            seen |= axes
        return True

    def promoted(self, arg: Any, target: torch.dtype | None = None) -> Range:
        """An operand's range, after the type promotion that torch does."""
        target = target or self.node.compute_dtype
        if isinstance(arg, Ref):
            found, source = self.known[arg.node], self.graph.nodes[arg.node].dtype
            if not target.is_floating_point or source == target:
                return found
            return _rounded(found, target, integral=not source.is_floating_point)
        if isinstance(arg, bool):
            return Range.exactly(torch.tensor(arg))
        value = torch.tensor(float(arg), dtype=torch.float64)
        if not fits(Range.exactly(value), target) and arg not in (torch.inf, -torch.inf):
            return Range.anything(target)  # torch wraps it, or makes it infinite
        if target.is_floating_point and value.to(target).double() != value:
            return Range.exactly(value).widened(value.abs() * torch.finfo(target).eps)
        return Range.exactly(value)

    def number(self, position: int) -> Range:
        """The operand as a number."""
        return self.promoted(self.node.args[position]).numbers()

    def truth(self, position: int) -> Range:
        """The operand as a truth value."""
        return self.promoted(self.node.args[position]).truths()

    def keyword(self, name: str, default: Any) -> Any:
        """A keyword argument of the operation."""
        return self.node.kwargs.get(name, default)

    def settle(self, found: Range, error_scale: Tensor) -> Range:
        """The result after rounding to the operation's type."""
        if not self.node.dtype.is_floating_point:
            return found
        info = torch.finfo(self.node.dtype)
        return found.widened(error_scale * (4 * info.eps) + info.tiny)


def fits(found: Range, dtype: torch.dtype) -> bool:
    """Whether all of a range can be represented by a type, and counted exactly by us."""
    if dtype == torch.bool:
        return True
    if dtype.is_floating_point:
        most = torch.finfo(dtype).max
        least = -most
    else:
        info = torch.iinfo(dtype)
        least, most = max(info.min, -ranges.EXACT), min(info.max, ranges.EXACT)
    return bool(((found.lo >= least) & (found.hi <= most)).all())


def with_nan(name: str, dtype: torch.dtype, found: Range) -> Range:
    """What an operation makes of operands that may be NaN, beyond what it makes of numbers."""
    if dtype.is_floating_point:
        return replace(found, may_be_nan=True)
    if name in ("ge", "gt", "le", "lt", "eq"):  # false of NaN
        return Range.bounds(torch.zeros_like(found.lo), found.hi)
    if name == "ne":  # true of NaN
        return Range.bounds(found.lo, torch.ones_like(found.hi))
    return Range.anything(dtype)


def _rounded(a: Range, dtype: torch.dtype, *, integral: bool = True) -> Range:
    """A number converted to a floating-point type: exact while it is an integer that fits."""
    a = a.numbers()
    eps = torch.finfo(dtype).eps
    scale = a.largest()
    exact = scale <= (1 / eps if integral else 0)
    wide = a.widened(torch.where(exact, 0.0, scale * 2 * eps + torch.finfo(dtype).tiny))
    if not fits(wide, dtype):
        return Range.anything(dtype)
    return Range(
        wide.lo,
        wide.hi,
        torch.where(exact, a.some_lo, wide.some_lo),
        torch.where(exact, a.some_hi, wide.some_hi),
    )


def _add(s: RuleInputs, sign: float = 1.0) -> Range:
    if s.node.dtype == torch.bool:
        return ranges.either(s.truth(0), s.truth(1), disjoint=s.disjoint)
    alpha = Range.exactly(torch.tensor(sign * s.keyword("alpha", 1), dtype=torch.float64))
    a, b = s.number(0), ranges.times(s.number(1), alpha)
    return s.settle(ranges.plus(a, b, disjoint=s.disjoint), a.largest() + b.largest())


def _rsub(s: RuleInputs) -> Range:
    alpha = s.keyword("alpha", s.node.args[2] if len(s.node.args) > 2 else 1)
    factor = Range.exactly(torch.tensor(-float(alpha), dtype=torch.float64))
    a, b = ranges.times(s.number(0), factor), s.number(1)
    return s.settle(ranges.plus(a, b, disjoint=s.disjoint), a.largest() + b.largest())


def _mul(s: RuleInputs) -> Range:
    if s.node.dtype == torch.bool:
        return ranges.both(s.truth(0), s.truth(1), disjoint=s.disjoint)
    found = ranges.times(s.number(0), s.number(1))
    return s.settle(found, found.largest())


def _power(s: RuleInputs) -> Range:
    exponent = s.node.args[1]
    if not isinstance(exponent, int) or not 0 <= exponent < 8 or s.node.dtype.is_floating_point:
        return Range.anything(s.node.dtype)
    return ranges.whole_power(s.number(0), exponent)


def _divide(s: RuleInputs, mode: str | None) -> Range:
    rounding: Callable[[Tensor], Tensor] = (
        torch.floor if mode == "floor" else torch.trunc if mode == "trunc" else torch.clone
    )
    if mode is not None and s.node.dtype.is_floating_point:
        return Range.anything(s.node.dtype)  # a quotient that rounds may cross an integer
    found = ranges.quotient(s.number(0), s.number(1), rounding)
    return s.settle(found, found.largest())


def _remainder(s: RuleInputs) -> Range:
    if s.node.dtype.is_floating_point:
        return Range.anything(s.node.dtype)
    return ranges.modulo(s.number(0), s.number(1))


def _fmod(s: RuleInputs) -> Range:
    a, b = s.number(0), s.number(1)
    if s.node.dtype.is_floating_point:
        return Range.anything(s.node.dtype)
    found = ranges.modulo(a, b)
    keeps = (a.lo >= 0) & (b.lo > 0)
    return Range(
        torch.where(keeps, found.lo, -torch.inf),
        torch.where(keeps, found.hi, torch.inf),
        torch.where(keeps, found.some_lo, torch.inf),
        torch.where(keeps, found.some_hi, -torch.inf),
    )


def _bits(s: RuleInputs, op: str) -> Range:
    if s.node.dtype == torch.bool:
        a, b = s.truth(0), s.truth(1)
        if op == "and":
            return ranges.both(a, b, disjoint=s.disjoint)
        if op == "or":
            return ranges.either(a, b, disjoint=s.disjoint)
        return ranges.negation(ranges.equal(a.numbers(), b.numbers(), disjoint=s.disjoint))
    a, b = s.number(0), s.number(1)
    natural = (a.lo >= 0) & (b.lo >= 0)
    # Of two natural numbers, `&` is at most the smaller, `|` and `^` are at most the sum.
    top = torch.minimum(a.hi, b.hi) if op == "and" else a.hi + b.hi
    bottom = torch.maximum(a.lo, b.lo) if op == "or" else torch.zeros_like(top)
    return Range.bounds(
        torch.where(natural, bottom, -torch.inf), torch.where(natural, top, torch.inf)
    )


def _bit_not(s: RuleInputs) -> Range:
    if s.node.dtype == torch.bool:
        return ranges.negation(s.truth(0))
    return ranges.plus(
        ranges.minus(s.number(0)),
        Range.exactly(torch.tensor(-1.0, dtype=torch.float64)),
        disjoint=True,
    )


def _shift(s: RuleInputs, direction: int) -> Range:
    a, b = s.number(0), s.number(1)
    possible = (b.lo >= 0) & (b.hi < 52)
    factor = torch.exp2(b.lo.clamp(0, 52))
    if not b.is_constant:
        return Range.anything(s.node.dtype)
    known = Range.exactly(factor)
    found = ranges.times(a, known) if direction > 0 else ranges.quotient(a, known, torch.floor)
    return Range(
        torch.where(possible, found.lo, -torch.inf),
        torch.where(possible, found.hi, torch.inf),
        torch.where(possible, found.some_lo, torch.inf),
        torch.where(possible, found.some_hi, -torch.inf),
    )


def _clamp(s: RuleInputs) -> Range:
    found = s.promoted(s.node.args[0], s.node.dtype).numbers()
    for position, keyword, op in ((1, "min", torch.maximum), (2, "max", torch.minimum)):
        given = s.node.args[position] if len(s.node.args) > position else s.keyword(keyword, None)
        if given is not None:
            limit = s.promoted(given, s.node.dtype).numbers()
            found = ranges.rising(op, found, limit, disjoint=s.disjoint)
    return found


def _extreme(s: RuleInputs, op: ranges.Op) -> Range:
    if s.node.dtype == torch.bool:
        logical = ranges.either if op is torch.maximum else ranges.both
        return logical(s.truth(0), s.truth(1), disjoint=s.disjoint)
    return ranges.rising(op, s.number(0), s.number(1), disjoint=s.disjoint)


def _where(s: RuleInputs) -> Range:
    return ranges.choice(s.truth(0), _plain(s, 1), _plain(s, 2))


def _plain(s: RuleInputs, position: int) -> Range:
    found = s.known[s.node.args[position].node]
    if s.node.dtype == torch.bool:
        return found.truths()
    source, target = s.graph.nodes[s.node.args[position].node].dtype, s.node.dtype
    if target.is_floating_point and source != target:
        return _rounded(found, target, integral=not source.is_floating_point)
    return found.numbers()


def _cast(s: RuleInputs) -> Range:
    found = s.known[s.node.args[0].node]
    source, target = s.graph.nodes[s.node.operands[0]].dtype, s.node.dtype
    if target == torch.bool:
        return found.truths()
    found = found.numbers()
    if target.is_floating_point:
        integral = not source.is_floating_point
        return found if source == target else _rounded(found, target, integral=integral)
    return ranges.rising_alone(torch.trunc, found) if source.is_floating_point else found


def _compare(s: RuleInputs, name: str) -> Range:
    a, b = s.number(0), s.number(1)
    match name:
        case "ge":
            return ranges.at_least(a, b, disjoint=s.disjoint)
        case "gt":
            return ranges.above(a, b, disjoint=s.disjoint)
        case "le":
            return ranges.at_least(b, a, disjoint=s.disjoint)
        case "lt":
            return ranges.above(b, a, disjoint=s.disjoint)
        case "eq":
            return ranges.equal(a, b, disjoint=s.disjoint)
        case _:
            return ranges.negation(ranges.equal(a, b, disjoint=s.disjoint))


def _rounding(op: Callable[[Tensor], Tensor]) -> Callable[[RuleInputs], Range]:
    def rule(s: RuleInputs) -> Range:
        if s.node.kwargs:  # rounding to decimals
            return Range.anything(s.node.dtype)
        return ranges.rising_alone(op, s.number(0))

    return rule


RULES: dict[str, Callable[[RuleInputs], Range]] = {
    "ge": lambda s: _compare(s, "ge"),
    "gt": lambda s: _compare(s, "gt"),
    "le": lambda s: _compare(s, "le"),
    "lt": lambda s: _compare(s, "lt"),
    "eq": lambda s: _compare(s, "eq"),
    "ne": lambda s: _compare(s, "ne"),
    "bitwise_and": lambda s: _bits(s, "and"),
    "bitwise_or": lambda s: _bits(s, "or"),
    "bitwise_xor": lambda s: _bits(s, "xor"),
    "__and__": lambda s: _bits(s, "and"),
    "__or__": lambda s: _bits(s, "or"),
    "__xor__": lambda s: _bits(s, "xor"),
    "logical_and": lambda s: ranges.both(s.truth(0), s.truth(1), disjoint=s.disjoint),
    "logical_or": lambda s: ranges.either(s.truth(0), s.truth(1), disjoint=s.disjoint),
    "logical_xor": lambda s: ranges.negation(
        ranges.equal(s.truth(0).numbers(), s.truth(1).numbers(), disjoint=s.disjoint)
    ),
    "logical_not": lambda s: ranges.negation(s.truth(0)),
    "bitwise_not": _bit_not,
    "add": _add,
    "sub": lambda s: _add(s, -1.0),
    "rsub": _rsub,
    "mul": _mul,
    "pow": _power,
    "neg": lambda s: ranges.minus(s.number(0)),
    "abs": lambda s: ranges.magnitude(s.number(0)),
    "div": lambda s: _divide(s, s.keyword("rounding_mode", None)),
    "floor_divide": lambda s: _divide(s, "floor"),
    "remainder": _remainder,
    "fmod": _fmod,
    "minimum": lambda s: _extreme(s, torch.minimum),
    "maximum": lambda s: _extreme(s, torch.maximum),
    "clamp": _clamp,
    "clamp_min": lambda s: _extreme(s, torch.maximum),
    "clamp_max": lambda s: _extreme(s, torch.minimum),
    "where": _where,
    "_to_copy": _cast,
    "__lshift__": lambda s: _shift(s, 1),
    "bitwise_left_shift": lambda s: _shift(s, 1),
    "__rshift__": lambda s: _shift(s, -1),
    "bitwise_right_shift": lambda s: _shift(s, -1),
    "floor": _rounding(torch.floor),
    "ceil": _rounding(torch.ceil),
    "trunc": _rounding(torch.trunc),
    "round": _rounding(torch.round),
    "sign": _rounding(torch.sign),
    "alias": _cast,
    "clone": _cast,
    "detach": _cast,
}
"""By ATen name: what an operation makes of the ranges of its operands."""

SHARP_ALONE = frozenset(
    {"add", "sub", "rsub", "mul", "neg", "floor_divide", "ge", "gt", "le", "lt", "bitwise_not"}
)
"""Operations that keep a Range as sharp as the values themselves when only one operand varies."""

CHOOSES = frozenset({"where", "minimum", "maximum", "clamp", "clamp_min", "clamp_max"})
"""Operations whose result is one of their operands: infinite ones do no harm."""
