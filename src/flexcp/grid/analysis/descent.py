"""Quadtree descent: one rectangle that covers everything, and only what is undecided is split.

Work is proportional to the outline of the mask, not to its area. Whatever the interval analysis
leaves open at the size of a block is probed at a few points, and evaluated in full if those agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexcp.grid.analysis.indexing import in_parts, take
from flexcp.grid.analysis.measured import MeasuredMask
from flexcp.grid.runs import BlockKind, Runs, joined

_MOST_RECTANGLES = 1 << 16
"""Rectangles looked at together; more are taken in turns, which bounds the memory."""
_FIRST_RECTANGLES = 1 << 10
"""Rectangles that the search begins with, at most."""
MOST_PAIRS = 1 << 20
"""Pairs evaluated together: few enough that intermediate results stay in the cache."""
_SAMPLES = (2, 8)
"""Queries, and keys, that an open block is probed at: its corners, then more."""


@dataclass
class Effort:
    """What building a grid took."""

    visited: int = 0
    """Rectangles that the interval analysis looked at."""
    probed: int = 0
    """Blocks that it left open: evaluated at a few points."""
    evaluated: int = 0
    """Blocks of which every pair was evaluated."""


@dataclass(frozen=True)
class Rectangles:
    """Rectangles of one level of the quadtree: node (i, j) of a plane."""

    plane: Tensor
    i: Tensor
    j: Tensor

    def __len__(self) -> int:
        return self.plane.numel()

    def subset(self, at: Tensor) -> Rectangles:
        """Some of them, by their indices."""
        return Rectangles(take(self.plane, at), take(self.i, at), take(self.j, at))

    def where(self, chosen: Tensor) -> Rectangles:
        """Some of them, by a bool mask."""
        at = torch.nonzero(chosen).squeeze(1)
        return self.subset(at)

    def split(self, rows: int, cols: int) -> Rectangles:
        """The (up to) four quarters of each."""
        i = torch.stack([2 * self.i, 2 * self.i, 2 * self.i + 1, 2 * self.i + 1]).reshape(-1)
        j = torch.stack([2 * self.j, 2 * self.j + 1] * 2).reshape(-1)
        children = Rectangles(self.plane.repeat(4), i, j)
        inside = (i < rows) & (j < cols)
        return children if bool(inside.all()) else children.where(inside)

    def parts(self, size: int) -> list[Rectangles]:
        """In pieces of at most `size`, neighbours staying together."""
        order = torch.argsort(self.plane * (1 << 40) + self.i)
        return [self.subset(at) for at in in_parts(order, size)]


@dataclass(frozen=True, eq=False)
class Descent:
    """The search for the kind of every block of a mask."""

    mask: MeasuredMask
    effort: Effort = field(default_factory=Effort)

    def run(self) -> Runs:
        """The kinds of all blocks, planes stacked on top of each other."""
        level = max(self.mask.q.levels, self.mask.kv.levels) - 1
        # A few hundred rectangles cost no more than one: skip the levels above.
        planes = len(self.mask.planes)
        while level > 0 and math.prod(self._shape(level - 1)) * planes <= _FIRST_RECTANGLES:
            level -= 1
        rows, cols = self._shape(level)
        every = torch.arange(planes * rows * cols)
        whole = Rectangles(every // (rows * cols), every // cols % rows, every % cols)
        return self._resolve(level, whole)

    def _shape(self, level: int) -> tuple[int, int]:
        """Nodes along each axis at a level."""
        return tuple(-(-len(axis) >> level) for axis in (self.mask.q, self.mask.kv))  # type: ignore[return-value]

    def _resolve(self, level: int, open_: Rectangles) -> Runs:
        """The blocks inside some rectangles. What is decided stays coarse until it is needed."""
        planes = len(self.mask.planes)
        decided: Runs | None = None
        while True:
            found, open_ = self._classify(level, open_)
            pieces = [found] if decided is None else [decided, found]
            if level == 0:
                return joined([*pieces, self._settle(open_)])
            decided = joined(pieces)
            level -= 1
            rows, cols = self._shape(level)
            decided = decided.refined(rows, cols, planes=planes)
            open_ = open_.split(rows, cols)
            if len(open_) > _MOST_RECTANGLES:
                parts = [self._resolve(level, part) for part in open_.parts(_MOST_RECTANGLES // 4)]
                for lower in range(level - 1, -1, -1):
                    decided = decided.refined(*self._shape(lower), planes=planes)
                return joined([decided, *parts])

    def _classify(self, level: int, rectangles: Rectangles) -> tuple[Runs, Rectangles]:
        self.effort.visited += len(rectangles)
        r = rectangles
        found = self.mask.ranges(level, r.plane, r.i, r.j)
        full, partial = found.lo, found.some_hi & ~found.some_lo
        kind = torch.where(
            full, int(BlockKind.FULL), torch.where(partial, int(BlockKind.PARTIAL), 0)
        )
        known = (kind > 0) | ~found.hi
        return self._as_runs(level, r, kind.to(torch.int8)), r.where(~known)

    def _as_runs(self, level: int, r: Rectangles, kind: Tensor) -> Runs:
        """Runs of one tile each, in no order: `joined` follows."""
        rows, cols = self._shape(level)
        at = torch.nonzero(kind).squeeze(1)
        r = r.subset(at)
        row = r.plane * rows + r.i
        total = rows * len(self.mask.planes)
        return Runs(total, cols, row, r.j, r.j + 1, take(kind, at))

    def _settle(self, blocks: Rectangles) -> Runs:
        """The kinds of blocks by looking at their pairs."""
        kind = torch.zeros(len(blocks), dtype=torch.int8)
        self.effort.probed += len(blocks)
        unsure = torch.arange(len(blocks))
        for samples in _SAMPLES:
            for at in in_parts(unsure, MOST_PAIRS // samples**2):
                kind.index_copy_(0, at, self._kinds_of_samples(blocks.subset(at), samples))
            unsure = torch.nonzero(kind != BlockKind.PARTIAL).squeeze(1)
        self.effort.evaluated += unsure.numel()
        for at in in_parts(unsure, self._blocks_at_once()):
            some = blocks.subset(at)
            allowed, total = count_pairs(self.mask, some.plane, some.i, some.j)
            kind[at] = torch.where(
                allowed == total, int(BlockKind.FULL), (allowed > 0).to(torch.int8)
            ).to(torch.int8)
        return self._as_runs(0, blocks, kind)

    def _kinds_of_samples(self, blocks: Rectangles, samples: int) -> Tensor:
        """PARTIAL where pairs spread over a block differ; EMPTY where they don't tell."""
        step = torch.arange(samples)[:, None]
        q, kv = (
            take(axis.first, at) + (take(axis.sizes, at) - 1) * step // (samples - 1)
            for axis, at in ((self.mask.q, blocks.i), (self.mask.kv, blocks.j))
        )
        seen = self.mask.evaluate(blocks.plane, q[:, None], kv[None, :]).flatten(0, 1)
        mixed = seen.any(0) & ~seen.all(0)
        return torch.where(mixed, int(BlockKind.PARTIAL), int(BlockKind.EMPTY)).to(torch.int8)

    def _blocks_at_once(self) -> int:
        """How many blocks may be evaluated in full together."""
        pairs = int(self.mask.q.sizes.max()) * int(self.mask.kv.sizes.max())
        return max(1, MOST_PAIRS // pairs)


def count_pairs(mask: MeasuredMask, plane: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """int64 Allowed pairs, and all pairs, of some cells of a mask."""
    height, width = take(mask.q.sizes, i), take(mask.kv.sizes, j)
    # Cells vary fastest: the innermost loops of the evaluation are then long and contiguous.
    every_row = torch.arange(int(height.max()))[:, None, None]
    every_col = torch.arange(int(width.max()))[None, :, None]
    wide = max(1, MOST_PAIRS // i.numel())
    high = max(1, wide // every_col.numel())
    counted = torch.zeros_like(height)
    for rows in every_row.split(high):
        for cols in every_col.split(wide, dim=1):
            counted += _count(mask, plane, i, j, rows, cols, height, width)
    return counted, height * width


def _count(
    mask: MeasuredMask,
    plane: Tensor,
    i: Tensor,
    j: Tensor,
    rows: Tensor,
    cols: Tensor,
    height: Tensor,
    width: Tensor,
) -> Tensor:
    """int32 Allowed pairs of cells, within some of their rows and columns."""
    q, kv = take(mask.q.first, i) + rows, take(mask.kv.first, j) + cols
    ragged = bool((height <= rows[-1]).any() | (width <= cols[:, -1]).any())
    if ragged:
        q = torch.minimum(q, take(mask.q.last, i))
        kv = torch.minimum(kv, take(mask.kv.last, j))
    allowed = mask.evaluate(plane, q, kv)
    if ragged:
        allowed = allowed & (rows < height) & (cols < width)
    # Adding up bytes in int32 is nine times as fast as adding up bools.
    return allowed.flatten(0, 1).view(torch.uint8).sum(0, dtype=torch.int32)
