"""Looks into functions that the code which torch.compile traces has made.

Transformers' mask functions are closures, made in every forward pass. Traced code can call them,
but not see what they capture. Dynamo knows: a question is asked of a copy of the function while
the graph is made, and the graph keeps the answer.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from flexcp.torch_names import cell_loader_of, constant_in_graphs, look_while_traced, variable_of

A = TypeVar("A")


class Unknown:
    """In place of a tensor: what is in it is known only when the graph runs."""


class _Asking(threading.local):
    """Holds an answer from one step of a trace to the next."""

    answer: Any = None


_asking = _Asking()


def asked_while_traced(
    question: Callable[[Any], A],  # noqa: ARG001
    function: Callable[..., Any],  # noqa: ARG001
) -> A | None:
    """The answer to a question about a function, as a constant of the graph that is being made.

    None if the function captures something that is neither a tensor nor known by now.

    Args:
        question: A function of some module. In what it is asked of, each tensor is an `Unknown`.
        function: What it is asked of.
    """
    look_while_traced(_ask)
    answer: A | None = _take_answer()[0]
    return answer


def _ask(seen: Any) -> None:
    question = seen.get_local("question", stacklevel=1).as_python_constant()
    variable = variable_of(seen.get_local("function", stacklevel=1))
    try:
        function = _outside_of_the_graph(variable, cell_loader_of(seen))
    except NotImplementedError:  # as dynamo says of what it doesn't know
        _asking.answer = None
    else:
        _asking.answer = question(function)


@constant_in_graphs
def _take_answer() -> tuple[Any]:
    answer, _asking.answer = _asking.answer, None
    return (answer,)


def _outside_of_the_graph(variable: Any, load_cell: Callable[[Any], Any]) -> Any:
    """The value of a variable of traced code."""
    variable = variable.realize()
    kind = variable.python_type()
    if issubclass(kind, Tensor):
        return Unknown()
    if kind in (tuple, list):
        return kind(_outside_of_the_graph(item, load_cell) for item in variable.items)
    closure = getattr(variable, "closure", None)
    if kind is not types.FunctionType or closure is None:
        return variable.as_python_constant()
    captured = [_outside_of_the_graph(load_cell(cell), load_cell) for cell in closure.items]
    return types.FunctionType(
        variable.get_code(), variable.get_globals(), closure=tuple(map(types.CellType, captured))
    )
