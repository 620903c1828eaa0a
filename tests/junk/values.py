"""Junk of all kinds, and what of it a kind of argument may take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexcp import BlockGrid, Mask, masks
from flexcp.errors import as_whole


class Surly:
    """An object whose every question ends in an error."""

    def __bool__(self) -> bool:
        raise RuntimeError("no truth here")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("nothing compares to me")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError("nothing to be said")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __iter__(self) -> Any:
        raise RuntimeError("no elements")

    def __float__(self) -> float:
        raise RuntimeError("no number")


def _recursive_list() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def _recursive_dict() -> dict[str, Any]:
    made: dict[str, Any] = {}
    made["mask"] = made
    return made


def _deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(5000):
        made = [made]
    return made


def _raises(*_: Any, **__: Any) -> Any:
    raise KeyError("a fault of the user's own")


JUNK: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "-1": lambda: -1,
    "7": lambda: 7,
    "10**9": lambda: 10**9,
    "2**31": lambda: 2**31,
    "2**63": lambda: 2**63,
    "-(2**63)": lambda: -(2**63),
    "10**30": lambda: 10**30,
    "10**400": lambda: 10**400,
    "1.5": lambda: 1.5,
    "2.0": lambda: 2.0,
    "-0.0": lambda: -0.0,
    "NaN": lambda: math.nan,
    "inf": lambda: math.inf,
    "-inf": lambda: -math.inf,
    "1e300": lambda: 1e300,
    "1e-320": lambda: 1e-320,
    "complex": lambda: complex(1, 2),
    "Fraction": lambda: Fraction(1, 3),
    "empty text": lambda: "",
    "text": lambda: "nope",
    "digits": lambda: "7",
    "unicode": lambda: "κέρνελ 🦖\u202e\x00",
    "a lone surrogate": lambda: "\ud800",
    "long text": lambda: "x" * 100_000,
    "bytes": lambda: b"x",
    "a missing path": lambda: Path("/dev/null/flexcp/x"),
    "[]": list,
    "[0]": lambda: [0],
    "[1, 2]": lambda: [1, 2],
    "[-1, 9]": lambda: [-1, 9],
    "[True]": lambda: [True],
    "[1.5]": lambda: [1.5],
    "[NaN]": lambda: [math.nan],
    "[None]": lambda: [None],
    "['a']": lambda: ["a"],
    "[10**20]": lambda: [10**20],
    "[10**9]": lambda: [10**9],
    "[[1], [2]]": lambda: [[1], [2]],
    "[[]]": lambda: [[]],
    "a list in itself": _recursive_list,
    "a deep list": _deep,
    "()": lambda: (),
    "(1, 2)": lambda: (1, 2),
    "(0, 0)": lambda: (0, 0),
    "(1.5, 2)": lambda: (1.5, 2),
    "((1, 2), (3,))": lambda: ((1, 2), (3,)),
    "{}": dict,
    "{'a': 1}": lambda: {"a": 1},
    "{1: 'a'}": lambda: {1: "a"},
    "a dict in itself": _recursive_dict,
    "set": lambda: {1},
    "range": lambda: range(3),
    "iterator": lambda: iter([1, 2]),
    "generator": lambda: (x for x in range(3)),
    "object": lambda: object(),
    "a surly object": lambda: Surly(),
    "int": lambda: int,
    "type": lambda: type,
    "a module": lambda: torch,
    "an exception": lambda: ValueError("x"),
    "tensor(3)": lambda: torch.tensor(3),
    "tensor(True)": lambda: torch.tensor(True),
    "tensor(1.5)": lambda: torch.tensor(1.5),
    "tensor(NaN)": lambda: torch.tensor(math.nan),
    "tensor([1, 2, 3])": lambda: torch.tensor([1, 2, 3]),
    "tensor([-5])": lambda: torch.tensor([-5]),
    "tensor([2**62])": lambda: torch.tensor([2**62]),
    "tensor([0.5])": lambda: torch.tensor([0.5]),
    "zeros(0)": lambda: torch.zeros(0),
    "zeros(0, int)": lambda: torch.zeros(0, dtype=torch.int64),
    "zeros(2, 3)": lambda: torch.zeros(2, 3),
    "zeros(1, 2, 8, 4, int)": lambda: torch.zeros(1, 2, 8, 4, dtype=torch.int64),
    "zeros(1, 2, 8, 4, double)": lambda: torch.zeros(1, 2, 8, 4, dtype=torch.float64),
    "zeros(1, 2, 8, 4, complex)": lambda: torch.zeros(1, 2, 8, 4, dtype=torch.complex64),
    "zeros(1, 2, 8, 4, bool)": lambda: torch.zeros(1, 2, 8, 4, dtype=torch.bool),
    "zeros(1, 2, 8, 4, float8)": lambda: torch.zeros(1, 2, 8, 4).to(torch.float8_e4m3fn),
    "zeros(1, 2, 9, 4)": lambda: torch.zeros(1, 2, 9, 4),
    "zeros(1, 3, 8, 4)": lambda: torch.zeros(1, 3, 8, 4),
    "zeros(1, 2, 8, 0)": lambda: torch.zeros(1, 2, 8, 0),
    "zeros(0, 2, 8, 4)": lambda: torch.zeros(0, 2, 8, 4),
    "empty(1, 2, 8, 4, meta)": lambda: torch.empty(1, 2, 8, 4, device="meta"),
    "sparse": lambda: torch.zeros(8, 4).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "a parameter": lambda: torch.nn.Parameter(torch.zeros(2)),
    "np.int64(3)": lambda: np.int64(3),
    "np.float32(0.5)": lambda: np.float32(0.5),
    "np.bool_": lambda: np.bool_(True),
    "np.nan": lambda: np.float64("nan"),
    "np.array([1, 2])": lambda: np.array([1, 2]),
    "np.array(object)": lambda: np.array([None, "x"], dtype=object),
    "torch.float32": lambda: torch.float32,
    "torch.int8": lambda: torch.int8,
    "torch.complex64": lambda: torch.complex64,
    "torch.device": lambda: torch.device("cpu"),
    "torch.device(meta)": lambda: torch.device("meta"),
    "a function of anything": lambda: lambda *a: a,
    "a function of nothing": lambda: lambda: None,
    "a function of one": lambda: lambda x: x,
    "a function that raises": lambda: _raises,
    "a mask_mod": lambda: lambda b, h, q, kv: q >= kv,
    "a mask_mod that branches": lambda: lambda b, h, q, kv: q if q > kv else kv,
    "a mask_mod of numbers": lambda: lambda b, h, q, kv: q + kv,
    "a score_mod": lambda: lambda s, b, h, q, kv: s,
    "a score_mod of None": lambda: lambda s, b, h, q, kv: None,
    "a Mask": lambda: masks.causal(),
    "a module of nn": lambda: torch.nn.Linear(2, 2),
}  # fmt: skip


Fits = Callable[[Any], bool]


def _quietly(fits: Fits) -> Fits:
    """The question, answered with no where asking it fails."""

    def ask(value: Any) -> bool:
        try:
            return bool(fits(value))
        except Exception:
            return False

    return ask


def whole(at_least: int | None = None, at_most: int = 2**63 - 1) -> Fits:
    """Integers of Python, numpy and torch within bounds; never True and False."""

    def ask(value: Any) -> bool:
        number = as_whole(value)
        low = -(2**63) if at_least is None else at_least
        return number is not None and low <= number <= at_most

    return _quietly(ask)


def number(low: float = -math.inf, high: float = math.inf) -> Fits:
    """Finite numbers between bounds."""

    def ask(value: Any) -> bool:
        if isinstance(value, bool | np.bool_ | str | bytes | complex):
            return False
        if isinstance(value, Tensor) and (value.dtype == torch.bool or value.numel() != 1):
            return False
        return math.isfinite(float(value)) and low <= float(value) <= high

    return _quietly(ask)


def one_of(*values: object) -> Fits:
    return _quietly(lambda value: any(type(value) is type(v) and value == v for v in values))


def a(*kinds: type) -> Fits:
    return lambda value: isinstance(value, kinds)


def either(*kinds: Fits) -> Fits:
    return lambda value: any(fits(value) for fits in kinds)


def listed(fits: Fits) -> Fits:
    """Lists, tuples and ranges of what fits."""
    return _quietly(
        lambda value: (
            isinstance(value, Sequence)
            and not isinstance(value, str | bytes)
            and all(map(fits, value))
        )
    )


def integers(*dims: int, low: int = -(2**63)) -> Fits:
    """Integer tensors and arrays of so many dimensions."""

    def ask(value: Any) -> bool:
        x = torch.as_tensor(value) if isinstance(value, np.ndarray) else value
        is_whole = isinstance(x, Tensor) and not (
            x.is_floating_point() or x.is_complex() or x.dtype == torch.bool
        )
        return is_whole and x.dim() in dims and bool((x >= low).all())

    return _quietly(ask)


def shaped(*shape: int) -> Fits:
    """Tensors of floats of one shape."""
    return _quietly(
        lambda x: isinstance(x, Tensor) and x.dtype.is_floating_point and tuple(x.shape) == shape
    )


nothing: Fits = lambda value: False  # noqa: E731
anything: Fits = lambda value: True  # noqa: E731
absent: Fits = lambda value: value is None  # noqa: E731
flag = a(bool)
text = a(str)
tensor = a(Tensor)
function: Fits = callable
path = a(str, Path)
masklike = either(a(Mask, BlockGrid), function)
mapping = a(Mapping)
