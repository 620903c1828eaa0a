"""The work of a round: what a rank computes against some rows, by batch element or for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from flexcp.grid import BlockGrid
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.interface import Shapes
from flexcp.kernels.key_ranges import key_ranges_of
from flexcp.kernels.mask_kinds import mask_kind
from flexcp.kernels.shapes import placed_together, shapes_from_ranges
from flexcp.layout import Layout
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


_MOST_STRETCHES = 8
"""Of own rows: more of them would cut what is left to the rounds into too many shapes."""


@dataclass(frozen=True, eq=False)
class OwnPairs:
    """A rank's own rows with its own keys: it has both before rows are swapped for heads."""

    first: int
    """Where its rows begin among those of its group."""
    rows: int
    """How many rows it has."""
    positions: Tensor
    """int64 [rows] Global positions of its rows, which ascend."""
    shapes: CompiledShapes
    """What to compute, in its own rows and keys."""

    def of_group(self, x: Tensor) -> Tensor:
        """Its rows of a tensor of all rows of the group, [B, heads, rows, D], copied."""
        return x.narrow(2, self.first, self.rows).clone()

    def keys_left(self, keys: Tensor) -> list[tuple[int, int]]:
        """Stretches of keys, which ascend, that are not its own: (first, last + 1)."""
        is_own = torch.isin(keys, self.positions, assume_unique=True)
        edges = torch.ones(keys.numel() + 1, dtype=torch.bool)
        edges[1:-1] = is_own[1:] != is_own[:-1]
        at = edges.nonzero()[:, 0].tolist()
        return [(a, b) for a, b in pairwise(at) if not is_own[a]]


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

    def own_pairs(self, layout: Layout, members: range, rank: int) -> OwnPairs | None:
        """Own rows with own keys, to be computed apart; None if that is left to the rounds.

        It is where there are none, where batch elements have layouts of their own, where own rows
        are scattered, and where own pairs are a rectangle, a triangle or a band: so are the group's
        then, mostly, and faster as a whole.
        """
        positions = layout.positions(rank)
        if self._elements > 1 or positions.numel() == 0:
            return None
        steps = positions.diff()
        if bool((steps <= 0).any()) or int((steps > 1).sum()) >= _MOST_STRETCHES:
            return None
        shapes = self._shapes(0, positions, positions)
        if mask_kind(shapes) not in ("documents", "arbitrary"):
            return None
        first = int(layout.counts[members.start : rank].sum())
        return OwnPairs(first, positions.numel(), positions, CompiledShapes(shapes))

    def of(self, rows: Tensor, apart: OwnPairs | None = None) -> tuple[ElementWork, ...]:
        """What the rank computes against these rows, which ascend; but for what is done apart."""
        bounds = torch.arange(self._elements + 1) * self._seq_len
        ends = torch.searchsorted(rows, bounds).tolist()
        found = []
        for b in range(self._elements):
            first, last = ends[b], ends[b + 1]
            if first == last or self._q[b].numel() == 0:
                continue
            keys = rows[first:last] - b * self._seq_len
            if apart is None:
                shapes = self._shapes(b, self._q[b], keys)
            else:
                shapes = self._shapes_left(apart, keys)
            if _has_pairs(shapes):
                element = None if self._elements == 1 else b
                found.append(ElementWork(element, first, last - first, CompiledShapes(shapes)))
        return tuple(found)

    def _shapes(self, b: int, q: Tensor, keys: Tensor) -> Shapes:
        return shapes_from_ranges(self._ranges[b], self._grids[b], q_positions=q, kv_positions=keys)

    def _shapes_left(self, apart: OwnPairs, keys: Tensor) -> Shapes:
        """What the group's rows see of keys, without own rows' sight of own keys."""
        q, own, stop = self._q[0], apart.first, apart.first + apart.rows
        cuts = [(0, own, 0, keys.numel()), (stop, q.numel(), 0, keys.numel())]
        cuts += [(own, stop, a, b) for a, b in apart.keys_left(keys)]
        parts = [
            (q0, k0, self._shapes(0, q[q0:q1], keys[k0:k1]))
            for q0, q1, k0, k1 in cuts
            if q0 < q1 and k0 < k1
        ]
        return placed_together(parts or [(0, 0, self._shapes(0, q[:0], keys[:0]))], q, keys)

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


def _has_pairs(shapes: Shapes) -> bool:
    return any(plane.slabs or plane.tiles for plane in shapes.planes)


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
