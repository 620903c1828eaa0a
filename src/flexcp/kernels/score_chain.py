"""Score chains: a score function that does one thing after another to the score, done in place.

Most functions are such a chain: ALiBi adds a bias, softcap divides, takes tanh and multiplies. Run
as written, each step is a pass over memory that writes a tensor of its own. Here factors that are
numbers, and the change of base for softmax, go into the product that makes the scores and into the
biases; a bias that is itself a product is never made; and all is done where the scores are.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexcp.kernels.score_graph import ScoreGraph
from flexcp.masks.graph import Ref

_LOG2_E = math.log2(math.e)
_SCORE = 0
"""The node of the score itself."""
_Q, _KV = 3, 4
"""The nodes of the query and the key."""


@dataclass(frozen=True)
class _FactorStep:
    """Multiplies with a number."""

    number: float


@dataclass(frozen=True)
class _BiasStep:
    """Adds a number times one node, or times the product of two."""

    nodes: tuple[int, ...]
    number: float


@dataclass(frozen=True)
class _GateStep:
    """Multiplies with a node."""

    node: int


@dataclass(frozen=True)
class _TanhStep:
    """Takes the hyperbolic tangent, then multiplies with a number."""

    number: float = 1.0


@dataclass(frozen=True)
class _OtherStep:
    """Calls the operation of a node on the score, then multiplies with a number."""

    node: int
    score: int
    """The node that the score is at this point."""
    number: float = 1.0


_Step = _FactorStep | _BiasStep | _GateStep | _TanhStep | _OtherStep


@dataclass(frozen=True, eq=False)
class ScoreChain:
    """What a score function does to the score, one step after another."""

    graph: ScoreGraph
    steps: tuple[_Step, ...]
    relative: frozenset[int] = frozenset()
    """Nodes that depend on query and key by their distance alone: biases of relative positions."""

    def prepared(self, dtype: torch.dtype, number: float = 1.0) -> PreparedChain:
        """The steps for scores of a type, with factors moved to where they cost nothing.

        The result is to be multiplied with a number.
        """
        fast_tanh = dtype == torch.float32
        factor, steps = number, list[_Step]()
        for step in reversed(self.steps):
            match step:
                case _FactorStep():
                    factor *= step.number
                case _BiasStep():
                    steps.append(_BiasStep(step.nodes, step.number * factor))
                case _GateStep():
                    steps.append(step)
                case _TanhStep():
                    steps.append(_TanhStep(factor))
                    factor = 2 * _LOG2_E if fast_tanh else 1.0
                case _OtherStep():
                    steps.append(_OtherStep(step.node, step.score, factor))
                    factor = 1.0
        return PreparedChain(self.graph, tuple(reversed(steps)), factor, fast_tanh, self.relative)


@dataclass(frozen=True, eq=False)
class PreparedChain:
    """The steps of a chain for scores of one type."""

    graph: ScoreGraph
    steps: tuple[_Step, ...]
    factor: float
    """What the scores have to be multiplied with beforehand."""
    fast_tanh: bool
    relative: frozenset[int] = frozenset()

    @torch.no_grad()
    def run(
        self,
        tile: Tensor,
        b: Tensor,
        h: Tensor,
        q: Tensor,
        kv: Tensor,
        *,
        consecutive: bool = False,
    ) -> Tensor:
        """The modified scores, times a number, of a tile [N, R, T, U] of scores times `factor`.

        The indices broadcast to the tile, which is overwritten, and returned unless a step gave
        another one. `consecutive` says that queries and keys [T, 1] and [U] count up by 1: what
        depends on their distance alone is then computed once for each distance.
        """
        values = {1: b, 2: h, 3: q, 4: kv}
        by_distance = _Distances(self, b, h, q, kv) if consecutive and self.relative else None
        for step in self.steps:
            match step:
                case _BiasStep((), number):
                    tile.add_(number)
                case _BiasStep(nodes, number):
                    sides = [
                        self._value(node, values).to(tile.dtype)
                        if by_distance is None or node not in self.relative
                        else by_distance.spread(node, tile.dtype)
                        for node in nodes
                    ]
                    if len(sides) == 1:
                        tile.add_(sides[0], alpha=number)
                    else:
                        tile.addcmul_(*sides, value=number)
                case _GateStep(node) if by_distance is not None and node in self.relative:
                    tile.mul_(by_distance.spread(node, self.graph.nodes[node].dtype))
                case _GateStep(node):
                    tile.mul_(self._value(node, values))
                case _TanhStep(number) if self.fast_tanh:
                    # 1 - 2 / (exp2(x) + 1), of an x with the factors of `prepared`: a third of the
                    # time of tanh, and off by at most 2e-7.
                    tile.exp2_().add_(1.0).reciprocal_()
                    torch.sub(tile.new_full((), number), tile, alpha=2 * number, out=tile)
                case _TanhStep(number):
                    tile.tanh_().mul_(number)
                case _OtherStep(node, score, number):
                    made = self._value(node, values | {score: tile})
                    tile = made if number == 1.0 else made.mul_(number)
        return tile

    def _value(self, index: int, values: dict[int, Tensor]) -> Tensor:
        """A node's tensor, from those that are known, to which it is added."""
        if index not in values:
            node = self.graph.nodes[index]
            if node.value is None:
                assert node.op is not None
                args = self._operands(node.args, values)
                kwargs = {name: self._operands(x, values) for name, x in node.kwargs.items()}
                values[index] = node.op(*args, **kwargs)
            else:
                values[index] = node.value
        return values[index]

    def _operands(self, value: Any, values: dict[int, Tensor]) -> Any:
        if isinstance(value, Ref):
            return self._value(value.node, values)
        if isinstance(value, (tuple, list)):
            return [self._operands(item, values) for item in value]
        return value


