"""flexcp: exact attention over a sequence that is sharded across devices, for any mask."""

from flexcp import kernels, masks, testing
from flexcp.blocks import BlockGrid, BlockKind, build_block_grid
from flexcp.errors import FlexCPError
from flexcp.layout import Layout
from flexcp.masks import Mask
from flexcp.plan import Machine, Plan
from flexcp.runtime import attention, cross_entropy, flex_attention, make_plan, shard_batch

__all__ = [
    "BlockGrid",
    "BlockKind",
    "FlexCPError",
    "Layout",
    "Machine",
    "Mask",
    "Plan",
    "attention",
    "build_block_grid",
    "cross_entropy",
    "flex_attention",
    "kernels",
    "make_plan",
    "masks",
    "shard_batch",
    "testing",
]
