"""Functions that torch's function modes and tensor subclasses may answer, as they may torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.overrides import handle_torch_function, has_torch_function

P = ParamSpec("P")
R = TypeVar("R")


def overridable(function: Callable[P, R]) -> Callable[P, R]:
    """Lets `__torch_function__` of a mode that is on, or of an argument, answer in its place.

    >>> class Answer(torch.overrides.TorchFunctionMode):
    ...     def __torch_function__(self, func, types, args=(), kwargs=None):
    ...         return 42 if func is question else func(*args, **(kwargs or {}))
    >>> @overridable
    ... def question() -> int:
    ...     return 0
    >>> with Answer():
    ...     question()
    42
    >>> question()
    0
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # Inside torch.compile, has_torch_function does not know of modes.
        if torch._C._is_torch_function_mode_enabled() or has_torch_function(args):
            return handle_torch_function(run, args, *args, **kwargs)
        return function(*args, **kwargs)

    return run
