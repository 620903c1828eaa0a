"""Graph handles: a tensor that stands for a mask or a plan inside compiled graphs.

A graph takes tensors, not masks. Each mask carries a small tensor with a number of its own; a
graph reads the number when it runs, so that a new mask (documents of the next batch, say) runs in
the graph that was compiled for the first one.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict

import torch
from torch import Tensor

from flexcp.errors import FlexCPError

_numbers = itertools.count()
_alive: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
# A backward pass may run after the caller has dropped the mask.
_in_use: OrderedDict[int, object] = OrderedDict()
_MOST_IN_USE = 256


def new_graph_handle(owner: object) -> Tensor | None:
    """An int64 tensor of shape () from which `owner_of` finds the owner again.

    None inside a compiled graph: a mask that is made there is a constant of the graph.
    """
    if torch.compiler.is_compiling():
        return None
    number = next(_numbers)
    _alive[number] = owner
    return torch.tensor(number, device="cpu")


def owner_of(handle: Tensor) -> object:
    """What a handle stands for.

    >>> class Thing: pass
    >>> thing = Thing()
    >>> handle = new_graph_handle(thing)
    >>> handle is not None and owner_of(handle) is thing
    True
    """
    number = int(handle)
    owner = _in_use.get(number, _alive.get(number))
    if owner is None:
        raise FlexCPError(
            "a mask that still exists",
            f"the handle {number} of one that is gone",
            f"keep the mask until its backward pass is done (the last {_MOST_IN_USE} are kept)",
        )
    _in_use[number] = owner
    _in_use.move_to_end(number)
    while len(_in_use) > _MOST_IN_USE:
        _in_use.popitem(last=False)
    return owner
