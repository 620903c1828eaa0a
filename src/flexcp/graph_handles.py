"""Graph handles: a tensor that stands for a mask or a plan inside compiled graphs.

A graph takes tensors, not masks. Each mask carries a small tensor with a number of its own; a
graph reads the number when it runs, so that a new mask (documents of the next batch, say) runs in
the graph that was compiled for the first one. What a graph saves for its backward pass is this
tensor, and as long as it is saved it holds the mask: nothing else keeps masks alive.
"""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor

from flexcp.eager import tensors_to_keep
from flexcp.errors import FlexCPError

_numbers = itertools.count()
_owners: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()


class GraphOwner:
    """What has a handle: a mask or a plan.

    The first graph of a function may be for one owner alone; the next one is for all others. Which
    of two graphs that both fit would run an owner depends on what ran before, and a checkpoint that
    runs it again has to keep what the first pass kept. So graphs for all ask for `own_graph`, which
    is part of what they fit, and an owner that has a graph goes on in that one.
    """

    own_graph: str = ""
    """Of which function there is a compiled graph for this owner alone: the last one's name."""

    def note_own_graph(self, function: str) -> None:
        """Notes that a graph of a function is for this owner alone."""
        object.__setattr__(self, "own_graph", function)


def new_graph_handle(owner: object) -> Tensor | None:
    """An int64 tensor of shape () from which `owner_of` finds the owner again.

    None inside a compiled graph: a mask that is made there is a constant of the graph.
    """
    return None if torch.compiler.is_compiling() else numbered_handle(owner)


def numbered_handle(owner: object) -> Tensor:
    """The handle of something that is always made outside of compiled graphs, as a plan is."""
    number = next(_numbers)
    _owners[number] = owner
    with tensors_to_keep():
        return torch.tensor(number, device="cpu")


def owner_of(handle: Tensor, *, keep: bool = False) -> object:
    """What a handle stands for.

    With `keep`, the owner lives at least as long as the handle: a backward pass may run after the
    caller has dropped the mask.

    >>> class Thing: pass
    >>> thing = Thing()
    >>> handle = new_graph_handle(thing)
    >>> handle is not None and owner_of(handle) is thing
    True
    """
    number = int(handle)
    owner = _owners.get(number)
    if owner is None:
        raise FlexCPError(
            "a mask that still exists",
            f"the handle {number} of one that is gone",
            "keep the mask until the backward pass of the compiled function is done",
        )
    if keep:
        handle.flexcp_owner = owner  # type: ignore[attr-defined]
    return owner


def constant_handle(owner: object) -> Tensor:
    """A handle that a graph keeps as a constant, together with what it stands for."""
    handle = numbered_handle(owner)
    owner_of(handle, keep=True)
    return handle


def require_compiled_for(what: str, compiled_for: int, found: int) -> None:
    """Raises if an owner has other sizes than a graph was told while it was made.

    >>> require_compiled_for("rows", 3, 3)
    """
    if found != compiled_for:
        raise FlexCPError(
            f"a plan with {compiled_for} {what}, as the compiled graph was made for",
            f"one with {found}",
            "call torch.compiler.reset(), and report this: graphs adapt to plans by themselves",
        )
