"""Torch's own flex_attention as torch's function modes see it, under whatever name it is called."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.nn.attention import flex_attention as home
from torch.overrides import handle_torch_function

TORCH_FLEX_ATTENTION: Callable[..., Any] = home.flex_attention
"""The function object that `from torch.nn.attention.flex_attention import flex_attention` gives."""


def make_overridable() -> None:
    """From now on, a TorchFunctionMode that is on sees calls of torch's flex_attention.

    It sees those of `scaled_dot_product_attention` anyway. Code imports flex_attention by name, or
    keeps it compiled, so no attribute reaches all callers: the function itself has to ask. Without
    a mode it is what it was.
    """
    function: Any = TORCH_FLEX_ATTENTION
    if "_flexcp_overridable" in vars(home):
        return
    original = FunctionType(function.__code__, function.__globals__, function.__name__)
    original.__defaults__, original.__kwdefaults__ = function.__defaults__, function.__kwdefaults__

    def ask(*args: Any, **kwargs: Any) -> Any:
        if torch._C._is_torch_function_mode_enabled():
            return handle_torch_function(function, (), *args, **kwargs)
        return original(*args, **kwargs)

    vars(home)["_flexcp_overridable"] = ask
    function.__code__ = _entry.__code__


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
    return _flexcp_overridable(  # type: ignore[name-defined]  # noqa: F821
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
