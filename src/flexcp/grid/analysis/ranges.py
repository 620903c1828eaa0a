"""Range: what is known of a value over a rectangle of (query, key) pairs, and its arithmetic.

A rectangle consists of one or more blocks. Besides the bounds of a value, a Range says what is
certain to occur in *every* block: so a comparison can be recognised as true somewhere and false
somewhere in each of a million blocks at once, without looking at any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Op = Callable[[Tensor, Tensor], Tensor]

EXACT = 2.0**52
"""Integers up to this magnitude are exact in float64, with room for one more operation."""


@dataclass(frozen=True)
class Range:
    """Bounds of one value, for many rectangles at once.

    Truth values are bool tensors (False < True); numbers are float64, in which every integer that
    a position can be is exact.
    """

    lo: Tensor
    """[T] Nowhere in the rectangle is the value smaller."""
    hi: Tensor
    """[T] Nowhere in the rectangle is the value larger."""
    some_lo: Tensor
    """[T] Every block of the rectangle has a pair with a value of at most this."""
    some_hi: Tensor
    """[T] Every block of the rectangle has a pair with a value of at least this."""
    may_be_nan: bool = False
    """Whether a number may also be NaN somewhere, of which the bounds say nothing."""

    @classmethod
    def bounds(cls, lo: Tensor, hi: Tensor) -> Range:
        """Bounds of which nothing is known to be attained."""
        return cls(lo, hi, hi, lo)

    @classmethod
    def exactly(cls, value: Tensor) -> Range:
        """One known value."""
        return cls(value, value, value, value)

    @classmethod
    def anything(cls, dtype: torch.dtype) -> Range:
        """No knowledge at all of a value of this type."""
        if dtype == torch.bool:
            return cls.bounds(torch.tensor(False), torch.tensor(True))
        limit = torch.tensor(torch.inf, dtype=torch.float64)
        return cls(-limit, limit, limit, -limit, may_be_nan=dtype.is_floating_point)

    @property
    def is_constant(self) -> bool:
        """Whether each rectangle has one value that is known without comparing bounds."""
        return self.lo is self.hi

    @property
    def is_truth(self) -> bool:
        """Whether this is a truth value rather than a number."""
        return self.lo.dtype == torch.bool

    @property
    def is_one_value(self) -> Tensor:
        """[T] Whether the value is the same all over the rectangle."""
        return self.lo == self.hi

    @property
    def knows_attained(self) -> bool:
        """Whether anything is known beyond the bounds."""
        return self.some_lo is not self.hi or self.some_hi is not self.lo

    def numbers(self) -> Range:
        """This range with truth values as numbers: False is 0 and True is 1."""
        return rising_alone(Tensor.double, self) if self.is_truth else self

    def truths(self) -> Range:
        """This range with numbers as truth values: zero is False."""
        return self if self.is_truth else negation(equal(self, zero(), disjoint=True))

    def widened(self, margin: Tensor) -> Range:
        """Bounds moved outwards, for arithmetic that rounds."""
        return Range.bounds(self.lo - margin, self.hi + margin)

    def largest(self) -> Tensor:
        """[T] The largest magnitude in the rectangle."""
        return torch.maximum(self.lo.abs(), self.hi.abs())


def zero() -> Range:
    """The number 0."""
    return Range.exactly(torch.zeros((), dtype=torch.float64))


def _once(op: Op) -> Op:
    """The operation, computed once for operands that are the same tensors.

    Where nothing is known to be attained, or single cells attain their extremes, a Range shares
    its tensors, and its arithmetic costs half.
    """
    results: dict[tuple[int, int], Tensor] = {}

    def shared(x: Tensor, y: Tensor) -> Tensor:
        key = (id(x), id(y))
        if key not in results:
            results[key] = op(x, y)
        return results[key]

    return shared


def rising(op: Op, a: Range, b: Range, *, disjoint: bool) -> Range:
    """The range of `op(a, b)`, where op never falls when an operand rises.

    `disjoint` says that a and b depend on different axes: then whatever each attains somewhere,
    they also attain together.
    """
    op = _once(op)
    lo, hi = op(a.lo, b.lo), op(a.hi, b.hi)
    if disjoint:
        return Range(lo, hi, op(a.some_lo, b.some_lo), op(a.some_hi, b.some_hi))
    low = (op(a.some_lo, b.hi), op(a.hi, b.some_lo))
    high = (op(a.some_hi, b.lo), op(a.lo, b.some_hi))
    return Range(
        lo,
        hi,
        low[0] if low[0] is low[1] else torch.minimum(*low),
        high[0] if high[0] is high[1] else torch.maximum(*high),
    )


def rising_alone(op: Callable[[Tensor], Tensor], a: Range) -> Range:
    """The range of `op(a)`, where op never falls."""
    shared = _once(lambda x, _: op(x))
    lo, hi, some_lo, some_hi = (shared(x, x) for x in (a.lo, a.hi, a.some_lo, a.some_hi))
    return Range(lo, hi, some_lo, some_hi)


def _falling_alone(op: Callable[[Tensor], Tensor], a: Range) -> Range:
    return rising_alone(op, Range(a.hi, a.lo, a.some_hi, a.some_lo))


def minus(a: Range) -> Range:
    """The range of -a."""
    return _falling_alone(torch.neg, a)


def negation(a: Range) -> Range:
    """The range of `not a`."""
    return _falling_alone(torch.logical_not, a)


def at_least(a: Range, b: Range, *, disjoint: bool) -> Range:
    """The range of a >= b."""
    return rising(lambda x, y: x >= -y, a, minus(b), disjoint=disjoint)


def above(a: Range, b: Range, *, disjoint: bool) -> Range:
    """The range of a > b."""
    return rising(lambda x, y: x > -y, a, minus(b), disjoint=disjoint)


def equal(a: Range, b: Range, *, disjoint: bool) -> Range:
    """The range of a == b."""
    possible = (a.lo <= b.hi) & (b.lo <= a.hi)
    certain = a.is_one_value & b.is_one_value & (a.lo == b.lo)
    met = certain
    if disjoint and a.knows_attained and b.knows_attained:
        # A bound that every block attains on both sides is a pair of equals in every block.
        ends = [((r.lo, r.lo == r.some_lo), (r.hi, r.hi == r.some_hi)) for r in (a, b)]
        for x, every_x in ends[0]:
            for y, every_y in ends[1]:
                met = met | (every_x & every_y & (x == y))
    if not (a.knows_attained or b.knows_attained):
        return Range.bounds(certain, possible)
    if disjoint:
        differs = (a.some_hi > b.some_lo) | (b.some_hi > a.some_lo)
    else:
        differs = (a.some_hi > b.hi) | (b.some_hi > a.hi)
    # A value that takes two values within a block differs from anything that stands still there.
    still = a.is_one_value | b.is_one_value
    differs = differs | (still & ((a.some_hi > a.some_lo) | (b.some_hi > b.some_lo)))
    return Range(certain, possible, ~differs, met)


def both(a: Range, b: Range, *, disjoint: bool) -> Range:
    """The range of `a and b`."""
    return rising(torch.logical_and, a, b, disjoint=disjoint)


def either(a: Range, b: Range, *, disjoint: bool) -> Range:
    """The range of `a or b`."""
    return rising(torch.logical_or, a, b, disjoint=disjoint)


def plus(a: Range, b: Range, *, disjoint: bool) -> Range:
    """The range of a + b."""
    return rising(torch.add, a, b, disjoint=disjoint)


def times(a: Range, b: Range) -> Range:
    """The range of a * b."""
    corners = torch.stack(
        torch.broadcast_tensors(a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi)
    )
    bounds = Range.bounds(corners.amin(0), corners.amax(0))
    for x, factor in ((a, b), (b, a)):
        if factor.is_constant:  # keeps what is attained
            f = factor.lo
            attained = torch.stack(torch.broadcast_tensors(x.some_lo * f, x.some_hi * f))
            rises = f >= 0
            some_lo = torch.where(rises, attained[0], attained[1])
            some_hi = torch.where(rises, attained[1], attained[0])
            return Range(bounds.lo, bounds.hi, some_lo, some_hi)
    return bounds


def choice(condition: Range, a: Range, b: Range) -> Range:
    """The range of `a if condition else b`."""
    if not (a.is_truth and b.is_truth):
        a, b = a.numbers(), b.numbers()
    always, never = condition.lo, ~condition.hi
    lo, hi = torch.minimum(a.lo, b.lo), torch.maximum(a.hi, b.hi)
    mixed = Range.bounds(lo, hi)

    def chosen(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return torch.where(always, x, torch.where(never, y, z))

    return Range(
        chosen(a.lo, b.lo, mixed.lo),
        chosen(a.hi, b.hi, mixed.hi),
        chosen(a.some_lo, b.some_lo, mixed.some_lo),
        chosen(a.some_hi, b.some_hi, mixed.some_hi),
    )


def magnitude(a: Range) -> Range:
    """The range of abs(a)."""
    crosses = (a.lo < 0) & (a.hi > 0)
    low = torch.where(crosses, 0.0, torch.minimum(a.lo.abs(), a.hi.abs()))
    positive = a.lo >= 0
    some_lo = torch.where(positive, a.some_lo, -a.some_hi)
    some_hi = torch.where(positive, a.some_hi, -a.some_lo)
    high = a.largest()
    return Range(low, high, torch.where(crosses, high, some_lo), torch.where(crosses, low, some_hi))


def quotient(a: Range, b: Range, rounding: Callable[[Tensor], Tensor]) -> Range:
    """The range of rounding(a / b), where rounding never falls; nothing is known if b may be 0."""
    safe = (b.lo > 0) | (b.hi < 0)
    corners = torch.stack(
        torch.broadcast_tensors(
            *(rounding(x / torch.where(safe, y, 1.0)) for x in (a.lo, a.hi) for y in (b.lo, b.hi))
        )
    )
    lo = torch.where(safe, corners.amin(0), -torch.inf)
    hi = torch.where(safe, corners.amax(0), torch.inf)
    if b.is_constant and bool((b.lo > 0).all()):
        return Range(lo, hi, rounding(a.some_lo / b.lo), rounding(a.some_hi / b.lo))
    return Range.bounds(lo, hi)


def modulo(a: Range, b: Range) -> Range:
    """The range of a % b for integers, with Python's sign rule."""
    positive = b.lo > 0
    top = b.hi - 1
    if not b.is_constant:
        small = positive & (a.lo >= 0)
        return Range.bounds(
            torch.where(positive, 0.0, -torch.inf),
            torch.where(small, torch.minimum(a.hi, top), torch.where(positive, top, torch.inf)),
        )
    m = torch.where(positive, b.lo, 1.0)
    base = (a.lo / m).floor()
    one_period = positive & (base == (a.hi / m).floor())
    offset = base * m
    lo = torch.where(one_period, a.lo - offset, torch.where(positive, 0.0, -torch.inf))
    hi = torch.where(one_period, a.hi - offset, torch.where(positive, top, torch.inf))
    some_lo = torch.where(one_period, a.some_lo - offset, hi)
    some_hi = torch.where(one_period, a.some_hi - offset, lo)
    return Range(lo, hi, some_lo, some_hi)


def whole_power(a: Range, exponent: int) -> Range:
    """The range of a ** exponent, for a natural exponent."""
    if exponent == 0:
        return Range.exactly(torch.ones((), dtype=torch.float64))
    base = magnitude(a) if exponent % 2 == 0 else a
    return rising_alone(lambda x: x**exponent, base)
