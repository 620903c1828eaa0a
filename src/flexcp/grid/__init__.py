"""Which tiles exist: from a mask to a sparse, exact grid of empty, partial and full tiles."""

from flexcp.grid.build import build_block_grid
from flexcp.grid.grid import BlockGrid
from flexcp.grid.runs import BlockKind, Runs

__all__ = ["BlockGrid", "BlockKind", "Runs", "build_block_grid"]
