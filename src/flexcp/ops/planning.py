"""Planning for a call: from what the user passes as a mask to prepared shapes, kept with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexcp.eager import outside_of_fake_tensors
from flexcp.errors import FlexCPError
from flexcp.grid import BlockGrid, build_block_grid
from flexcp.kernels.compiled_shapes import (
    CompiledShapes,
    compiled_shapes_of,
)
from flexcp.kernels.interface import full_shapes
from flexcp.masks import Mask
from flexcp.ops.checks import check_mask_size

_KEPT_GRIDS = 16
"""Grids kept with a mask; lengths beyond that are planned again."""

MaskLike = BlockMask | BlockGrid | Mask | Callable[..., Tensor]


def prepare(block_mask: MaskLike | None, query: Tensor, key: Tensor) -> CompiledShapes:
    """The shapes of a mask for these tensors, made on first use and kept with the mask object."""
    if block_mask is None or 0 in (*query.shape[:3], key.shape[2]):
        return _full(query.shape[2], key.shape[2])
    with _outside_of_transforms(), outside_of_fake_tensors():
        return compiled_shapes_of(as_grid(block_mask, query, key))


def _outside_of_transforms() -> AbstractContextManager[object]:
    """Planning looks at masks, not at what is being differentiated or mapped over."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    cleared: AbstractContextManager[object] = temporarily_clear_interpreter_stack()
    return cleared


@lru_cache(maxsize=64)
def _full(q_len: int, kv_len: int) -> CompiledShapes:
    return CompiledShapes(full_shapes(q_len, kv_len))


def as_grid(block_mask: MaskLike, query: Tensor, key: Tensor) -> BlockGrid:
    """The grid of whatever is passed as a mask, kept with it."""
    with outside_of_fake_tensors():
        return _as_grid(block_mask, query, key)


def _as_grid(block_mask: MaskLike, query: Tensor, key: Tensor) -> BlockGrid:
    if isinstance(block_mask, BlockGrid):
        grid = block_mask
    elif isinstance(block_mask, BlockMask):
        grid = _grid_of_block_mask(block_mask)
    elif callable(block_mask):
        return _grid_of_mask(block_mask, query, key)
    else:
        raise FlexCPError(
            "block_mask to be a torch BlockMask, a BlockGrid, a Mask or a mask_mod",
            f"{type(block_mask).__name__}",
            "take one from flexcp.masks, or make one with flexcp.build_block_grid",
        )
    check_mask_size(
        query, key, q_len=grid.q_len, kv_len=grid.kv_len, batch=grid.batch, heads=grid.heads
    )
    return grid


def _grid_of_block_mask(block_mask: BlockMask) -> BlockGrid:
    """Kept with the BlockMask, unless its fields have been changed since."""
    state = _state(block_mask)
    kept = vars(block_mask).get("_flexcp_grid")
    if kept is not None and all(a is b or a == b for a, b in zip(kept[0], state, strict=True)):
        grid: BlockGrid = kept[1]
        return grid
    grid = BlockGrid.from_block_mask(block_mask)
    vars(block_mask)["_flexcp_grid"] = (state, grid)
    return grid


def _state(block_mask: BlockMask) -> tuple[object, ...]:
    """What the grid of a BlockMask depends on; tensors by identity and version."""
    tensors = (
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
    )
    return (
        block_mask.mask_mod,
        tuple(block_mask.seq_lengths),
        tuple(block_mask.BLOCK_SIZE),
        *(_Known(x, None if x is None or x.is_inference() else x._version) for x in tensors),
    )


@dataclass(frozen=True, eq=False)
class _Known:
    tensor: Tensor | None
    version: int | None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Known)
            and self.tensor is other.tensor
            and self.version == other.version
        )

    __hash__ = None  # type: ignore[assignment]


def _grid_of_mask(mask: Mask | Callable[..., Tensor], query: Tensor, key: Tensor) -> BlockGrid:
    size = (query.shape[2], key.shape[2], query.shape[0], query.shape[1])
    kept: dict[tuple[int, ...], BlockGrid] = {}
    if isinstance(mask, Mask):
        kept = vars(mask).setdefault("_grids", kept)
    grid = kept.get(size)
    if grid is None:
        grid = build_block_grid(mask, size[0], size[1], batch=size[2], heads=size[3])
        while len(kept) >= _KEPT_GRIDS:
            kept.pop(next(iter(kept)))
        kept[size] = grid
    return grid
