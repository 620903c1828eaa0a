"""MaskGraph: a mask_mod as a small graph of ATen operations, and its exact evaluation."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from flexcp.torch_names import OpOverload

INPUTS = ("b", "h", "q", "kv")
"""The four indices of a mask_mod, in argument order; also the names used in `Node.reads`."""

# Operations without the `pointwise` tag that nevertheless act on each element alone.
_ALSO_POINTWISE = frozenset(
    {
        "_to_copy", "alias", "clone", "detach", "floor_divide", "full_like", "lift_fresh",
        "lift_fresh_copy", "new_full", "new_ones", "new_zeros", "ones_like", "scalar_tensor",
        "zeros_like",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Ref:
    """An operand that is the result of another node."""

    node: int


@dataclass(frozen=True, eq=False)
class Node:
    """One step of a mask_mod, for a single (b, h, q, kv)."""

    op: Callable[..., Any] | None
    """The ATen operation; None for an input or a constant."""
    args: tuple[Any, ...]
    """Operands: `Ref`s, Python scalars, lists of them."""
    kwargs: Mapping[str, Any]
    """Keyword operands; a `Ref` stands for the result of another node."""
    value: Tensor | None
    """The captured tensor, for a constant."""
    reads: frozenset[str]
    """Which of the indices ("b", "h", "q", "kv") the result depends on."""
    dtype: torch.dtype
    """Type of the result."""
    compute_dtype: torch.dtype
    """Type that the operands are promoted to (differs from `dtype` for comparisons)."""
    shape: tuple[int, ...]
    """Shape of the result; () for the values that a mask_mod is made of."""

    @cached_property
    def name(self) -> str:
        """The operation without its overload: `ge`, `bitwise_and`, `index`, ..."""
        return op_name(self.op)

    @cached_property
    def operands(self) -> tuple[int, ...]:
        """Indices of the nodes that this one uses."""
        return tuple(_refs((self.args, tuple(self.kwargs.values()))))

    @property
    def is_constant(self) -> bool:
        """Whether this node is a captured tensor."""
        return self.value is not None


@dataclass(frozen=True, eq=False)
class MaskGraph:
    """What a mask_mod computes, as data.

    The first four nodes are the indices b, h, q and kv. Nodes are in execution order, and
    subexpressions that occur twice are one node.
    """

    nodes: tuple[Node, ...]
    output: int

    @property
    def reads(self) -> frozenset[str]:
        """Which indices the mask depends on: a mask that ignores b has one plane for all b."""
        return self.nodes[self.output].reads

    @cached_property
    def is_pointwise(self) -> bool:
        """Whether every step acts on each (b, h, q, kv) alone, so that indices may broadcast."""
        return self.is_pointwise_beyond((self.output,), ())

    def is_pointwise_beyond(self, wanted: Iterable[int], given: Container[int]) -> bool:
        """Whether the steps to some nodes, from nodes already known, act on each index alone."""
        needed = [self.nodes[index] for index in self.needed(wanted, given) if index not in given]
        return all(node.op is None or not node.reads or self._acts_alone(node) for node in needed)

    def _acts_alone(self, node: Node) -> bool:
        if node.shape != ():
            return False
        if node.name == "index":
            table, indices = self.nodes[node.args[0].node], node.args[1]
            return not table.reads and len(indices) == len(table.shape) and None not in indices
        tags = node.op.tags if isinstance(node.op, OpOverload) else ()
        return torch.Tag.pointwise in tags or node.name in _ALSO_POINTWISE

    def evaluate(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """The mask at index tensors that broadcast against each other, exactly.

        The result broadcasts to their common shape, but may be smaller: a causal mask does not
        depend on b.
        """
        return self.evaluate_nodes((self.output,), b, h, q, kv)[0]

    def evaluate_nodes(
        self,
        wanted: tuple[int, ...],
        b: Tensor,
        h: Tensor,
        q: Tensor,
        kv: Tensor,
        given: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> tuple[Tensor, ...]:
        """Like `evaluate`, for any nodes of the graph.

        Nodes that are `given` are not computed again; the steps beyond them must be pointwise.
        """
        inputs = (b, h, q, kv)
        if not given and not self.is_pointwise:
            return self._run_each_alone(wanted, inputs)
        known = dict(enumerate(inputs)) | dict(given)
        found = self._run(wanted, {i: _with_dimension(x) for i, x in known.items()}, scalar=False)
        if all(x.dim() == 0 for x in inputs):
            return tuple(x.reshape(()) for x in found)
        return found

    def _run(
        self, wanted: tuple[int, ...], known: dict[int, Tensor], *, scalar: bool
    ) -> tuple[Tensor, ...]:
        """The wanted nodes from known ones; `scalar` if these have no dimensions."""
        values = dict(known)
        for index in self.needed(wanted, known):
            node = self.nodes[index]
            if index in values:
                continue
            if node.value is not None:
                values[index] = node.value
            else:
                assert node.op is not None
                args = _substitute(node.args, values)
                kwargs = {k: _substitute(v, values) for k, v in node.kwargs.items()}
                values[index] = _lookup(*args) if node.name == "index" else node.op(*args, **kwargs)
            if not scalar:
                values[index] = _with_dimension(values[index])
        return tuple(values[index] for index in wanted)

    def _run_each_alone(
        self, wanted: tuple[int, ...], inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Maps over every dimension, leaving each step the scalars that it was written for."""
        rank = max(x.dim() for x in inputs)
        inputs = tuple(x.reshape((1,) * (rank - x.dim()) + tuple(x.shape)) for x in inputs)
        used = [name in self.reads_of(wanted) for name in INPUTS]

        def mapped(*some: Tensor) -> tuple[Tensor, ...]:
            return self._run(wanted, dict(enumerate(some)), scalar=True)

        shape = []
        for dim in reversed(range(rank)):
            varies = [use and x.shape[dim] > 1 for x, use in zip(inputs, used, strict=True)]
            sizes = [x.shape[dim] for x, v in zip(inputs, varies, strict=True) if v]
            shape.append(sizes[0] if sizes else 1)
            if sizes:
                mapped = torch.vmap(mapped, in_dims=tuple(0 if v else None for v in varies))
        scalars = []
        for position, (x, use) in enumerate(zip(inputs, used, strict=True)):
            kept = [slice(None) if use and x.shape[dim] > 1 else 0 for dim in range(rank)]
            alone = x[tuple(kept)]
            if use and alone.dim() == 0:
                # An index that is not mapped would be promoted as a mere number.
                alone = alone[None]
                mapped = torch.vmap(
                    mapped, in_dims=tuple(0 if n == position else None for n in range(len(INPUTS)))
                )
            scalars.append(alone)
        return tuple(found.reshape(shape[::-1]) for found in mapped(*scalars))

    def needed(self, wanted: Iterable[int], known: Container[int] = ()) -> list[int]:
        """The nodes that these depend on, themselves included, in execution order.

        What leads to `known` nodes is left out.
        """
        found: set[int] = set()
        pending = list(wanted)
        while pending:
            index = pending.pop()
            if index not in found:
                found.add(index)
                if index not in known:
                    pending.extend(self.nodes[index].operands)
        return sorted(found)

    def expression(self, index: int, axis: str) -> Hashable:
        """What a node computes from one axis, the same for both axes if they are treated alike."""
        node = self.nodes[index]
        if node.op is None:
            return "position" if node.reads == {axis} else index
        return (
            node.op,
            frozen(node.args, lambda ref: self.expression(ref.node, axis)),
            frozen(tuple(node.kwargs.items()), lambda ref: self.expression(ref.node, axis)),
        )

    def reads_of(self, wanted: Iterable[int]) -> frozenset[str]:
        """The indices that any of these nodes depends on."""
        return frozenset().union(*(self.nodes[index].reads for index in wanted))


