"""Functions that plan: on real CPU tensors, and under torch.compile as they are, not traced."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, TypeVar

import torch

from flexcp.torch_names import (
    fake_mode_is_on,
    innermost_transform,
    is_recorded,
    without_fake_mode,
    without_recording,
    without_transforms,
)

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
    """Masks are looked at for real, also where the tensors have shapes and no numbers.

    What `make_fx` records has no numbers either.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    if is_recorded():
        return _outside_of_recording()
    return without_fake_mode() if fake_mode_is_on() else nullcontext()


@contextmanager
def _outside_of_recording() -> Iterator[None]:
    with without_recording(), without_fake_mode():
        yield


def outside_of_transforms() -> AbstractContextManager[object]:
    """Masks are looked at as they are, whatever `torch.func` is differentiating or mapping over."""
    return nullcontext() if innermost_transform() is None else without_transforms()


def tensors_to_keep() -> AbstractContextManager[object]:
    """What is made inside serves any later call: real tensors, and none of inference mode.

    A tensor that was made in inference mode can't take part in a later training step. A graph that
    is being compiled keeps no tensors, and is left alone.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    in_inference_mode = torch.is_inference_mode_enabled()
    return _outside_of_every_mode() if in_inference_mode else outside_of_fake_tensors()


def tensors_to_capture() -> AbstractContextManager[object]:
    """The same, of a mask's tensors. `make_fx` knows what is made of those that it records."""
    recorded = is_recorded() and not torch.compiler.is_compiling()
    return without_fake_mode() if recorded else tensors_to_keep()


@contextmanager
def _outside_of_every_mode() -> Iterator[None]:
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
