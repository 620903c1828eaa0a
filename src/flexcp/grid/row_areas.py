"""Row areas: how many keys each query sees, from its ranges of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.grid.grid import BlockGrid
from flexcp.grid.row_ranges import row_ranges


@dataclass(frozen=True, eq=False)
class RowAreas:
    """Allowed pairs of every query of every plane, if they are known."""

    planes: Tensor | None
    """int64 [planes, q_len]."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return 0 if self.planes is None else self.planes.nbytes


def row_areas(grid: BlockGrid) -> RowAreas:
    """The areas of a grid's rows, from its row ranges.

    >>> import flexcp
    >>> row_areas(flexcp.build_block_grid(flexcp.masks.causal(), 4)).planes
    tensor([[1, 2, 3, 4]])
    """
    return grid.derived.once(RowAreas, lambda: _areas(grid))


def _areas(grid: BlockGrid) -> RowAreas:
    planes = row_ranges(grid).planes
    if planes is None:
        return RowAreas(None)
    found = torch.empty(len(planes), grid.q_len, dtype=torch.int64)
    for area, columns in zip(found, planes, strict=True):
        if not columns:
            area.zero_()
        for i, column in enumerate(columns):
            if i == 0:
                torch.sub(column.stop, column.start, out=area)
            else:
                area.add_(column.stop).sub_(column.start)
    return RowAreas(found)