def op_name(op: object) -> str:
    """An ATen operation's name without namespace and overload; "" for anything else."""
    if isinstance(op, OpOverload):
        return str(op._schema.name).removeprefix("aten::")
    return ""


def _refs(value: Any) -> Iterable[int]:
    if isinstance(value, Ref):
        yield value.node
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _refs(item)


def reads_of(value: Any, nodes: Sequence[Node]) -> frozenset[str]:
    """The inputs that operands depend on."""
    return frozenset().union(*(nodes[i].reads for i in _refs(value)))


def _with_dimension(x: Tensor) -> Tensor:
    """Where some tensors have dimensions, all must: in promotion they outrank those without."""
    return x.unsqueeze(0) if x.dim() == 0 else x


def _lookup(table: Tensor, indices: list[Tensor | None]) -> Tensor:
    """`table[indices]`."""
    index = indices[0]
    if table.dim() == 1 and index is not None and index.dtype == torch.int64:
        # Indexing waits for all of torch's threads even when it has little to do; this does not.
        # It knows no negative indices, though.
        try:
            return table.index_select(0, index.reshape(-1)).view(index.shape)
        except (IndexError, RuntimeError):
            pass
    found: Tensor = torch.ops.aten.index.Tensor(table, indices)
    return found


def frozen(value: Any, of_ref: Callable[[Ref], Hashable]) -> Hashable:
    """Operands as something that can be a dictionary's key."""
    if isinstance(value, Ref):
        return of_ref(value)
    if isinstance(value, (tuple, list)):
        return tuple(frozen(item, of_ref) for item in value)
    # 1, 1.0 and True are equal in Python but not in arithmetic.
    return (type(value), value)


def _substitute(value: Any, values: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Ref):
        return values[value.node]
    if isinstance(value, (tuple, list)):
        return type(value)(_substitute(item, values) for item in value)
    return value
