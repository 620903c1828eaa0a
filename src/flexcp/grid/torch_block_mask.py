"""BlockGrid to and from torch's BlockMask, field for field."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexcp.eager import run_eagerly_on_cpu
from flexcp.errors import FlexCPError, as_whole, check_flags, quote
from flexcp.grid.grid import BlockGrid, planes_read
from flexcp.grid.planes import Planes
from flexcp.grid.runs import BlockKind, Runs
from flexcp.masks import Mask

_MOST_TILES = 1 << 24
"""Tiles ordered at a time."""


@run_eagerly_on_cpu
def to_block_mask(
    grid: BlockGrid, *, device: torch.device | str = "cpu", separate_full_blocks: bool = True
) -> BlockMask:
    """What `create_block_mask` would have made from the grid's mask.

    torch counts the padding of a last, shorter tile as forbidden, so a full one is partial there.
    torch's format lists every tile: it needs memory for rows x columns, where a grid does not.
    """
    check_flags(separate_full_blocks=separate_full_blocks)
    device = as_device(device)
    planes = [_as_torch_sees_it(grid, runs) for runs in grid.runs]
    partial = _lists(planes, BlockKind.PARTIAL, separate_full_blocks, grid.planes.of, device)
    full: tuple[Tensor | None, ...] = (None, None, None, None)
    if separate_full_blocks:
        full = _lists(planes, BlockKind.FULL, True, grid.planes.of, device)
    return BlockMask(
        seq_lengths=(grid.q_len, grid.kv_len),
        kv_num_blocks=partial[0],
        kv_indices=partial[1],
        full_kv_num_blocks=full[0],
        full_kv_indices=full[1],
        q_num_blocks=partial[2],
        q_indices=partial[3],
        full_q_num_blocks=full[2],
        full_q_indices=full[3],
        BLOCK_SIZE=grid.block_size,
        mask_mod=grid.mask.shifted(grid.q_start, grid.kv_start).mask_mod,
    )


@run_eagerly_on_cpu
def from_block_mask(block_mask: BlockMask) -> BlockGrid:
    """The grid of a BlockMask's lists, which count also where its mask_mod would allow more."""
    if not isinstance(block_mask, BlockMask):
        raise FlexCPError(
            "a torch BlockMask",
            f"{type(block_mask).__name__}",
            "make one with create_block_mask, or build a grid from the mask itself",
        )
    q_len, kv_len = (int(n) for n in block_mask.seq_lengths)
    size = (int(block_mask.BLOCK_SIZE[0]), int(block_mask.BLOCK_SIZE[1]))
    rows, cols = -(-q_len // size[0]), -(-kv_len // size[1])
    lists = _with_batch_and_heads(block_mask.kv_num_blocks, block_mask.kv_indices)
    kinds = int(BlockKind.PARTIAL) * _listed(*lists, rows, cols)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full_lists = _with_batch_and_heads(
            block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        )
        kinds = torch.where(_listed(*full_lists, rows, cols) > 0, int(BlockKind.FULL), kinds)
    mask = Mask(block_mask.mask_mod)
    planes = _planes(kinds, mask)
    runs = tuple(Runs.from_dense(kinds[b, h]) for b, h in zip(planes.b, planes.h, strict=True))
    return BlockGrid(q_len, kv_len, size, planes, runs, mask)


class SpreadGrids:
    """The grids that `spread` has made of one, by batch elements and heads."""

    def __init__(self) -> None:
        self.grids: dict[tuple[int, int], BlockGrid] = {}


def spread(grid: BlockGrid, batch: int, heads: int) -> BlockGrid:
    """The grid of a BlockMask whose lists hold for all batch elements or heads, for each of them.

    So many there are; where the mask_mod depends on them, it decides for each in partial tiles.
    """
    size = (
        batch if grid.batch == 1 < batch and "b" in grid.reads else grid.batch,
        heads if grid.heads == 1 < heads and "h" in grid.reads else grid.heads,
    )
    if size == (grid.batch, grid.heads):
        return grid
    kept = grid.derived.once(SpreadGrids, SpreadGrids).grids
    if size not in kept:
        planes = Planes.each(*size)
        runs = tuple(grid.runs[plane] for plane in grid.planes.of.expand(size).flatten().tolist())
        kept[size] = BlockGrid(grid.q_len, grid.kv_len, grid.block_size, planes, runs, grid.mask)
    return kept[size]


def _planes(kinds: Tensor, mask: Mask) -> Planes:
    """Batch elements and heads with the same lists share a plane, if the mask can't differ."""
    batch, heads = kinds.shape[:2]
    if batch * heads == 1 or planes_read(mask) != frozenset():
        return Planes.each(batch, heads)
    every = torch.arange(batch * heads)
    lists = kinds.reshape(batch * heads, -1)
    _, plane = torch.unique(lists, dim=0, return_inverse=True)
    own = torch.full((int(plane.max()) + 1,), batch * heads)
    own.scatter_reduce_(0, plane, every, "amin")  # the first with these lists
    return Planes(own // heads, own % heads, plane.view(batch, heads))


def _as_torch_sees_it(grid: BlockGrid, runs: Runs) -> Tensor:
    """int8 [rows, cols] Kinds, where a shorter last tile is never full."""
    dense = runs.to_dense()
    for axis, length in enumerate((grid.q_len, grid.kv_len)):
        if length % grid.block_size[axis]:
            last = dense.select(axis, -1)
            last[last == BlockKind.FULL] = int(BlockKind.PARTIAL)
    return dense


def _lists(
    planes: list[Tensor],
    kind: BlockKind,
    only: bool,
    of: Tensor,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counts and indices of tiles by row, then by column, for all batch elements and heads."""
    chosen = [dense == kind if only else dense > 0 for dense in planes]
    by_row = [_ordered(tiles) for tiles in chosen]
    by_col = [_ordered(tiles.T) for tiles in chosen]
    found = (
        torch.stack([part[n] for part in order])[of] for order in (by_row, by_col) for n in (0, 1)
    )
    try:
        a, b, c, d = (x.to(device) for x in found)
    except RuntimeError as error:
        raise _no_device(device) from error
    return a, b, c, d


def as_device(device: object) -> torch.device:
    """The device by that name or number, or an error.

    >>> as_device("cpu")
    device(type='cpu')
    """
    if isinstance(device, torch.device):
        return device
    try:
        known = device if isinstance(device, str) else as_whole(device)
        if known is not None:
            return torch.device(known)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_device(device) from error
    raise _no_device(device)


def _no_device(device: object) -> FlexCPError:
    return FlexCPError("a device that torch has", quote(device), 'pass device="cpu" or "cuda"')


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """int32 [rows], [rows, cols] How many are chosen in each row; those columns, then the rest."""
    rows, cols = tiles.shape
    counts = torch.empty(rows, dtype=torch.int32)
    order = torch.empty(rows, cols, dtype=torch.int32)
    column = torch.arange(cols, dtype=torch.int32)
    for at in torch.arange(rows).split(max(1, _MOST_TILES // cols)):
        chosen = tiles[at[0] : at[-1] + 1]
        before = chosen.cumsum(1, dtype=torch.int32)
        total = before[:, -1:]
        place = torch.where(chosen, before - 1, total + column - before)
        order[at] = torch.empty_like(before).scatter_(1, place.long(), column.expand(place.shape))
        counts[at] = total[:, 0]
    return counts, order


def _with_batch_and_heads(counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    missing = 4 - indices.dim()
    return counts[(None,) * missing].cpu(), indices[(None,) * missing].cpu()


def _listed(counts: Tensor, indices: Tensor, rows: int, cols: int) -> Tensor:
    """int8 [batch, heads, rows, cols] 1 where a tile is in a row's list."""
    batch, heads, have_rows, width = indices.shape
    if have_rows < rows:
        raise FlexCPError(
            f"block lists for {rows} rows of tiles, as the BlockMask's seq_lengths say",
            f"{have_rows}",
            "make the BlockMask with seq_lengths=(q_len, kv_len) that fit its lists",
        )
    listed = torch.arange(width) < counts[..., None]
    dense = torch.zeros(batch, heads, rows, cols + 1, dtype=torch.int8)
    column = torch.where(listed & (indices < cols), indices.long(), cols)[:, :, :rows]
    dense.scatter_(3, column, 1)
    return dense[..., :cols]
