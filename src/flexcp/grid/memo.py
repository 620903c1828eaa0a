"""Grids that are built once: shared by equal masks, or kept with the mask of a user's function."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexcp.caches import BoundedByBytes, Newest
from flexcp.eager import tensors_to_keep
from flexcp.grid.build import build_block_grid
from flexcp.grid.grid import BlockGrid
from flexcp.masks import Mask

_MOST_SHARED_BYTES = 1 << 28
"""Bytes of shared grids and of their masks: what a million-token pack takes, a few dozen times."""
_ENTRY_BYTES = 4096
"""What the Python objects of a mask and its grid take, about."""
_GRIDS_PER_MASK = 16
"""Grids kept with the mask of a user's function, one for each of the last sizes of its calls."""

Sizes = tuple[int, int, int, int, tuple[int, int]]
"""q_len, kv_len, batch, heads, block_size."""


@dataclass(frozen=True, eq=False)
class GridsBySize:
    """The grids of one mask object that is equal to no other."""

    grids: Newest[Sizes, BlockGrid] = field(default_factory=lambda: Newest(_GRIDS_PER_MASK))


def _nbytes(key: tuple[Mask, Sizes], grid: BlockGrid) -> int:
    return _ENTRY_BYTES + key[0].nbytes + grid.nbytes


shared_grids: BoundedByBytes[tuple[Mask, Sizes], BlockGrid] = BoundedByBytes(
    _MOST_SHARED_BYTES, _nbytes
)
"""The grids of masks that are values. A mask of a user's function keeps its grids to itself."""


def grid_of_mask(
    mask: Mask,
    q_len: int,
    kv_len: int,
    *,
    batch: int = 1,
    heads: int = 1,
    block_size: tuple[int, int] = (128, 128),
    by_rows: bool = False,
) -> BlockGrid:
    """As `build_block_grid`, but equal masks give the same grid for as long as it is kept.

    >>> from flexcp import masks
    >>> documents = [masks.causal() & masks.document(lengths=[30, 70]) for _ in range(2)]
    >>> grid_of_mask(documents[0], 100, 100) is grid_of_mask(documents[1], 100, 100)
    True
    """
    sizes = (q_len, kv_len, batch, heads, block_size)
    if mask.is_value:
        found = shared_grids.get((mask, sizes))
        if found is None:
            found = shared_grids.add((mask, sizes), _built(mask, sizes, by_rows))
        return found
    own = mask.derived.once(GridsBySize, GridsBySize).grids
    grid = own.get(sizes)
    if grid is None:
        grid = _built(mask, sizes, by_rows)
        own.add(sizes, grid)
    return grid


def _built(mask: Mask, sizes: Sizes, by_rows: bool) -> BlockGrid:
    q_len, kv_len, batch, heads, block_size = sizes
    with tensors_to_keep():
        return build_block_grid(
            mask,
            q_len,
            kv_len,
            batch=batch,
            heads=heads,
            block_size=block_size,
            by_rows=by_rows,
        )
