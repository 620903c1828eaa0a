"""How close is close enough: error budgets derived from the data type, none of them by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.errors import FlexCPError, quote

# Sums of a few thousand terms of mixed sign lose some digits beyond one rounding.
_ROUNDINGS = {
    torch.float64: 2**18,
    torch.float32: 160,
    torch.bfloat16: 4,
    torch.float16: 8,
}


def tolerance(dtype: torch.dtype) -> float:
    """The allowed error, relative to the largest entry, of attention computed in `dtype`.

    >>> tolerance(torch.float64) < 1e-10
    True
    >>> tolerance(torch.float32) < 2e-5
    True
    """
    if not isinstance(dtype, torch.dtype) or dtype not in _ROUNDINGS:
        raise FlexCPError(
            f"one of {', '.join(map(str, _ROUNDINGS))}", quote(dtype), "name the type of the call"
        )
    return _ROUNDINGS[dtype] * torch.finfo(dtype).eps


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest deviation, relative to the largest finite entry of `expected`.

    Infinities have to agree exactly, and a NaN anywhere is an infinite error.

    >>> relative_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    0.5
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}")
    if actual.numel() == 0:
        return 0.0
    a, b = actual.detach().double(), expected.detach().double()
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite], b[~finite]):
        return float("inf")
    if not finite.any():
        return 0.0
    largest = b[finite].abs().max().item()
    deviation = (a[finite] - b[finite]).abs().max().item()
    return deviation / largest if largest > 0 else deviation


def assert_close(
    actual: Tensor,
    expected: Tensor,
    *,
    dtype: torch.dtype | None = None,
    what: str = "tensor",
    factor: float = 1.0,
) -> None:
    """Raises if `actual` is further from `expected` than its data type explains.

    Args:
        actual: the result under test.
        expected: what an oracle says, possibly in a wider type.
        dtype: the type that the computation was done in; that of `actual` by default.
        what: what to call it in the message.
        factor: how many times the usual budget is allowed.

    >>> assert_close(torch.ones(2), torch.ones(2, dtype=torch.float64), what="out")
    """
    dtype = actual.dtype if dtype is None else dtype
    error, budget = relative_error(actual, expected), factor * tolerance(dtype)
    if not error <= budget:
        raise AssertionError(f"{what} is off by {error:.3g}, more than {budget:.3g} for {dtype}")
