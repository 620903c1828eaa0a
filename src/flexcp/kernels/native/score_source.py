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
from typing import Literal

import torch

from flexcp.kernels.triton.emit import FIRST_OPERAND, EmittedScore
from flexcp.kernels.triton.terms import UnknownStepError

Stage = Literal["tile", "row", "column", "distance", "pair"]

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
    return _written(emitted.source, tuple(types), tile)


@lru_cache(maxsize=256)
def _written(
    source: str, types: tuple[tuple[int, torch.dtype], ...], tile: int
) -> ScoreSource | str:
    functions = {
        node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)
    }
    numbers = _Numbers()
    parts = ['#include "score_steps.h"', f"constexpr int TILE = {tile};"]
    try:
        for name in ("score", "pull_back"):
            parts.append(_Writer(dict(types), numbers).function(name, functions[name]))
    except UnknownStepError as unknown:
        return str(unknown)
    parts.append(_ENTRIES)
    return ScoreSource("\n\n".join(parts) + "\n", tuple(numbers.whole), tuple(numbers.real))


_ENTRIES = """\
extern "C" {

void flexcp_score(const ScoreTile* tile, float* scores) {
    tile->consecutive ? score<true>(*tile, scores, scores) : score<false>(*tile, scores, scores);
}

void flexcp_pull_back(const ScoreTile* tile, const float* scores, float* gradients) {
    tile->consecutive ? pull_back<true>(*tile, scores, gradients)
                      : pull_back<false>(*tile, scores, gradients);
}

}  // extern "C\""""

_FUNCTION = """\
template <bool CONSECUTIVE>
static void {name}(const ScoreTile& tile, const float* scores, float* results) {{
    const int64_t* given = tile.given;
    const auto b = static_cast<int32_t>(tile.batch + given[2]);
    const auto h = static_cast<int32_t>(tile.head + given[3]);
{of_tile}\
    const auto of_column = [&](const IntVec k) {{
{of_column}\
        return std::make_tuple({columns});
    }};
    const auto of_distance = [&](const int32_t q, const IntVec k) {{
{of_distance}\
        return std::make_tuple({distances});
    }};
    decltype(of_column(IntVec{{}})) columns[TILE / WIDTH];
    for (int j = 0; j < TILE; j += WIDTH)
        columns[j / WIDTH] = of_column(step::positions(tile.kv_at + j));
    decltype(step::diagonals_of<TILE>(of_distance(0, IntVec{{}}))) diagonals;
    if constexpr (CONSECUTIVE) diagonals.fill(tile.q_at, tile.kv_at, of_distance);
    for (int r = 0; r < tile.rows; r++) {{
        const int32_t q = tile.q_at[r];
{of_row}\
        for (int j = tile.first[r / MR]; j < tile.last[r / MR]; j += WIDTH) {{
            const Vec s = load(scores + r * TILE + j), g = load(results + r * TILE + j);
            const IntVec k = step::positions(tile.kv_at + j);
{bound_columns}\
{bound_distances}\
{of_pair}\
            store(results + r * TILE + j, step::as<Vec>({result}));
        }}
    }}
}}"""
_INDENT = {"tile": 4, "row": 8, "column": 8, "distance": 8, "pair": 12}


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
        """The C++ function for one of the emitter's."""
        self.lines = {stage: [] for stage in ("tile", "row", "column", "distance", "pair")}
        for arg in "sgbhqk":
            self.names[arg] = _Value(arg, frozenset(arg), plain=True)
        *steps, last = node.body
        for line in steps:
            assert isinstance(line, ast.Assign)
            assert isinstance(line.targets[0], ast.Name)
            target = line.targets[0].id
            if target not in "sbh":  # scaled by the kernel; numbered by the frame
                self._define(target, self._value(line.value))
        assert isinstance(last, ast.Return)
        assert last.value is not None
        result = self._used_by(self._value(last.value), "pair")
        bound: dict[str, str] = {}
        for stage, source in (
            ("columns", "columns[j / WIDTH]"),
            ("distances", "CONSECUTIVE ? diagonals.at(r, j) : of_distance(q, k)"),
        ):
            named = ", ".join(self.wanted["column" if stage == "columns" else "distance"])
            kind = "auto&" if stage == "columns" else "auto"
            bound[stage] = f"            const {kind} [{named}] = {source};\n" if named else ""
        return _FUNCTION.format(
            name=name,
            result=result,
            columns=", ".join(self.wanted["column"]),
            distances=", ".join(self.wanted["distance"]),
            bound_columns=bound["columns"],
            bound_distances=bound["distances"],
            **{
                f"of_{stage}": "".join(f"{' ' * _INDENT[stage]}{line}\n" for line in lines)
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
