"""Functions that plan: under torch.compile they run as they are, instead of being traced."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def never_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps torch.compile out of a function.

    As `torch.compiler.disable`, which takes a second to import: that is spent only once
    torch.compile is in use.

    >>> @never_compiled
    ... def plan(n: int) -> list[int]:
    ...     return list(range(n))
    >>> plan(3)
    [0, 1, 2]
    """
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return run
