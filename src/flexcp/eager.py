"""Functions that plan: on real CPU tensors, and under torch.compile as they are, not traced."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def run_eagerly_on_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps torch.compile and other default devices out of a function.

    The first as `torch.compiler.disable`, which takes a second to import: that is spent only once
    torch.compile is in use.

    >>> @run_eagerly_on_cpu
    ... def plan(n: int) -> list[int]:
    ...     return list(range(n))
    >>> plan(3)
    [0, 1, 2]
    """
    disabled: list[Callable[P, R]] = []

    def on_cpu(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.get_default_device().type == "cpu":
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return on_cpu(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(on_cpu))
        return disabled[0](*args, **kwargs)

    return run


def outside_of_fake_tensors() -> AbstractContextManager[object]:
    """Masks are looked at for real, also where the tensors have shapes and no numbers."""
    if (
        torch.compiler.is_compiling()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None
    ):
        return nullcontext()
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


@contextmanager
def tensors_to_keep() -> Iterator[None]:
    """What is made inside serves any later call: real tensors, and none of inference mode.

    A tensor that was made in inference mode can't take part in a later training step.
    """
    with outside_of_fake_tensors(), outside_of_inference_mode():
        yield


@contextmanager
def outside_of_inference_mode() -> Iterator[None]:
    """Ordinary tensors are made inside, without recording gradients."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
