"""Which call a recomputation under activation checkpointing repeats.

A checkpointed region runs again in the backward pass. Its calls are then no new ones: they repeat
the calls of the region's first run, and ranks may come to regions in different orders. So each
takes the number of the call that it repeats. Torch does not say what is recomputed, but:

- without reentry, saved-tensor hooks are in force in both runs that hold the region's frame;
- with reentry, the first run has no gradients, and begins right after the node of the region was
  made: the number of that node, which the backward pass knows, is one less than that of the next.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch

from flexcp.torch_names import (
    current_backward_pass,
    current_node,
    innermost_saved_tensor_hooks,
    next_node_number,
)

_REGIONS = 4096
"""Reentrant regions that are remembered: calls without gradients may all be in one."""


saved_tensor_hooks: Callable[[], tuple[Any, Any] | None] = partial(
    innermost_saved_tensor_hooks, True
)
"""The innermost saved-tensor hooks in force: to pack and unpack. They are there in every region
that is checkpointed without reentry."""


@dataclass(eq=False)
class _Region:
    """The calls of a checkpointed region."""

    numbers: list[int] = field(default_factory=list)
    runs: int = 0
    """How often it was recomputed, this time included."""
    run: Any = None
    """What the present recomputation is known by."""
    done: int = 0
    """How many of its calls the present recomputation has repeated."""

    def repeat(self, run: Any) -> tuple[int, int] | None:
        """The number of the next call of a recomputation, and which recomputation it is."""
        if self.run != run:
            self.run, self.done, self.runs = run, 0, self.runs + 1
        if self.done == len(self.numbers):
            return None
        self.done += 1
        return self.numbers[self.done - 1], self.runs


class RecomputedCalls:
    """Numbers of calls by the checkpointed regions that they were made in."""

    def __init__(self) -> None:
        self._by_frame: weakref.WeakKeyDictionary[Any, _Region] = weakref.WeakKeyDictionary()
        self._by_node: OrderedDict[int, _Region] = OrderedDict()

    def remember(self, number: int) -> None:
        """Notes a call that has just begun."""
        if not torch.is_grad_enabled():
            node = next_node_number()
            self._by_node.setdefault(node, _Region()).numbers.append(number)
            while len(self._by_node) > _REGIONS:
                self._by_node.popitem(last=False)
            return
        hooks = saved_tensor_hooks()
        frame = None if hooks is None else _frame_of(hooks[0])
        if frame is not None:
            self._by_frame.setdefault(frame, _Region()).numbers.append(number)

    def find(self) -> tuple[int, int] | None:
        """In a backward pass: the number of the call that the one about to begin repeats.

        Also how often it was repeated by then. None for a new call.
        """
        hooks = saved_tensor_hooks()
        frame = None if hooks is None else _frame_of(hooks[0])
        if hooks is not None and frame is not None:
            region = self._by_frame.get(frame)
            return None if region is None else region.repeat(hooks[0])
        node: Any = current_node()
        if node is None or type(node).__name__ != "CheckpointFunctionBackward":
            return None
        region = self._by_node.get(node._sequence_nr() + 1)
        # A second backward pass may run through the same node.
        run = (node, current_backward_pass())
        return None if region is None else region.repeat(run)


def _frame_of(hook: Any, depth: int = 1) -> Any:
    """The frame of the checkpointed region that a hook belongs to, if it does."""
    for cell in getattr(hook, "__closure__", None) or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not set yet
            continue
        held = held() if isinstance(held, weakref.ref) else held
        if depth and isinstance(held, FunctionType):  # what a decorator wraps
            held = _frame_of(held, depth - 1)
        if type(held).__name__ == "_CheckpointFrame":
            return held
    return None
