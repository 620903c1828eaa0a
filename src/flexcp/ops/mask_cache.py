"""From what a user passes as a mask to compiled shapes, worked out once for each mask and size."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode

from flexcp.eager import outside_of_fake_tensors, outside_of_transforms, tensors_to_keep
from flexcp.errors import FlexCPError
from flexcp.grid import BlockGrid, build_block_grid
from flexcp.grid.memo import grid_of_mask
from flexcp.grid.torch_block_mask import spread
from flexcp.kernels.compiled_shapes import CompiledShapes, compiled_shapes_of
from flexcp.kernels.interface import full_shapes
from flexcp.masks import Mask
from flexcp.masks.trace import trace_mask
from flexcp.ops.arguments import check_mask_size
from flexcp.torch_names import recorded_tensors

BLOCK_MASK_FIELDS = tuple(inspect.signature(BlockMask.__init__).parameters)[1:]
"""What a BlockMask is made from, and has."""

MaskLike = BlockMask | BlockGrid | Mask | Callable[..., Tensor]


class GraphMadeMask(BlockMask):
    """A BlockMask that was made inside a compiled graph, of whose tensors its mask_mod is.

    There, attention is computed from the mask_mod; outside, it is a BlockMask like any other.
    """

    made_of: tuple[object, ...] = ()
    """The fields as they were made: with others, the lists need not follow from the mask_mod."""

    def is_as_made(self) -> bool:
        """Whether its mask_mod says all that its lists do."""
        now = [getattr(self, name) for name in BLOCK_MASK_FIELDS]
        return len(self.made_of) == len(now) and all(
            x is y or (isinstance(x, tuple) and x == y)
            for x, y in zip(self.made_of, now, strict=True)
        )


def in_graph(block_mask: BlockMask) -> GraphMadeMask:
    """A BlockMask that is being traced, as one whose mask_mod is part of the graph."""
    made = GraphMadeMask(**{name: getattr(block_mask, name) for name in BLOCK_MASK_FIELDS})
    made.made_of = tuple(getattr(made, name) for name in BLOCK_MASK_FIELDS)
    return made


def compiled_shapes_for(block_mask: MaskLike | None, query: Tensor, key: Tensor) -> CompiledShapes:
    """The compiled shapes of a mask for these tensors, from the cache if it was used before."""
    if block_mask is None or 0 in (*query.shape[:3], key.shape[2]):
        return _every_pair(query.shape[2], key.shape[2])
    with outside_of_transforms():
        grid = as_grid(block_mask, query, key)
        with outside_of_fake_tensors():
            return compiled_shapes_of(grid)


def _require_constants(mask: MaskLike, recorded: Collection[Tensor]) -> None:
    """What `make_fx` writes down has the mask in it as it is now; it is not one of its inputs."""
    mask_mod = mask.mask_mod if isinstance(mask, (Mask, BlockMask)) else mask
    if not callable(mask_mod):
        return
    with _Noticing(recorded) as noticing:
        trace_mask(mask_mod)
    if noticing.found:
        raise FlexCPError(
            "a mask that captures no tensor which make_fx records",
            "one that does, and would be written down as it is now",
            "make the mask outside of what is recorded, or use torch.compile",
        )


class _Noticing(TorchFunctionMode):
    """Notices whether any of some tensors is used."""

    def __init__(self, tensors: Collection[Tensor]) -> None:
        super().__init__()
        self.tensors, self.found = tensors, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for x in args:
            for y in x if isinstance(x, (tuple, list)) else (x,):
                self.found |= isinstance(y, Tensor) and y in self.tensors
        return func(*args, **(kwargs or {}))


def as_grid(block_mask: MaskLike, query: Tensor, key: Tensor) -> BlockGrid:
    """The grid of whatever is passed as a mask, from the cache if it was used before."""
    recorded = recorded_tensors()
    with outside_of_fake_tensors():
        if recorded and not isinstance(block_mask, BlockGrid):
            _require_constants(block_mask, recorded)
        return _as_grid(block_mask, query, key)


@lru_cache(maxsize=64)
def _every_pair(q_len: int, kv_len: int) -> CompiledShapes:
    return CompiledShapes(full_shapes(q_len, kv_len))


def _as_grid(block_mask: MaskLike, query: Tensor, key: Tensor) -> BlockGrid:
    if isinstance(block_mask, Mask):
        batch, heads, q_len = query.shape[:3]
        return grid_of_mask(block_mask, q_len, key.shape[2], batch=batch, heads=heads)
    if isinstance(block_mask, BlockGrid):
        grid = block_mask
    elif isinstance(block_mask, BlockMask):
        grid = spread(_grid_of_block_mask(block_mask), *query.shape[:2])
    elif callable(block_mask):
        # Nobody can tell what a plain function reads now, so that nothing of it is kept.
        batch, heads, q_len = query.shape[:3]
        return build_block_grid(block_mask, q_len, key.shape[2], batch=batch, heads=heads)
    else:
        raise FlexCPError(
            "block_mask to be a torch BlockMask, a BlockGrid, a Mask or a mask_mod",
            f"{type(block_mask).__name__}",
            "take one from flexcp.masks, or make one with flexcp.build_block_grid",
        )
    check_mask_size(query, key, grid)
    return grid


@dataclass(frozen=True, eq=False)
class _BlockMaskState:
    """What the grid of a BlockMask depends on, to notice that someone changed it since."""

    mask_mod: Callable[..., Tensor]
    sizes: tuple[object, ...]
    lists: tuple[Tensor | None, ...]
    versions: tuple[int | None, ...]
    shows_changes: bool
    """Whether a change in place gives another version: not to a tensor of inference mode."""

    @classmethod
    def of(cls, block_mask: BlockMask) -> _BlockMaskState:
        """The state of a BlockMask as it is now."""
        lists = (
            block_mask.kv_num_blocks,
            block_mask.kv_indices,
            block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices,
        )
        return cls(
            block_mask.mask_mod,
            (*block_mask.seq_lengths, *block_mask.BLOCK_SIZE),
            lists,
            tuple(None if x is None or x.is_inference() else x._version for x in lists),
            not any(x is not None and x.is_inference() for x in lists),
        )

    def is_that_of(self, other: _BlockMaskState) -> bool:
        """Whether nothing differs; tensors are compared by identity and version."""
        return (
            self.mask_mod is other.mask_mod
            and self.sizes == other.sizes
            and self.versions == other.versions
            and all(a is b for a, b in zip(self.lists, other.lists, strict=True))
        )


_MOST_BLOCK_MASKS = 256
"""Of torch's BlockMasks that are alive: those whose grids are kept."""
_block_masks: weakref.WeakKeyDictionary[BlockMask, tuple[_BlockMaskState, BlockGrid]] = (
    weakref.WeakKeyDictionary()
)
_adding_block_masks = threading.Lock()


def _grid_of_block_mask(block_mask: BlockMask) -> BlockGrid:
    """The grid of a BlockMask, made once, and again where its fields have been changed since.

    One made in inference mode is converted in every call: nobody could tell that it has changed.
    """
    state = _BlockMaskState.of(block_mask)
    kept = _block_masks.get(block_mask)
    if kept is not None and kept[0].is_that_of(state) and state.shows_changes:
        return kept[1]
    with tensors_to_keep():
        grid = BlockGrid.from_block_mask(block_mask)
    with _adding_block_masks:
        _block_masks.pop(block_mask, None)
        if state.shows_changes:
            # Other threads and the garbage collector may remove entries at any time: no iteration.
            references = _block_masks.keyrefs()
            for reference in references[: len(references) + 1 - _MOST_BLOCK_MASKS]:
                oldest = reference()
                if oldest is not None:
                    _block_masks.pop(oldest, None)
            _block_masks[block_mask] = (state, grid)
    return grid
