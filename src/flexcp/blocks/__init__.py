"""Which tiles exist: from a mask to a sparse, exact grid of empty, partial and full tiles."""

from flexcp.blocks.build import build_block_grid
from flexcp.blocks.grid import BlockGrid
from flexcp.blocks.runs import BlockKind, Runs

__all__ = ["BlockGrid", "BlockKind", "Runs", "build_block_grid"]
