"""THE interception of torch's attention functions: a function mode, so that no name hides one.

A TorchFunctionMode sees `scaled_dot_product_attention` however early a module bound it and whatever
it calls it: imported by name, kept as an attribute, in a `functools.partial`, from `torch._C`. Of
torch's `flex_attention`, a plain Python function, it sees the operator that the function ends in.
A mode belongs to one thread; `in_force` takes it along to where checkpointed regions are
recomputed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention
from torch.overrides import TorchFunctionMode

from flexcp.compat._attention import flex_attention as compat_flex_attention
from flexcp.compat._multi_head import multi_head_attention_forward
from flexcp.compat.recomputation import kept_for_recomputation
from flexcp.errors import FlexCPError
from flexcp.ops.api import flex_attention
from flexcp.torch_names import (
    function_modes_on,
    fused_layers,
    never_compiled_by_itself,
    pop_function_mode,
    push_function_mode,
    sdpa,
)

SDPA = sdpa
"""The one object behind every name of it: `F.scaled_dot_product_attention`, unless F is patched."""

_FLEX = (flex_attention, compat_flex_attention)
_SDPA_OPS = (
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
_FLEX_OP = torch.ops.higher_order.flex_attention
_MULTI_HEAD = functional.multi_head_attention_forward
_NEEDS_GRADIENT = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_ATTENTION = (SDPA, *_SDPA_OPS, *_FLEX, _FLEX_OP, _MULTI_HEAD, *fused_layers)


class Interception(TorchFunctionMode):
    """Sees every call of an attention function on this thread; subclasses say what becomes of it.

    Without a say of theirs a call runs as it is. While a method runs, the mode is off, so that it
    may call torch's own function.

    >>> class Count(Interception):
    ...     calls = 0
    ...     def sdpa(self, *args, **kwargs):
    ...         self.calls += 1
    ...         return SDPA(*args, **kwargs)
    >>> bound_early = functional.scaled_dot_product_attention
    >>> x = torch.randn(1, 2, 8, 4)
    >>> with Count() as count:
    ...     out = bound_early(x, x, x)
    >>> count.calls
    1
    """

    looks_into_layers = True
    """Whether `sdpa` also answers for the attention within torch's multi-head attention, which
    modes see as one call."""

    trains_flex_op_on_cpu = False
    """Whether `flex_op` gives gradients on CPU too, where torch's `flex_attention` refuses them."""

    def sdpa(self, *args: Any, **kwargs: Any) -> Any:
        """Answers a call of `F.scaled_dot_product_attention`."""
        return SDPA(*args, **kwargs)

    def flex(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Answers a call of `flex_attention`: compat's or flexcp's."""
        return function(*args, **kwargs)

    def flex_op(self, *args: Any, **kwargs: Any) -> Any:
        """Answers a call of the operator that torch's `flex_attention` ends in.

        Torch compiles that call, also where the caller does not: what is done here is traced.
        """
        return _FLEX_OP(*args, **kwargs)

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers any other call of a torch function."""
        return run_as_it_is(func, args, kwargs)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func not in _ATTENTION:
            if self.trains_flex_op_on_cpu and _is_asked_by_torch_flex(func):
                return False
            return self.other(func, args, kwargs)
        if func is SDPA or func in _SDPA_OPS:
            return self.sdpa(*args, **kwargs)
        if func in _FLEX:
            return self.flex(func, *args, **kwargs)
        if func is _FLEX_OP:
            return self.flex_op(*args, **kwargs)
        if not self.looks_into_layers:
            return self.other(func, args, kwargs)
        if func is _MULTI_HEAD:
            return self._multi_head(*args, **kwargs)
        raise FlexCPError(
            "attention that calls F.scaled_dot_product_attention",
            f"{func.__name__}, which is a whole layer",
            "call the module instead of the function, or switch torch's fast path off: "
            "torch.backends.mha.set_fastpath_enabled(False)",
        )

    def _multi_head(self, *args: Any, **kwargs: Any) -> Any:
        need_weights = args[15] if len(args) > 15 else kwargs.get("need_weights", True)
        if need_weights:
            return self.weights(*args, **kwargs)
        return multi_head_attention_forward(self.sdpa, *args, **kwargs)

    def weights(self, *args: Any, **kwargs: Any) -> Any:
        """Answers multi-head attention that returns its weights, and so calls no attention."""
        return _MULTI_HEAD(*args, **kwargs)


# Dynamo inlines it into what it compiles; but called while a compiled function falls back to eager,
# it would be compiled by itself, without a guard on `func`: one function's result for another's.
never_compiled_by_itself(Interception.__torch_function__)

Kind = TypeVar("Kind", bound=Interception)


@contextmanager
def in_force(make: Callable[[], Kind]) -> Iterator[Kind]:
    """An interception while the body runs, and while what it checkpoints is recomputed.

    Args:
        make: Makes it; a mode that is on can't be entered again on another thread.
    """
    with kept_for_recomputation(lambda: in_force(make)), make() as mode:
        yield mode


def set_at_bottom(mode: Interception) -> None:
    """Sets a mode for good on this thread, below those that end with a `with`.

    As `torch.set_default_device` does: a mode on top would be taken for the one that ends.
    """
    others = [pop_function_mode() for _ in range(function_modes_on())]
    for one in (mode, *reversed(others)):
        push_function_mode(one)


def take_out(mode: Interception) -> None:
    """Ends `set_at_bottom`, whatever has been set since."""
    others = [pop_function_mode() for _ in range(function_modes_on())]
    for one in reversed(others):
        if one is not mode:
            push_function_mode(one)


def _is_asked_by_torch_flex(func: Any) -> bool:
    """Whether torch's flex_attention asks if a tensor needs gradients: it refuses them on CPU.

    For `__torch_function__`, whose caller is looked at. In a compiled function, dynamo knows the
    answer without asking.
    """
    if torch.compiler.is_compiling() or func != _NEEDS_GRADIENT:
        return False
    return sys._getframe(2).f_globals is torch_flex_attention.__globals__


def run_as_it_is(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a mode does with a call that is none of its business."""
    if torch.compiler.is_compiling() and isinstance(func, FunctionType):
        name = func.__name__
        # torch.compile knows such a method of a tensor, but not the function that it is made of.
        if getattr(torch.Tensor, name, None) is func:
            return getattr(args[0], name)(*args[1:], **kwargs)
    return func(*args, **kwargs)
