"""Document ids in any order: equality only asks whether two ids are the same, not which is larger.

`ids[q] == ids[kv]` is decided by comparing ranges of ids, which is sharp when ids rise along the
sequence and useless when they are hashes. Numbering them by first appearance changes no equality
and makes packed documents rise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.blocks.axis import Axis, Pyramid
from flexcp.masks.graph import MaskGraph, Ref
from flexcp.masks.intervals import Analysis

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
    return Equality(step, sides["q"], sides["kv"])


def renumbered(
    graph: MaskGraph, equality: Equality, q: Axis, kv: Axis, b: Tensor, h: Tensor
) -> tuple[Pyramid, Pyramid] | None:
    """Ranges of both sides after numbering by first appearance; None if it would not help."""
    zero = torch.zeros((), dtype=torch.int64)
    b, h = b[:, None], h[:, None]
    on_q, on_kv = q.every_position(), kv.every_position()
    sides = (
        graph.evaluate_nodes((equality.q_side,), b, h, on_q, zero)[0],
        graph.evaluate_nodes((equality.kv_side,), b, h, zero, on_kv)[0],
    )
    groups = b.shape[0]
    values = [
        side.expand(groups, on.numel()).long()
        for side, on in zip(sides, (on_q, on_kv), strict=True)
    ]
    numbered: list[tuple[Tensor, Tensor]] = []
    for own_q, own_kv in zip(*values, strict=True):
        numbers = _by_first_appearance(torch.cat([own_kv, own_q]))
        if numbers is None:
            return None
        numbered.append((numbers[own_kv.numel() :], numbers[: own_kv.numel()]))
    q_numbers, kv_numbers = (torch.stack([pair[side] for pair in numbered]) for side in (0, 1))
    return q.pyramid_of(q_numbers), kv.pyramid_of(kv_numbers)


def _by_first_appearance(values: Tensor) -> Tensor | None:
    """int64 [N] 0 for the first value and all that equal it, 1 for the next new one, and so on."""
    true = torch.ones(1, dtype=torch.bool)
    heads = torch.nonzero(torch.cat([true, values[1:] != values[:-1]])).squeeze(1)
    if heads.numel() * _FEWEST_REPEATS > values.numel():
        return None
    different, which = torch.unique(values[heads], return_inverse=True)
    first = torch.full((different.numel(),), heads.numel())
    first.scatter_reduce_(0, which, torch.arange(heads.numel()), "amin")
    number = torch.empty_like(first)
    number[first.argsort()] = torch.arange(first.numel())
    lengths = torch.diff(heads, append=torch.tensor([values.numel()]))
    return number[which].repeat_interleave(lengths)
