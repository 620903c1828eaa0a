"""Document ids in any order: equality only asks whether two ids are the same, not which is larger.

`ids[q] == ids[kv]` is decided by comparing ranges of ids, which is sharp when ids rise along the
sequence and useless when they are hashes. Numbering them by first appearance changes no equality
and makes packed documents rise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.grid.analysis.axis import Axis, Pyramid
from flexcp.grid.analysis.intervals import Analysis
from flexcp.masks.graph import MaskGraph, Ref

_FEWEST_REPEATS = 4
"""Ids that change more often than every so many tokens are not worth numbering."""


@dataclass(frozen=True)
class Equality:
    """A comparison `a == b` or `a != b` of one value along each axis."""

    step: int
    """The node of the comparison."""
    q_side: int
    """The operand that reads q."""
    kv_side: int
    """The operand that reads kv."""
    only_where: tuple[int, ...] = ()
    """Conditions on one axis without which the comparison does not matter."""


def unsorted_equalities(analysis: Analysis, pyramids: dict[int, Pyramid]) -> list[Equality]:
    """The comparisons that would gain from numbering their operands anew."""
    return [
        equality
        for step in analysis.steps
        if (equality := _equality(analysis, step)) is not None
        and not all(pyramids[side].rises() for side in (equality.q_side, equality.kv_side))
    ]


def _equality(analysis: Analysis, step: int) -> Equality | None:
    graph = analysis.graph
    node = graph.nodes[step]
    if node.name not in ("eq", "ne") or node.compute_dtype.is_floating_point:
        return None
    sides: dict[str | None, int] = {}
    for arg in node.args:
        if not isinstance(arg, Ref) or arg.node not in analysis.leaves:
            return None
        sides[analysis.axis_of(arg.node)] = arg.node
    if set(sides) != {"q", "kv"} or any(graph.nodes[i].op is None for i in sides.values()):
        return None
    return Equality(step, sides["q"], sides["kv"], _conditions(analysis, step))


def _conditions(analysis: Analysis, step: int) -> tuple[int, ...]:
    """One-axis conditions that stand beside a comparison, in `comparison & condition & ...`."""
    graph = analysis.graph
    users: dict[int, list[int]] = {}
    for index in graph.needed((graph.output,)):
        for operand in graph.nodes[index].operands:
            users.setdefault(operand, []).append(index)
    found: list[int] = []
    while users.get(step) and len(users[step]) == 1 and _is_and(graph, users[step][0]):
        parent = users[step][0]
        pending = [i for i in graph.nodes[parent].operands if i != step]
        while pending:
            index = pending.pop()
            if _is_and(graph, index):
                pending.extend(graph.nodes[index].operands)
            elif len(graph.nodes[index].reads & {"q", "kv"}) == 1:
                found.append(index)
        step = parent
    return tuple(found)


def _is_and(graph: MaskGraph, index: int) -> bool:
    node = graph.nodes[index]
    both_truth = node.dtype == torch.bool and len(node.operands) == 2
    return both_truth and node.name in ("bitwise_and", "logical_and")


def renumbered(
    graph: MaskGraph, equality: Equality, q: Axis, kv: Axis, b: Tensor, h: Tensor
) -> tuple[Pyramid, Pyramid] | None:
    """Ranges of both sides after numbering by first appearance; None if it would not help."""
    b, h = b[:, None], h[:, None]
    zero = torch.zeros((), dtype=torch.int64)
    sides = []
    for axis, side in (("q", equality.q_side), ("kv", equality.kv_side)):
        positions = (q if axis == "q" else kv).every_position()
        at = (positions, zero) if axis == "q" else (zero, positions)
        conditions = [c for c in equality.only_where if axis in graph.nodes[c].reads]
        values, *allowed = graph.evaluate_nodes((side, *conditions), b, h, *at)
        shape = (b.shape[0], positions.numel())
        matters = torch.ones(shape, dtype=torch.bool)
        for condition in allowed:
            matters &= condition.bool()
        sides.append((values.expand(shape).long(), matters))
    numbered = []
    for group in range(b.shape[0]):
        numbers = _numbers(*((values[group], matters[group]) for values, matters in sides))
        if numbers is None:
            return None
        numbered.append(numbers)
    q_numbers, kv_numbers = (torch.stack([pair[side] for pair in numbered]) for side in (0, 1))
    return q.pyramid_of(q_numbers), kv.pyramid_of(kv_numbers)


def _numbers(
    q_side: tuple[Tensor, Tensor], kv_side: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """float64 Numbers that are equal where ids are that matter, in the order of appearance.

    An id that can't meet its like on the other axis gets a fraction beside the last number that
    could: it equals nothing, and does not stretch the range of its neighbours.
    """
    stretches = [_stretches(values, matters) for values, matters in (q_side, kv_side)]
    tokens = q_side[0].numel() + kv_side[0].numel()
    if sum(ids.numel() for ids, _, _ in stretches) * _FEWEST_REPEATS > tokens:
        return None
    found = [torch.unique(ids[matters]) for ids, matters, _ in stretches]
    shared = found[0][torch.isin(found[0], found[1])]
    if shared.numel() == 0:
        return None
    order = torch.full((shared.numel(),), tokens)
    places = []
    for ids, matters, lengths in (stretches[1], stretches[0]):
        place = torch.searchsorted(shared, ids).clamp(max=shared.numel() - 1)
        meets = matters & (shared[place] == ids)
        places.append((place, meets))
        at = torch.nonzero(meets).squeeze(1)
        first = lengths.cumsum(0) - lengths
        order.scatter_reduce_(0, place[at], first[at], "amin")
    number = torch.empty(shared.numel(), dtype=torch.float64)
    number[order.argsort(stable=True)] = torch.arange(shared.numel()).double()
    kv_numbers, q_numbers = (
        _filled(number, place, meets, fraction)
        for (place, meets), fraction in zip(places, (0.75, 0.25), strict=True)
    )
    return (
        q_numbers.repeat_interleave(stretches[0][2]),
        kv_numbers.repeat_interleave(stretches[1][2]),
    )


def _stretches(values: Tensor, matters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The id, whether it matters, and the length of each stretch of equal tokens."""
    change = (values[1:] != values[:-1]) | (matters[1:] != matters[:-1])
    heads = torch.nonzero(torch.cat([torch.ones(1, dtype=torch.bool), change])).squeeze(1)
    lengths = torch.diff(heads, append=torch.tensor([values.numel()]))
    return values[heads], matters[heads], lengths


def _filled(number: Tensor, place: Tensor, meets: Tensor, fraction: float) -> Tensor:
    """Each stretch's number, or that of the last stretch that has one and a fraction."""
    last = torch.where(meets, torch.arange(meets.numel()), -1).cummax(0).values
    inherited = torch.where(last >= 0, number[place[last.clamp(min=0)]], -1.0)
    return torch.where(meets, number[place], inherited + fraction)
