"""flexcp: exact attention over a sequence that is sharded across devices, for any mask."""

from flexcp import masks
from flexcp.blocks import BlockGrid, BlockKind, build_block_grid
from flexcp.errors import FlexCPError
from flexcp.masks import Mask

__all__ = ["BlockGrid", "BlockKind", "FlexCPError", "Mask", "build_block_grid", "masks"]
