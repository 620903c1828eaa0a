"""The emitter: from the graph of a score function to Triton source, for its value and gradients.

The source has a function `score` of (s, b, h, q, k, given) that gives the score to use, `pull_back`
that gives the gradient of s from that of the result, and for each number that is read from a tensor
with a gradient a `pull_0`, `pull_1`, ... that gives the number's gradient, and an `element_0`, ...
that says which element of the tensor it is; one past the last for none. `owner_0` and `inner_0` say
the same in two numbers: where it is along the dimensions that no query or key is an index of, and
where along the others; below 0 for none.
s is a tile of products of queries and keys; b and h are numbers, q and k a row and a column of
positions, or a column and a row. `given` is a tuple that a kernel passes on: see `launch.py`.

Sizes, strides and contents of tensors are no part of the source, so that one compilation serves
all. An index outside of its tensor makes the score NaN, and reads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flexcp.kernels.merge import accumulation_dtype
from flexcp.kernels.score import ScoreLike, ScoreMod, examine
from flexcp.kernels.score_graph import SCORE_INPUTS, ScoreGraph
from flexcp.kernels.triton.activations import write_activation
from flexcp.kernels.triton.derivatives import pulled_back
from flexcp.kernels.triton.pointwise import ScoreStep, write
from flexcp.kernels.triton.terms import (
    LARGEST_POSITION,
    Term,
    UnknownStepError,
    kind_of,
    looked_up,
    number,
)
from flexcp.masks.graph import Node, Ref
from flexcp.torch_names import OpOverload, is_transformed

FIRST_OPERAND = 5
"""Where the tensors begin in `given`: after positions of queries and keys, the first batch element
and head, and the scale."""

_HEADER = """\
import triton
import triton.language as tl
from flexcp.kernels.triton.score_steps import (
    counted_from_end, floor_divided, log1p, powered, remainder, sigmoid, sign, tanh, truncated,
    unpacked,
)
"""
_WITHOUT_SCORE = "b, h, q, k, given"
_ARGUMENTS = f"s, {_WITHOUT_SCORE}"
_BEGIN = (
    "s = s * given[4]",
    "b = (b + unpacked(given[2])).to(tl.int32)",
    "h = (h + unpacked(given[3])).to(tl.int32)",
)
_OTHER_NAMES = {"__rshift__": "bitwise_right_shift"}
_NAMES = re.compile(r"[a-z]\w*")


LookupKind = Literal["row", "pair", "table"]


@dataclass(frozen=True)
class Lookup:
    """A number that is read from a tensor with a gradient."""

    operand: int
    """Which of the tensors."""
    number: int
    """`pull_<number>` gives its gradient, `element_<number>` says which element it is."""
    reads: frozenset[str]
    """Which of b, h, q and kv say which element it is."""
    inner: tuple[int, ...]
    """The dimensions of which a query or a key is part of the index."""
    plain: frozenset[str]
    """Which of b, h, q and kv are an index as they are, or with a constant added."""

    @property
    def kind(self) -> LookupKind:
        """How the gradients of what was read are added up: see `captured.py`."""
        if "kv" not in self.reads:
            return "row"
        return "pair" if {"q", "kv"} <= self.plain else "table"


@dataclass(frozen=True, eq=False)
class EmittedScore:
    """A score function as Triton source."""

    source: str
    operands: tuple[Tensor, ...]
    """The tensors that it reads, in the order of `given`: each with its strides and sizes."""
    lookups: tuple[Lookup, ...]
    """What has a gradient."""


_emitted: WeakKeyDictionary[ScoreGraph, EmittedScore | str] = WeakKeyDictionary()


def emitted(mod: ScoreMod) -> EmittedScore | str:
    """A score function in Triton; or, in words, what about it can't be written so.

    >>> from flexcp.kernels.score import examine
    >>> given = torch.float32, torch.device("cpu")
    >>> capped = emitted(examine(lambda s, b, h, q, k: 20 * torch.tanh(s / 20), *given))
    >>> "tanh" in capped.source
    True
    >>> emitted(examine(lambda s, b, h, q, k: torch.special.i0(s), *given))
    "the operation 'i0'"
    """
    if mod.graph is None or mod.unlike is not None:
        return mod.unlike or "steps that do not act on each score alone"
    found = _emitted.get(mod.graph)
    if found is None:
        try:
            found = _Emitter(mod.graph).emit()
        except UnknownStepError as unknown:
            found = str(unknown)
        _emitted[mod.graph] = found
    return found


def unknown_step(score_mod: ScoreLike, dtype: torch.dtype, device: torch.device) -> str | None:
    """What of a score function can't be written in Triton; None if all of it can.

    `dtype` and `device` are those of the queries.
    """
    if score_mod is None or score_mod is False:
        return None
    if score_mod is True:
        return "steps that were not looked at"
    if not isinstance(score_mod, ScoreMod):
        try:
            score_mod = examine(score_mod, accumulation_dtype(dtype), device)
        except Exception as error:  # whatever it does, it can't be written out
            return f"a step that fails ({type(error).__name__}: {error})"
    found = emitted(score_mod)
    return found if isinstance(found, str) else None


@dataclass(frozen=True)
class _Read:
    """What was read from an operand: source for which element it is, as the functions say it."""

    operand: int
    element: str = "0"
    owner: str = "tl.full([], 0, tl.int64)"
    inner: str = "0"
    inner_dims: tuple[int, ...] = ()
    plain: frozenset[str] = frozenset()


@dataclass
class _Emitter:
    """Writes a graph out, node by node."""

    graph: ScoreGraph
    lines: list[str] = field(default_factory=list)
    terms: dict[int, Term] = field(default_factory=dict)
    steps: dict[int, ScoreStep] = field(default_factory=dict)
    operands: list[Tensor] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    """Where a tensor's pointer is in `given`, by its id."""
    inside: dict[int, str] = field(default_factory=dict)
    """Whether the indices of a lookup are inside of its tensor."""
    read: dict[int, _Read] = field(default_factory=dict)
    """Of each number that has a gradient: which element of which operand it is."""
    refs: dict[int, list[int | None]] = field(default_factory=dict)
    """Which node each operand of a step is, if it is one."""

    def emit(self) -> EmittedScore:
        """The source, with what a kernel passes to it."""
        self._refuse_aliases()
        for index in self.graph.needed():
            self._add(index, self.graph.nodes[index])
        result = self.terms[self.graph.output]
        value = result.as_float
        if "score" not in self.graph.nodes[self.graph.output].reads:
            value = f"({value} + tl.zeros_like(s))"
        if self.inside:
            value = f'tl.where({" & ".join(self.inside.values())}, {value}, float("nan"))'
        parts = [_HEADER, self._function("score", _ARGUMENTS, [], value)]
        lines, of_score = self._gradient(0)
        found = "tl.zeros_like(g)" if of_score is None else f"g * {of_score}"
        parts.append(self._function("pull_back", f"g, {_ARGUMENTS}", lines, found))
        lookups: list[Lookup] = []
        for index, read in self.read.items():
            lines, of_number = self._gradient(index)
            if of_number is None:
                continue
            reads, i = self.graph.nodes[index].reads, len(lookups)
            if "score" in reads:
                raise UnknownStepError("a gradient for a tensor that is looked up by a score")
            element, inner = read.element, f"({read.inner}).to(tl.int32)"
            if index in self.inside:
                nowhere = f"n{self._place(self.operands[read.operand]) + 1}"
                element = f"tl.where({self.inside[index]}, {element}, {nowhere})"
                inner = f"tl.where({self.inside[index]}, {inner}, -1)"
            parts.append(self._function(f"pull_{i}", f"g, {_ARGUMENTS}", lines, f"g * {of_number}"))
            places = {"element": element, "owner": read.owner}
            if read.inner_dims:
                places["inner"] = inner
            for name, text in places.items():
                parts.append(self._function(f"{name}_{i}", _WITHOUT_SCORE, [], text))
            lookups.append(Lookup(read.operand, i, reads, read.inner_dims, read.plain))
        return EmittedScore("\n\n".join(parts), tuple(self.operands), tuple(lookups))

    def _function(self, name: str, arguments: str, lines: list[str], result: str) -> str:
        used, kept = set(_NAMES.findall(result)), [f"return {result}"]
        for line in reversed([*_BEGIN, *self.lines, *lines]):
            target, _, text = line.partition(" = ")
            if target in used:
                used.update(_NAMES.findall(text))
                kept.append(line)
        body = "".join(f"    {line}\n" for line in reversed(kept))
        return f"@triton.jit\ndef {name}({arguments}):\n{body}"

    def _add(self, index: int, node: Node) -> None:
        """Writes a node out."""
        if node.value is not None:
            self._add_constant(index, node)
            return
        if node.op is None:
            name = dict(zip(SCORE_INPUTS, "sbhqk", strict=True))[SCORE_INPUTS[index]]
            term = Term(name, "int", 0, LARGEST_POSITION) if index else Term(name, "float")
            self.terms[index] = term
            return
        if node.name == "index":
            self._add_lookup(index, node)
            return
        operands = [self._operand(x) for x in node.args]
        options = {name: self._operand(x) for name, x in node.kwargs.items()}
        name = _OTHER_NAMES.get(node.name) or node.name.rstrip("_")  # x.add_(1) is x + 1
        self.steps[index] = ScoreStep(name, operands, options, node.dtype)
        self.refs[index] = [x.node if isinstance(x, Ref) else None for x in node.args]
        self._define(index, write_activation(self.steps[index]) or write(self.steps[index]))

    def _operand(self, value: Any) -> Any:
        if isinstance(value, Ref):
            if value.node not in self.terms:
                shape = self.graph.nodes[value.node].shape
                raise UnknownStepError(f"a tensor of shape {tuple(shape)} that is not looked up")
            return self.terms[value.node]
        is_number = isinstance(value, (bool, int, float))
        return number(value) if is_number else value

    def _define(self, index: int, term: Term) -> None:
        """Gives a term a name, so that it is computed once."""
        if not term.is_literal and not term.text.isidentifier():
            self.lines.append(f"x{index} = {term.text}")
            term = Term(f"x{index}", term.kind, term.low, term.high)
        self.terms[index] = term

    def _add_constant(self, index: int, node: Node) -> None:
        """A number that the function captures; tensors with more are for lookups."""
        value = node.value
        assert value is not None
        literal = {"scalar_tensor": 0, "full": 1}.get(node.name)
        if literal is not None and isinstance(node.args[literal], (bool, int, float)):
            self.terms[index] = number(node.args[literal], kind_of(value.dtype))
        elif value.numel() == 1:
            place = self._place(value)
            self._define(index, looked_up(f"tl.load(given[{place}])", value.dtype))
            if value.requires_grad:
                self.read[index] = _Read(self._number_of(value))

    def _add_lookup(self, index: int, node: Node) -> None:
        table = self.graph.nodes[node.args[0].node].value
        if table is None:
            raise UnknownStepError("a lookup in a tensor that depends on the score")
        place = self._place(table)
        address = f"given[{place}]"
        tests: list[str] = []
        owned: list[str] = []
        at = [f"i{index}_{dim}" for dim in range(len(node.args[1]))]
        inner = tuple(d for d, x in enumerate(node.args[1]) if self._is_of_pairs(x.node))
        for dim, ref in enumerate(node.args[1]):
            if self.graph.nodes[ref.node].dtype == torch.uint8:
                raise UnknownStepError("a lookup by an index of type torch.uint8")
            stride, size = (f"n{place + 2 + 2 * dim + i}" for i in range(2))
            term = self._operand(ref).as_whole
            text = f"({term.widened()} + 0)" if term.is_literal else term.widened()
            own = [f"({at[dim]} < {size})"]
            if term.low < 0:
                text = f"counted_from_end({text}, {size})"
                own.append(f"({at[dim]} >= 0)")
            self.lines.append(f"{at[dim]} = {text}")
            tests += own
            owned += () if dim in inner else own
            address += f" + {at[dim]} * {stride}"
        self.inside[index] = f"in{index}"
        self.lines.append(f"in{index} = {_all_of(tests)}")
        read = f"tl.load({address}, mask=in{index}, other=0)"
        self._define(index, looked_up(read, table.dtype))
        if table.requires_grad:
            sizes = [f"n{place + 3 + 2 * dim}" for dim in range(len(at))]
            outer = [dim for dim in range(len(at)) if dim not in inner]
            numbered = {dims: _numbered(at, sizes, dims) for dims in (tuple(outer), inner)}
            owner = f"tl.where({_all_of(owned)}, {numbered[tuple(outer)]}, -1)" if outer else ""
            self.read[index] = _Read(
                self._number_of(table),
                _numbered(at, sizes, range(len(at))),
                owner or _Read.owner,
                numbered[inner],
                inner,
                frozenset(filter(None, (self._plain(x.node) for x in node.args[1]))),
            )

    def _is_of_pairs(self, index: int) -> bool:
        """Whether a node depends on the query or the key."""
        return not self.graph.nodes[index].reads.isdisjoint(("q", "kv"))

    def _plain(self, index: int) -> str | None:
        """The argument that a node is, or is with a constant added that is not negative."""
        node = self.graph.nodes[index]
        if node.op is None and node.value is None:
            return SCORE_INPUTS[index]
        if node.name not in ("add", "alias", "clone") or "alpha" in node.kwargs:
            return None
        *refs, constant = node.args if node.name == "add" else (*node.args, 0)
        is_shift = type(constant) is int and constant >= 0 and isinstance(refs[0], Ref)
        return self._plain(refs[0].node) if len(refs) == 1 and is_shift else None

    def _place(self, tensor: Tensor) -> int:
        """Where a tensor is in `given`: its pointer, how many elements, strides and sizes."""
        if id(tensor) not in self.places:
            _require_readable(tensor)
            place = FIRST_OPERAND + sum(2 + 2 * x.dim() for x in self.operands)
            for i in range(place + 1, place + 2 + 2 * tensor.dim()):
                self.lines.append(f"n{i} = unpacked(given[{i}])")
            self.places[id(tensor)] = place
            self.operands.append(tensor)
        return self.places[id(tensor)]

    def _number_of(self, tensor: Tensor) -> int:
        return next(i for i, x in enumerate(self.operands) if x is tensor)

    def _refuse_aliases(self) -> None:
        """What is changed in place must have but one name."""
        nodes = [node for node in self.graph.nodes if node.op is not None]
        changes = (isinstance(x.op, OpOverload) and x.op._schema.is_mutable for x in nodes)
        if any(changes) and any(node.name in ("alias", "detach", "lift_fresh") for node in nodes):
            raise UnknownStepError("a change in place of what may have a second name")

    def _gradient(self, leaf: int) -> tuple[list[str], str | None]:
        """Source for the derivative of the result by a node, and the lines that lead to it."""
        order = self.graph.needed()
        active = {leaf}
        for index in order:
            known = (x for x in self.refs.get(index, ()) if x in active)
            if any(True for _ in known) and self.terms[index].kind == "float":
                active.add(index)
        lines: list[str] = []
        gradients: dict[int, list[str]] = {self.graph.output: ["1.0"]}
        for index in reversed(order):
            if index not in active or index not in gradients:
                continue
            total = " + ".join(gradients[index])
            if index == leaf:
                return lines, f"({total})"
            if total != "1.0" and not total.isidentifier():
                lines.append(f"d{index} = {total}")
                total = f"d{index}"
            found = pulled_back(self.steps[index], self.terms[index].text, total)
            for operand, gradient in zip(self.refs[index], found, strict=True):
                if operand in active and gradient is not None:
                    gradients.setdefault(operand, []).append(gradient)
        return lines, None


def _all_of(tests: Sequence[str]) -> str:
    # Triton's interpreter makes a truth value for a tile and a number other than for tiles.
    return tests[0] if len(tests) == 1 else f"({' & '.join(tests)}) != 0"


def _numbered(at: Sequence[str], sizes: Sequence[str], dims: Sequence[int]) -> str:
    """Source for the number of an element among those along some dimensions, row by row."""
    number = "0"
    for i, dim in enumerate(dims):
        number = f"({number} * {sizes[dim]} + {at[dim]})" if i else at[dim]
    return number


def _require_readable(tensor: Tensor) -> None:
    """Raises unless a kernel can read a tensor by its address."""
    kind_of(tensor.dtype)
    plain = type(tensor) in (Tensor, torch.nn.Parameter) or type(tensor).__name__ == "FakeTensor"
    if not plain or is_transformed(tensor):
        raise UnknownStepError(f"a captured tensor of type {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnknownStepError("a captured tensor that is sparse or quantized")
