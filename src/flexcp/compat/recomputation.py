"""What is set while a region is checkpointed is set again while it is recomputed.

A checkpointed region runs a second time in the backward pass, possibly after the settings of its
first run have ended, and on another thread. `torch.utils.checkpoint` keeps random numbers and
autocast for it; this keeps whatever else is in force. It has no hook for that, so two names in its
module stand for ours as long as a setting is in force somewhere: what a region without reentry is
recomputed by, and the function of a reentrant one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from flexcp import torch_names

Setting = Callable[[], AbstractContextManager[Any]]


class _InForce(threading.local):
    def __init__(self) -> None:
        self.settings: list[Setting] = []


_in_force = _InForce()
_lock = threading.Lock()
_users = 0
_frame: Any = None
_function: Any = None
"""What torch, or whoever changed it before, checkpoints by; known while a setting is in force."""


@contextmanager
def kept_for_recomputation(setting: Setting) -> Iterator[None]:
    """What is checkpointed in the body, reentrant or not, is recomputed in `setting()`."""
    begin_keeping(setting)
    try:
        yield
    finally:
        end_keeping(setting)


def begin_keeping(setting: Setting) -> None:
    """From now on, what this thread checkpoints is recomputed in `setting()`."""
    global _users, _frame, _function
    with _lock:
        if _users == 0:
            _frame = torch_names.checkpoint_frame
            torch_names.require_present(_frame)
            _function = torch_checkpoint.CheckpointFunction
            torch_checkpoint._CheckpointFrame = _frame_in_settings  # type: ignore[assignment, misc]
            torch_checkpoint.CheckpointFunction = _FunctionInSettings  # type: ignore[misc, assignment]
        _users += 1
    _in_force.settings.append(setting)


def end_keeping(setting: Setting) -> None:
    """Ends what `begin_keeping` began with the same setting, on the same thread."""
    global _users
    _in_force.settings.remove(setting)
    with _lock:
        _users -= 1
        if _users == 0:
            # What someone else has put there meanwhile stays, and goes on to call ours.
            found: Any = torch_names.checkpoint_frame
            if found is _frame_in_settings:
                torch_checkpoint._CheckpointFrame = _frame  # type: ignore[misc]
            kept: Any = torch_checkpoint.CheckpointFunction
            if kept is _FunctionInSettings:
                torch_checkpoint.CheckpointFunction = _function  # type: ignore[misc]


def _frame_in_settings(recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands for torch's frame of a region, which holds what the region is recomputed by."""
    return _frame(_in_the_same_settings(recompute), *args, **kwargs)


class _FunctionInSettings:
    """Stands for torch's CheckpointFunction, of which `checkpoint` calls nothing but `apply`."""

    @staticmethod
    def apply(function: Callable[..., Any], *args: Any) -> Any:
        return _function.apply(_in_the_same_settings(function), *args)


def _in_the_same_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    settings = tuple(_in_force.settings)

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for setting in settings:
                stack.enter_context(setting())
            return function(*args, **kwargs)

    return run