class _Distances:
    """Values of nodes that depend on query and key by their distance alone, for a tile.

    They are computed for each distance, of which there are T + U - 1, and then spread over the
    tile: each row has the values of the row above, moved by one, which is a view and a copy.
    """

    def __init__(self, chain: PreparedChain, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> None:
        self._chain, self._keys = chain, kv.shape[-1]
        rows = q.shape[-2]
        steps = torch.arange(rows + self._keys - 1, device=kv.device)
        self._last_row_first = steps[:rows].flip(0)
        # The distances from the last row to the first: q - kv falls along them.
        self._values = {1: b, 2: h, 3: q[-1] - steps[None], 4: kv[0]}

    def spread(self, node: int, dtype: torch.dtype) -> Tensor:
        """A node's values in a type, for every pair of the tile, as far as they differ."""
        value = self._chain._value(node, self._values).to(dtype)
        by_row = value.unfold(-1, self._keys, 1).squeeze(-3)
        return by_row.index_select(-2, self._last_row_first)  # contiguous, which `flip` is not


def _relative_nodes(graph: ScoreGraph) -> frozenset[int]:
    """Nodes that are made of q - kv, and of what reads neither q, nor kv, nor the score."""
    found: set[int] = set()
    for index in graph.needed():
        node = graph.nodes[index]
        if node.value is not None or not {"q", "kv"} <= node.reads or "score" in node.reads:
            continue
        is_distance = node.name == "sub" and not node.kwargs
        is_distance &= node.args in ((Ref(_Q), Ref(_KV)), (Ref(_KV), Ref(_Q)))
        of_distances = all(
            o in found or not graph.nodes[o].reads & {"q", "kv"} for o in node.operands
        )
        if is_distance or of_distances:
            found.add(index)
    return frozenset(found)


def chain_of(graph: ScoreGraph) -> ScoreChain | None:
    """The chain that a score function is, or None if it uses a score twice, or not at all.

    >>> from flexcp.kernels.score import examine
    >>> cpu = torch.device("cpu")
    >>> softcap = examine(lambda s, b, h, q, kv: 20 * torch.tanh(s / 20), torch.float32, cpu)
    >>> softcap.chain.steps
    (_FactorStep(number=0.05), _TanhStep(number=1.0), _FactorStep(number=20.0))
    """
    users = Counter(o for i in graph.needed() for o in graph.nodes[i].operands)
    used_by = {o: i for i in graph.needed() for o in graph.nodes[i].operands}
    steps: list[_Step] = []
    at, dtype = _SCORE, graph.nodes[_SCORE].dtype
    while at != graph.output:
        after = used_by.get(at)
        if after is None or users[at] != 1 or graph.nodes[after].dtype != dtype:
            return None
        steps += _steps(graph, users, at, after)
        at = after
    if users[at] != 0:
        return None
    return ScoreChain(graph, tuple(steps), _relative_nodes(graph))


def _steps(graph: ScoreGraph, users: Counter[int], at: int, after: int) -> list[_Step]:
    """What the operation of a node does to the score, which is one of its operands."""
    node = graph.nodes[after]
    call: list[_Step] = [_OtherStep(after, at)]
    name, args = node.name, node.args
    if name in ("neg", "tanh") and len(args) == 1:
        return [_TanhStep() if name == "tanh" else _FactorStep(-1.0)]
    if len(args) != 2 or set(node.kwargs) - {"alpha"}:
        return call
    score_first = args[0] == Ref(at)
    other = args[1] if score_first else args[0]
    if name == "mul":
        if isinstance(other, Ref):
            return [_GateStep(other.node)]
        return [_FactorStep(float(other))] if _is_factor(other) else call
    if name == "div":
        return [_FactorStep(1 / other)] if score_first and _is_factor(other) else call
    if name not in ("add", "sub", "rsub") or not _is_factor(alpha := node.kwargs.get("alpha", 1)):
        return call
    # What the second operand is multiplied with; rsub takes the first from the second.
    second = -alpha if name in ("sub", "rsub") else alpha
    if name == "rsub":
        score_first = not score_first
    own, others = (1.0, second) if score_first else (second, 1.0)
    if isinstance(other, Ref):
        return [_FactorStep(own), _bias(graph, users, other.node, float(others))]
    if not isinstance(other, (int, float)):
        return call
    return [_FactorStep(own), _BiasStep((), float(others * other))]


def _bias(graph: ScoreGraph, users: Counter[int], index: int, number: float) -> _BiasStep:
    """A node that is added: as two factors and a number, if nothing else uses their product."""
    node, dtype = graph.nodes[index], graph.nodes[_SCORE].dtype
    while node.value is None and users[index] == 1 and node.dtype == dtype and not node.kwargs:
        if node.name == "neg":
            index, number = node.args[0].node, -number
        elif node.name == "mul" and all(isinstance(x, Ref) for x in node.args):
            return _BiasStep((node.args[0].node, node.args[1].node), number)
        elif node.name == "mul" and _is_factor(node.args[1]):
            index, number = node.args[0].node, number * node.args[1]
        else:
            break
        node = graph.nodes[index]
    return _BiasStep((index,), number)


def _is_factor(value: object) -> bool:
    """Whether it is a number that may be moved elsewhere."""
    return isinstance(value, (int, float)) and math.isfinite(value) and value != 0
