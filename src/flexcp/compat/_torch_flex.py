"""Torch's own flex_attention as torch's function modes see it, under whatever name it is called.

It is a plain Python function that asks nobody. Code imports it by name and keeps it compiled, so no
attribute reaches all callers; and what it calls comes too late for a sharded sequence: before its
operator it compares a block mask's lengths with the rows that a rank has, and refuses gradients on
CPU. So the function itself is given a first line that asks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import handle_torch_function

TORCH_FLEX_ATTENTION: Callable[..., Any] = flex_attention
"""The function object that `from torch.nn.attention.flex_attention import flex_attention` gives."""


def make_overridable() -> None:
    """From now on, a TorchFunctionMode that is on sees calls of torch's flex_attention.

    It sees those of `scaled_dot_product_attention` anyway. Without a mode the function is what it
    was.
    """
    function: Any = TORCH_FLEX_ATTENTION
    if function.__code__ is not _entry.__code__ and _takes_the_same(function, _entry):
        function.__code__ = _entry.__code__


def _takes_the_same(function: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether two functions have the same parameters and defaults.

    They have not once torch's function has changed. It is then left alone, and a mode that can't
    let its operator run as it is refuses that by name.
    """
    takes = [
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (function, other)
    ]
    return takes[0] == takes[1]


class _Asking:
    """Asks the modes that are on, and runs what torch's function did before if there is none."""

    def __init__(self, function: Any) -> None:
        self.original = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__
        )
        self.original.__kwdefaults__ = function.__kwdefaults__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._is_torch_function_mode_enabled():
            return handle_torch_function(TORCH_FLEX_ATTENTION, (), *args, **kwargs)
        return self.original(*args, **kwargs)


_ask = _Asking(TORCH_FLEX_ATTENTION)


def _entry(  # runs with torch's signature, defaults and globals
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    enable_gqa: Any = False,
    return_lse: Any = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    from flexcp.compat._torch_flex import _ask

    return _ask(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        enable_gqa,
        return_lse,
        kernel_options,
        return_aux=return_aux,
    )
