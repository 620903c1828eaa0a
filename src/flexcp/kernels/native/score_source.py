"""Score functions in C++, from the lines that the Triton emitter writes.

What the emitter writes is Python's grammar: names, calls, signs and comparisons. Here they are read
by Python's own parser and written as calls of `score_steps.h`, where each step is known for numbers
and for vectors. So there is one emitter, with one set of rules for values and for derivatives.

What a line depends on says how often it is computed: once for a tile, a row or a column; for each
distance between query and key, where positions count up and nothing else is asked of them; or for
each pair. Numbers that the function was written with are data, as captured tensors are: a step
with other ones compiles nothing.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from flexcp.kernels.native.score_frame import (
    ARGUMENTS,
    ENTRIES,
    FOUND,
    FUNCTION,
    INDENT,
    STORED,
    SUMS,
    Stage,
)
from flexcp.kernels.triton.emit import FIRST_OPERAND, EmittedScore
from flexcp.kernels.triton.terms import UnknownStepError

_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "step::Bfloat16",
    torch.float16: "_Float16",
    torch.bool: "uint8_t",
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
}
_OPERATIONS: dict[type[ast.operator], str] = {
    ast.Add: "plus",
    ast.Sub: "minus",
    ast.Mult: "times",
    ast.Div: "over",
    ast.BitAnd: "bits_and",
    ast.BitOr: "bits_or",
    ast.BitXor: "bits_xor",
}
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
}
_CONVERSIONS = {
    "float32": "to_float",
    "bfloat16": "to_bfloat16",
    "float16": "to_float16",
    "int32": "to_int32",
    "int64": "to_int64",
}
_BY_CONSTANT = frozenset({"floor_divided", "remainder"})
_STEPS = frozenset(
    {
        "abs", "ceil", "cos", "counted_from_end", "erf", "exp", "exp2", "floor", "log", "log1p",
        "log2", "maximum", "minimum", "powered", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "tanh",
        "truncated", "where",
    }
)  # fmt: skip
"""What has the same name in `score_steps.h`."""
_WRITTEN_OUT = (-1, 0, 1, 2, 0.5)
"""Numbers that are part of the source: formulas have them, and they make it simpler."""
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class ScoreSource:
    """A score function as C++ source, and the numbers that are no part of it."""

    text: str
    whole: tuple[int, ...]
    real: tuple[float, ...]


@dataclass(frozen=True)
class _Value:
    """An expression: C++ source for it, and what it depends on."""

    text: str
    reads: frozenset[str] = frozenset()
    """Which of s, g, b, h, q and k."""
    relative: bool = False
    """Whether it depends on q and k by their distance alone."""
    plain: bool = False
    """Whether it is a name or a number."""

    @property
    def stage(self) -> Stage:
        """How often it has to be computed."""
        at = self.reads & {"q", "k"}
        if not self.reads.isdisjoint(("s", "g")):
            return "pair"
        if len(at) == 2:
            return "distance" if self.relative else "pair"
        return "tile" if not at else "row" if "q" in at else "column"


def score_source(emitted: EmittedScore, tile: int) -> ScoreSource | str:
    """A score function in C++, for tiles of some size; or, in words, what can't be written so."""
    at, types = FIRST_OPERAND, list[tuple[int, torch.dtype]]()
    for x in emitted.operands:
        types.append((at, x.dtype))
        at += 2 + 2 * x.dim()
    return _written(emitted.source, tuple(types), len(emitted.lookups), tile)


@lru_cache(maxsize=256)
def _written(
    source: str, types: tuple[tuple[int, torch.dtype], ...], lookups: int, tile: int
) -> ScoreSource | str:
    functions = {
        node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)
    }
    numbers = _Numbers()
    parts = ['#include "score_math.h"', f"constexpr int TILE = {tile};"]
    try:
        for name in ("score", "pull_back"):
            parts.append(_Writer(dict(types), numbers).function(name, functions[name]))
        for i in range(lookups):
            found = (functions[f"{name}_{i}"] for name in ("pull", "element"))
            parts.append(_Writer(dict(types), numbers).sums(f"sums_{i}", *found))
    except UnknownStepError as unknown:
        return str(unknown)
    calls = "".join(
        f"    (tile->consecutive ? sums_{i}<true> : sums_{i}<false>)"
        f"(*tile, scores, gradients, sums + tile->sums_at[{i}]);\n"
        for i in range(lookups)
    )
    parts.append(ENTRIES.replace("CALLS;\n", calls))
    return ScoreSource("\n\n".join(parts) + "\n", tuple(numbers.whole), tuple(numbers.real))


@dataclass
class _Numbers:
    """Numbers that functions were written with, in the order of their use."""

    whole: list[int] = field(default_factory=list)
    real: list[float] = field(default_factory=list)


