"""ScoreGraph: what a score_mod does to one score, as a small graph of ATen operations.

It is written down while the function is examined (`score.py`), and read by those who compile it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flexcp.masks.graph import Node, Ref, reads_of
from flexcp.torch_names import OpOverload

SCORE_INPUTS = ("score", "b", "h", "q", "kv")
"""The arguments of a score_mod, in order; also the names used in `Node.reads`."""


@dataclass(frozen=True, eq=False)
class ScoreGraph:
    """What a score_mod computes, as data: steps that act on each score alone.

    The first five nodes are its arguments. A node with a `value` is a tensor that depends on none
    of them: one that the function captures, or what it made of such; `op` and `args` then say how
    it was made, if the function made it.
    """

    nodes: tuple[Node, ...]
    output: int

    def needed(self) -> list[int]:
        """The nodes that the result depends on, in the order in which they were computed."""
        found: set[int] = set()
        pending = [self.output]
        while pending:
            index = pending.pop()
            if index not in found:
                found.add(index)
                if self.nodes[index].value is None:
                    pending.extend(self.nodes[index].operands)
        return sorted(found)


class ScoreRecorder:
    """Writes a graph down while a function runs: which operation, on which earlier results."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.nodes = [
            Node(None, (), {}, None, frozenset({name}), x.dtype, x.dtype, tuple(x.shape))
            for name, x in zip(SCORE_INPUTS, inputs, strict=True)
        ]
        self._node_of = {id(x): i for i, x in enumerate(inputs)}
        self._made_by: dict[int, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        self._keep: list[Tensor] = [*inputs]  # so that no id is used twice

    def add(self, op: OpOverload, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Notes an operation on what depends on the arguments."""
        references = tuple(self._reference(x) for x in args)
        named = {name: self._reference(x) for name, x in kwargs.items()}
        reads = reads_of((references, tuple(named.values())), self.nodes)
        for made in [result] if isinstance(result, Tensor) else result:
            node = Node(op, references, named, None, reads, made.dtype, made.dtype, ())
            self.nodes.append(node)
            self._node_of[id(made)] = len(self.nodes) - 1
            self._keep.append(made)

    def add_constant(self, op: OpOverload, args: Any, result: Any) -> None:
        """Notes how a tensor was made that depends on none of the arguments."""
        if isinstance(result, Tensor):
            self._made_by[id(result)] = (op, tuple(args))
            self._keep.append(result)

    def finish(self, result: object) -> ScoreGraph | None:
        """The graph of a result; None if it is not a tensor."""
        if not isinstance(result, Tensor):
            return None
        output = self._reference(result)
        return ScoreGraph(tuple(self.nodes), output.node)

    def _reference(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self._node_of:
                op, args = self._made_by.get(id(value), (None, ()))
                of = value.dtype
                node = Node(op, args, {}, value, frozenset(), of, of, tuple(value.shape))
                self.nodes.append(node)
                self._node_of[id(value)] = len(self.nodes) - 1
                self._keep.append(value)
            return Ref(self._node_of[id(value)])
        if isinstance(value, (tuple, list)):
            return [self._reference(item) for item in value]
        return value
