"""The work of a round: what a rank computes against some rows, by batch element or for all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexcp.grid import BlockGrid
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.key_ranges import key_ranges_of
from flexcp.kernels.shapes import placed_together, shapes_from_ranges
from flexcp.schedule import Schedule


@dataclass(frozen=True, eq=False)
class ElementWork:
    """The work of one batch element, or of all."""

    b: int | None
    """Which batch element; None for all, which share a layout or are computed as one sequence."""
    first: int
    """The first of the round's rows that is its key."""
    rows: int
    """How many rows, from there on, are its keys."""
    shapes: CompiledShapes
    """What to compute, in rows of its queries and keys."""


class WorkFinder:
    """Shapes of a round's work; row ranges of the mask are found once."""

    def __init__(
        self, schedule: Schedule, grid: BlockGrid, group: int, place: int, part: int = 0
    ) -> None:
        self._elements = schedule.groups.batch_elements
        self._seq_len = schedule.groups.seq_len
        positions = schedule.groups.positions(group)
        self._q = [positions] if self._elements == 1 else list(positions)
        if schedule.heads_group_size > 1:
            grid = _of_heads(grid, schedule.heads_by_part[part][place].q)
        elements = range(self._elements) if self._elements > 1 else ()
        self._grids = [_of_element(grid, b) for b in elements] or [grid]
        self._ranges = [key_ranges_of(g) for g in self._grids]

    def of(self, rows: Tensor) -> tuple[ElementWork, ...]:
        """What the rank computes against these rows, which ascend."""
        bounds = torch.arange(self._elements + 1) * self._seq_len
        ends = torch.searchsorted(rows, bounds).tolist()
        found = []
        for b in range(self._elements):
            first, last = ends[b], ends[b + 1]
            if first == last or self._q[b].numel() == 0:
                continue
            shapes = shapes_from_ranges(
                self._ranges[b],
                self._grids[b],
                q_positions=self._q[b],
                kv_positions=rows[first:last] - b * self._seq_len,
            )
            if any(plane.slabs or plane.tiles for plane in shapes.planes):
                element = None if self._elements == 1 else b
                found.append(ElementWork(element, first, last - first, CompiledShapes(shapes)))
        return tuple(found)

    def as_one(self, rows: Tensor) -> tuple[ElementWork, ...]:
        """The same, with the queries of all elements one after the other, as their keys are."""
        found = self.of(rows)
        if self._elements == 1 or not found:
            return found
        first, last = found[0].first, found[-1].first + found[-1].rows
        parts = [
            (w.b * self._q[w.b].numel(), w.first - first, w.shapes.shapes)
            for w in found
            if w.b is not None
        ]
        shapes = placed_together(parts, torch.cat(self._q), rows[first:last] % self._seq_len)
        return (ElementWork(None, first, last - first, CompiledShapes(shapes)),)


def _of_element(grid: BlockGrid, b: int) -> BlockGrid:
    """The grid of one batch element."""
    of = grid.planes.of[b : b + 1] if grid.batch > 1 else grid.planes.of
    return replace(grid, planes=replace(grid.planes, of=of))


def _of_heads(grid: BlockGrid, heads: range) -> BlockGrid:
    """The grid of some heads."""
    if grid.heads == 1 or not len(heads):
        return grid
    of = grid.planes.of[:, heads.start : heads.stop]
    return replace(grid, planes=replace(grid.planes, of=of))
