"""What is set while a region is checkpointed is set again while it is recomputed.

A checkpointed region runs a second time in the backward pass, possibly after the settings of its
first run have ended, and on another thread. `torch.utils.checkpoint` keeps random numbers and
autocast for it; this keeps whatever else is in force.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

Setting = Callable[[], AbstractContextManager[Any]]

_GENERATOR = "_checkpoint_without_reentrant_generator"
_FUNCTION = "CheckpointFunction"


class _InForce(threading.local):
    def __init__(self) -> None:
        self.settings: list[Setting] = []


_in_force = _InForce()
_lock = threading.Lock()
_before: dict[str, Any] = {}
_users = 0


@contextmanager
def kept_for_recomputation(setting: Setting) -> Iterator[None]:
    """What is checkpointed in the body, reentrant or not, is recomputed in `setting()`."""
    _in_force.settings.append(setting)
    _watch()
    try:
        yield
    finally:
        _in_force.settings.pop()
        _unwatch()


def _watch() -> None:
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        for name in (_GENERATOR, _FUNCTION):
            _before[name] = getattr(torch_checkpoint, name)
        setattr(torch_checkpoint, _GENERATOR, _generator)
        setattr(torch_checkpoint, _FUNCTION, _Function)


def _unwatch() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            for name, value in _before.items():
                setattr(torch_checkpoint, name, value)


def _generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _before[_GENERATOR](_in_the_same_settings(function), *args, **kwargs)


class _Function:
    """Stands for torch's CheckpointFunction, of which `checkpoint` calls nothing but `apply`."""

    @staticmethod
    def apply(function: Callable[..., Any], *args: Any) -> Any:
        return _before[_FUNCTION].apply(_in_the_same_settings(function), *args)


def _in_the_same_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    settings = tuple(_in_force.settings)

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for setting in settings:
                stack.enter_context(setting())
            return function(*args, **kwargs)

    return run