@dataclass
class _Writer:
    """Writes one function out."""

    types: dict[int, torch.dtype]
    """Of tensors, by where they are in `given`."""
    numbers: _Numbers
    names: dict[str, _Value] = field(default_factory=dict)
    lines: dict[Stage, list[str]] = field(default_factory=dict)
    wanted: dict[Stage, dict[str, None]] = field(
        default_factory=lambda: {"column": {}, "distance": {}}
    )
    """Names of columns and distances that pairs use."""
    made: int = 0

    def function(self, name: str, node: ast.FunctionDef) -> str:
        """The C++ function for `score` or `pull_back`."""
        result = self._used_by(self._body(node), "pair")
        return self._framed(name, {"end_pair": STORED}, result=result)

    def sums(self, name: str, pull: ast.FunctionDef, element: ast.FunctionDef) -> str:
        """The C++ function that adds up the gradients of a lookup by element."""
        result = self._used_by(self._body(pull), "pair")
        value = self._body(element)
        stage = "row" if value.stage == "tile" else value.stage
        parts = {**SUMS[stage], "end_pair": FOUND + SUMS[stage]["end_pair"]}
        return self._framed(name, parts, result=result, element=self._used_by(value, "pair"))

    def _body(self, node: ast.FunctionDef) -> _Value:
        """What one of the emitter's functions returns; its lines are written where they belong."""
        if not self.names:
            self.lines = {stage: [] for stage in ("tile", "row", "column", "distance", "pair")}
            for arg in "sgbhqk":
                self.names[arg] = _Value(arg, frozenset(arg), plain=True)
        *steps, last = node.body
        for line in steps:
            assert isinstance(line, ast.Assign)
            assert isinstance(line.targets[0], ast.Name)
            target = line.targets[0].id
            if target not in self.names:  # s is scaled by the kernel, b and h are numbered already
                self._define(target, self._value(line.value))
        assert isinstance(last, ast.Return)
        assert last.value is not None
        return self._value(last.value)

    def _framed(self, name: str, parts: dict[str, str], **values: str) -> str:
        """The function with its loops, and what stands at their beginnings and ends."""
        columns, distances = (", ".join(self.wanted[x]) for x in ("column", "distance"))
        values |= {"columns": columns, "distances": distances}
        bound = "            const {} [{}] = {};\n"
        diagonal = "CONSECUTIVE ? diagonals.at(r, j) : of_distance(q, k)"
        return FUNCTION.format(
            name=name,
            arguments=ARGUMENTS[name.rstrip("_0123456789")],
            bound_columns=bound.format("auto&", columns, "columns[j / WIDTH]") if columns else "",
            bound_distances=bound.format("auto", distances, diagonal) if distances else "",
            **values,
            **{
                place: parts.get(place, "").format(**values)
                for place in ("begin", "begin_row", "end_pair", "end_row", "end")
            },
            **{
                f"of_{stage}": "".join(f"{' ' * INDENT[stage]}{line}\n" for line in lines)
                for stage, lines in self.lines.items()
            },
        )

    def _define(self, name: str, value: _Value) -> _Value:
        self.lines[value.stage].append(f"const auto {name} = {value.text};")
        self.names[name] = _Value(name, value.reads, value.relative, plain=True)
        return self.names[name]

    def _used_by(self, value: _Value, stage: Stage) -> str:
        """The source for an operand in what is computed at a stage: its name, if that is another.

        What is computed less often gets one.
        """
        own = value.stage
        if own == stage:
            return value.text
        if not value.plain:
            self.made += 1
            value = self._define(f"y{self.made}", value)
        if own in self.wanted and value.text not in ("q", "k"):
            self.wanted[own][value.text] = None
        return value.text

    def _made_of(self, text: str, *operands: _Value, relative: bool = False) -> _Value:
        """An expression with a place {0}, {1}, ... for each operand."""
        reads = frozenset[str]().union(*(x.reads for x in operands))
        at = [x for x in operands if x.reads & {"q", "k"}]
        relative = relative or (bool(at) and all(x.relative for x in at))
        stage = _Value("", reads, relative).stage
        return _Value(text.format(*(self._used_by(x, stage) for x in operands)), reads, relative)

    def _value(self, node: ast.expr) -> _Value:
        match node:
            case ast.Name(name):
                return self.names[name]
            case ast.Constant(value):
                return self._number(value)
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
                return self._number(-value)
            case ast.UnaryOp(ast.USub(), operand):
                return self._made_of("(-{0})", self._value(operand))
            case ast.Compare(left, [sign], [right]):
                name = _COMPARISONS[type(sign)]
                return self._made_of(
                    f"step::{name}({{0}}, {{1}})", self._value(left), self._value(right)
                )
            case ast.BinOp(left, sign, right):
                return self._operation(left, sign, right)
            case ast.Call(ast.Attribute(operand, "to"), [ast.Attribute(_, kind)]):
                return self._made_of(f"step::{_CONVERSIONS[kind]}({{0}})", self._value(operand))
            case ast.Call(ast.Attribute(ast.Name("tl"), name) | ast.Name(name), args, keywords):
                return self._call(name, args, keywords)
        raise UnknownStepError(f"the step {ast.unparse(node)!r}")

    def _number(self, value: object) -> _Value:
        """A number: written out, or read with the others."""
        if isinstance(value, bool):
            return _Value("true" if value else "false", plain=True)
        assert isinstance(value, (int, float))
        if value in _WRITTEN_OUT:
            return _Value(f"({value!r}f)" if isinstance(value, float) else f"({value})", plain=True)
        if isinstance(value, float):
            self.numbers.real.append(value)
            return _Value(f"tile.real[{len(self.numbers.real) - 1}]", plain=True)
        self.numbers.whole.append(value)
        text = f"tile.whole[{len(self.numbers.whole) - 1}]"
        if abs(value) <= _LARGEST:
            text = f"static_cast<int32_t>({text})"
        return _Value(text, plain=True)

    def _operation(self, left: ast.expr, sign: ast.operator, right: ast.expr) -> _Value:
        if isinstance(sign, (ast.FloorDiv, ast.Mod, ast.RShift)):
            if isinstance(sign, ast.RShift):  # by a number that the emitter has looked at
                return self._made_of(f"({{0}} >> {ast.unparse(right)})", self._value(left))
            by = _divisor(right)
            name = "divided" if isinstance(sign, ast.FloorDiv) else "rest"
            return self._made_of(f"step::{name}<{by}>({{0}})", self._value(left))
        a, b = self._value(left), self._value(right)
        is_distance = isinstance(sign, ast.Sub) and {a.text, b.text} == {"q", "k"}
        text = f"step::{_OPERATIONS[type(sign)]}({{0}}, {{1}})"
        return self._made_of(text, a, b, relative=is_distance)

    def _call(self, name: str, args: list[ast.expr], keywords: list[ast.keyword]) -> _Value:
        if name == "load":
            return self._read(args[0], {x.arg: x.value for x in keywords})
        if name == "float":
            assert isinstance(args[0], ast.Constant)
            shown = {"nan": "NAN", "inf": "INFINITY", "-inf": "(-INFINITY)"}
            return _Value(shown[str(args[0].value)], plain=True)
        if name == "unpacked":
            return _Value(f"given[{_place(args[0])}]", plain=True)
        if name == "zeros_like":
            return _Value("Vec{}", self._value(args[0]).reads)
        if name in _BY_CONSTANT:
            text = f"step::{name}<{_divisor(args[1])}>({{0}})"
            return self._made_of(text, self._value(args[0]))
        if name not in _STEPS:
            raise UnknownStepError(f"the operation {name!r}")
        places = ", ".join(f"{{{i}}}" for i in range(len(args)))
        return self._made_of(f"step::{name}({places})", *map(self._value, args))

    def _read(self, address: ast.expr, options: dict[str | None, ast.expr]) -> _Value:
        """What is read from a tensor: its address is `given[...]`, with steps added to it."""
        steps: list[ast.expr] = []
        while isinstance(address, ast.BinOp):
            steps.insert(0, address.right)
            address = address.left
        place = _place(address)
        values = [self._value(step) for step in steps]
        inside = self._value(options["mask"]) if "mask" in options else _Value("true", plain=True)
        of_row = self._sum([x for x in values if x.stage in ("tile", "row")])
        others = self._sum([x for x in values if x.stage not in ("tile", "row")])
        name, source = _TYPES[self.types[place]], f"given[{place}]"
        if others.stage == "column" and inside.stage == "pair":
            columns = self._made_of("step::places({0})", others)
            text = f"step::read_row<{name}>({source}, {{0}}, {{1}}, {{2}})"
            return self._made_of(text, of_row, columns, inside)
        return self._made_of(
            f"step::read<{name}>({source}, step::plus({{0}}, {{1}}), {{2}})", of_row, others, inside
        )

    def _sum(self, values: list[_Value]) -> _Value:
        found = _Value("int64_t{0}", plain=True)
        for i, value in enumerate(values):
            found = self._made_of("step::plus({0}, {1})", found, value) if i else value
        return found


def _place(node: ast.expr) -> int:
    """Which of the numbers `given` it is."""
    match node:
        case ast.Subscript(ast.Name("given"), ast.Constant(int(place))):
            return place
    raise AssertionError(ast.unparse(node))


def _divisor(node: ast.expr) -> int:
    """A number that is divided by: it has to be known, since 0 would end the process."""
    try:
        found = ast.literal_eval(node)
    except ValueError:
        found = None
    if not isinstance(found, int) or found == 0:
        raise UnknownStepError("a quotient of whole numbers by what may be 0")
    return found
