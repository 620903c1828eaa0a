"""A measured mask: its values along each axis, from which ranges on rectangles follow."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.grid.analysis.axis import Axis, Pyramid, measure
from flexcp.grid.analysis.indexing import in_parts, take
from flexcp.grid.analysis.intervals import Analysis, analyse
from flexcp.grid.analysis.lookup import as_bound, value_extremes
from flexcp.grid.analysis.ranges import EXACT, Range, rising_alone
from flexcp.grid.analysis.relabel import renumbered, unsorted_equalities
from flexcp.grid.planes import Planes
from flexcp.masks.graph import INPUTS, MaskGraph

_TOGETHER = 1 << 14
"""Positions at which a dear leaf is evaluated together."""


@dataclass(frozen=True, eq=False)
class MeasuredMask:
    """A mask with everything measured that its interval analysis needs."""

    graph: MaskGraph
    analysis: Analysis
    planes: Planes
    q: Axis
    kv: Axis
    pyramids: dict[int, Pyramid] = field(repr=False)
    """Of each leaf that varies along an axis."""
    constants: dict[int, Tensor | None] = field(repr=False)
    """[P] or [] Values of each leaf that does not; None for one that a Range can't hold exactly."""
    groups: dict[int, Tensor] = field(repr=False)
    """int64 [P] Row of a leaf's pyramid that belongs to each plane."""
    tables: dict[int, Tensor] = field(repr=False)
    """[groups, S] Values of leaves that are dear to compute, if all other steps are cheap."""

    def ranges(self, level: int, plane: Tensor, i: Tensor, j: Tensor) -> Range:
        """What the mask can be on rectangles of 2**level x 2**level cells, as [T]."""
        found = self.analysis.output_range(self._leaf_ranges(level, plane, i, j))
        if found.lo.shape == i.shape:
            return found
        return rising_alone(lambda x: x.expand(i.shape), found)

    def bounds(self, plane: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """Bool [T] Whether the mask surely holds, and whether it may hold somewhere, on cells."""
        leaves = self._leaf_ranges(0, plane, i, j, attained=False)
        found = self.analysis.output_range(leaves)
        return found.lo, found.hi

    def _leaf_ranges(
        self, level: int, plane: Tensor, i: Tensor, j: Tensor, *, attained: bool = True
    ) -> dict[int, Range]:
        measured: dict[int, Range] = {}
        for leaf in self.analysis.leaves:
            axis = self.analysis.axis_of(leaf)
            if axis is None:
                value = self.constants[leaf]
                if value is None:
                    measured[leaf] = Range.anything(self.graph.nodes[leaf].dtype)
                else:
                    measured[leaf] = Range.exactly(take(value, plane) if value.dim() else value)
            else:
                group = take(self.groups[leaf], plane) if len(self.planes) > 1 else plane
                node = i if axis == "q" else j
                measured[leaf] = self.pyramids[leaf].take(level, group, node, attained=attained)
        return measured

    def evaluate(self, plane: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """The mask itself, exactly, at positions; the three broadcast against each other."""
        shape = torch.broadcast_tensors(plane, q, kv)[0].shape
        b, h = take(self.planes.b, plane), take(self.planes.h, plane)
        given = {leaf: self._read(leaf, plane, q, kv) for leaf in self.tables}
        wanted = (self.graph.output,)
        return run_mask(lambda: self.graph.evaluate_nodes(wanted, b, h, q, kv, given)[0]).expand(
            shape
        )

    def _read(self, leaf: int, plane: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """A leaf's values from its table."""
        of_q = self.analysis.axis_of(leaf) == "q"
        axis, positions = (self.q, q) if of_q else (self.kv, kv)
        table = self.tables[leaf]
        flat = positions - axis.first[0] + take(self.groups[leaf], plane) * table.shape[1]
        return take(table.view(-1), flat)


def measure_mask(graph: MaskGraph, planes: Planes, q: Axis, kv: Axis) -> MeasuredMask:
    """Evaluates the mask's one-axis values along both axes."""
    analysis = analyse(graph)
    pyramids: dict[int, Pyramid] = {}
    constants: dict[int, Tensor | None] = {}
    groups: dict[int, Tensor] = {}
    same: dict[tuple[int, Hashable], Pyramid] = {}  # doc[q] and doc[kv] are measured once
    for leaf in analysis.leaves:
        axis = analysis.axis_of(leaf)
        if axis is None:
            constants[leaf] = _constant(graph, leaf, planes)
            continue
        b, h, groups[leaf] = _groups(graph, leaf, planes)
        cells = q if axis == "q" else kv
        key = (id(cells), graph.expression(leaf, axis))
        if key not in same:
            is_position = graph.nodes[leaf].op is None
            same[key] = (
                _of_positions(cells) if is_position else _of_table(graph, leaf, axis, cells, b, h)
            )
        pyramids[leaf] = same[key]
    for equality in unsorted_equalities(analysis, pyramids):
        b, h, group = _groups(graph, equality.step, planes)
        sides = renumbered(graph, equality, q, kv, b, h)
        if sides is not None:
            analysis, stand_ins = analysis.with_stand_ins(equality.step)
            for stand_in, side in zip(stand_ins, sides, strict=True):
                pyramids[stand_in], groups[stand_in] = side, group
    tables = _tables(graph, analysis, planes, q, kv)
    measured = MeasuredMask(graph, analysis, planes, q, kv, pyramids, constants, groups, tables)
    top = max(q.levels, kv.levels) - 1
    everything = torch.arange(len(planes))
    origin = torch.zeros_like(everything)
    limited = analysis.limited(measured._leaf_ranges(top, everything, origin, origin))
    return replace(measured, analysis=limited)


def _tables(
    graph: MaskGraph, analysis: Analysis, planes: Planes, q: Axis, kv: Axis
) -> dict[int, Tensor]:
    """Leaves that take more than pointwise steps, at every position: computed once, not per pair.

    Empty if nothing is gained, because other steps are dear as well.
    """
    zero = torch.zeros((), dtype=torch.int64)
    dear = [
        leaf
        for leaf in analysis.leaves
        if leaf < len(graph.nodes)
        and analysis.axis_of(leaf)
        and not graph.is_pointwise_beyond((leaf,), ())
    ]
    if not dear or not graph.is_pointwise_beyond((graph.output,), dear):
        return {}
    tables = {}
    for leaf in dear:
        b, h, _ = _groups(graph, leaf, planes)
        on_q = analysis.axis_of(leaf) == "q"
        positions = (q if on_q else kv).every_position()
        parts = []
        for at in in_parts(positions, _TOGETHER):
            some = (at, zero) if on_q else (zero, at)
            values = run_mask(
                lambda some=some, leaf=leaf, b=b, h=h: graph.evaluate_nodes(  # type: ignore[misc]
                    (leaf,), b[:, None], h[:, None], *some
                )[0]
            )
            parts.append(values.expand(b.numel(), at.numel()))
        tables[leaf] = torch.cat(parts, dim=1)
    return tables


class IndexOutsideError(FlexCPError):
    """A mask looks a position up in a captured tensor that does not reach so far."""


def run_mask(evaluation: Callable[[], Tensor]) -> Tensor:
    """Runs part of a user's mask; its failures become ours."""
    try:
        return evaluation()
    except IndexError as error:
        raise IndexOutsideError(
            "captured tensors that cover every position that indexes them",
            f"an index outside of one: {error}",
            "make the captured tensor as long as the sequence (and as large as the batch and "
            "head counts that index it), or clamp the index",
        ) from error
    except RuntimeError as error:
        raise FlexCPError(
            "a mask_mod that can be evaluated at every position",
            f"{type(error).__name__}: {error}",
            "make it a function that is defined for all of its indices",
        ) from error


def _groups(graph: MaskGraph, leaf: int, planes: Planes) -> tuple[Tensor, Tensor, Tensor]:
    """The (b, h) pairs that a leaf differs for, and which of them each plane has."""
    reads = graph.nodes[leaf].reads
    b = planes.b if "b" in reads else torch.zeros_like(planes.b)
    h = planes.h if "h" in reads else torch.zeros_like(planes.h)
    pairs, group = torch.unique(torch.stack([b, h]), dim=1, return_inverse=True)
    return pairs[0], pairs[1], group


def _constant(graph: MaskGraph, leaf: int, planes: Planes) -> Tensor | None:
    zero = torch.zeros((), dtype=torch.int64)
    if graph.nodes[leaf].reads:
        found = run_mask(
            lambda: graph.evaluate_nodes((leaf,), planes.b, planes.h, zero, zero)[0]
        ).expand(len(planes))
    else:
        found = run_mask(lambda: graph.evaluate_nodes((leaf,), zero, zero, zero, zero)[0]).reshape(
            ()
        )
    value = as_bound(value_extremes(found[..., None])[0])
    if value.dtype == torch.bool:
        return value
    limit = torch.inf if found.is_floating_point() else EXACT
    return value if bool((value.abs() <= limit).all()) else None  # also None for NaN


def _of_positions(cells: Axis) -> Pyramid:
    lo, hi = cells.first.double()[None], cells.last.double()[None]
    return Pyramid(Range(lo, hi, lo, hi))


def _captured(graph: MaskGraph, leaf: int, axis: str, cells: Axis, b: Tensor) -> Tensor | None:
    """[groups, S] A leaf that reads a captured tensor at the position itself, as `ids[b, q]`."""
    node = graph.nodes[leaf]
    if node.name != "index":
        return None
    table: Tensor | None = graph.nodes[node.args[0].node].value
    indices = [ref.node for ref in node.args[1] if ref]
    position = INPUTS.index(axis)
    first, last = int(cells.first[0]), int(cells.last.max())
    if table is None or table.dim() != len(indices) or table.shape[-1] <= last:
        return None
    if indices == [position]:
        return table[None, first : last + 1]
    if indices == [INPUTS.index("b"), position] and int(b.max()) < table.shape[0]:
        return table[b, first : last + 1]
    return None


def _of_table(graph: MaskGraph, leaf: int, axis: str, cells: Axis, b: Tensor, h: Tensor) -> Pyramid:
    values = _captured(graph, leaf, axis, cells, b)
    if values is not None:
        return cells.pyramid_of(values)
    zero = torch.zeros((), dtype=torch.int64)
    extremes: list[tuple[Tensor, Tensor]] = []
    b, h = b[:, None, None], h[:, None, None]
    for chunk in cells.chunks():
        positions = cells.positions(chunk)
        q, kv = (positions, zero) if axis == "q" else (zero, positions)

        def table(q: Tensor = q, kv: Tensor = kv) -> Tensor:
            return graph.evaluate_nodes((leaf,), b, h, q, kv)[0]

        values = run_mask(table).expand(b.shape[0], *positions.shape)
        extremes.append(value_extremes(values))
    return measure(extremes)
