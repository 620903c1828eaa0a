"""Functions that generated score functions call: what Triton's language has no word for.

Everything here is Triton's language, in float32 or whole numbers, on scalars and tiles alike.
"""

import triton
import triton.language as tl

TWICE_LOG2_E = tl.constexpr(2.8853900817779268)


@triton.jit
def tanh(x):
    """The hyperbolic tangent; 1 and -1 far from 0."""
    return 1.0 - 2.0 / (1.0 + tl.math.exp2(x * TWICE_LOG2_E))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def log1p(x):
    """log(1 + x), also where x is small against 1."""
    above = 1.0 + x
    rest = above - 1.0
    found = tl.log(above) * (x / tl.where(rest == 0.0, 1.0, rest))
    return tl.where(rest == 0.0, x, tl.where(above == float("inf"), above, found))


@triton.jit
def powered(x, exponent):
    """A power with any exponent; NaN for negative numbers unless it is 0, or a whole number."""
    found = tl.exp2(exponent * tl.log2(tl.abs(x)))
    half = exponent * 0.5
    odd = tl.where(half == tl.floor(half), found, -found)
    of_negative = tl.where(exponent == tl.floor(exponent), odd, float("nan"))
    return tl.where(exponent == 0.0, 1.0, tl.where(x < 0.0, of_negative, found))


@triton.jit
def sign(x):
    """1, 0 or -1."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def truncated(x):
    """The whole number next to x on the side of 0."""
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))


@triton.jit
def floor_divided(a, b):
    """The quotient of whole numbers, rounded down; Triton's own rounds towards 0."""
    quotient = a // b
    rest = a - quotient * b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def remainder(a, b):
    """What is left by `floor_divided`: it has the sign of b."""
    rest = a - a // b * b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def counted_from_end(index, size):
    """An index that is not negative: those that are count from the end of a dimension."""
    return tl.where(index < 0, index + size, index)


@triton.jit
def unpacked(x):
    """A whole number, from how it is passed: see `packed` in `scoring.py`."""
    return (x - 1099511627793) >> 5
