"""What is set while a region is checkpointed is set again while it is recomputed.

A checkpointed region runs a second time in the backward pass, possibly after the settings of its
first run have ended, and on another thread. `torch.utils.checkpoint` keeps random numbers and
autocast for it; this keeps whatever else is in force. It has no hook for that, so two names in its
module stand for ours as long as a setting is in force somewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

Setting = Callable[[], AbstractContextManager[Any]]


class _InForce(threading.local):
    def __init__(self) -> None:
        self.settings: list[Setting] = []


_in_force = _InForce()
_lock = threading.Lock()
_users = 0
_generator: Any = None
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
    global _users, _generator, _function
    _in_force.settings.append(setting)
    with _lock:
        _users += 1
        if _users == 1:
            _generator = torch_checkpoint._checkpoint_without_reentrant_generator
            _function = torch_checkpoint.CheckpointFunction
            generator: Any = _generator_in_settings
            torch_checkpoint._checkpoint_without_reentrant_generator = generator
            torch_checkpoint.CheckpointFunction = _FunctionInSettings  # type: ignore[misc, assignment]


def end_keeping(setting: Setting) -> None:
    """Ends what `begin_keeping` began with the same setting, on the same thread."""
    global _users
    _in_force.settings.remove(setting)
    with _lock:
        _users -= 1
        if _users == 0:
            # What someone else has put there meanwhile stays, and goes on to call ours.
            found: Any = torch_checkpoint._checkpoint_without_reentrant_generator
            if found is _generator_in_settings:
                torch_checkpoint._checkpoint_without_reentrant_generator = _generator
            kept: Any = torch_checkpoint.CheckpointFunction
            if kept is _FunctionInSettings:
                torch_checkpoint.CheckpointFunction = _function  # type: ignore[misc]


def _generator_in_settings(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _generator(_in_the_same_settings(function), *args, **kwargs)


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
