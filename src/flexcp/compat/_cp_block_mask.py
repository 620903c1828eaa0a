"""A rank's part of a BlockMask: its own queries against the keys of all ranks, in rank order."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexcp.eager import run_eagerly_on_cpu
from flexcp.grid import BlockGrid, BlockKind, build_block_grid
from flexcp.layout import Layout
from flexcp.masks import MaskMod
from flexcp.ops.positions import keep_positions


@run_eagerly_on_cpu
def shard_block_mask(
    block_mask: BlockMask, q_layout: Layout, kv_layout: Layout, rank: int
) -> BlockMask:
    """The BlockMask for a rank's queries, with the same block size.

    Keys are those of rank 0, then those of rank 1, and so on, as gathering them gives. Its mask_mod
    counts queries and keys like that too; a score_mod used with it sees global positions.
    """
    device = block_mask.kv_num_blocks.device
    q_at = q_layout.positions(rank).to(device)
    kv_at = kv_layout.order.to(device)
    batch, heads = _batch_and_heads(block_mask)
    batch_elements = max(q_layout.batch_elements, kv_layout.batch_elements)
    if batch_elements > 1 and batch not in (1, batch_elements):
        raise ValueError(
            f"Cannot rearrange buffer: the load balancer has {batch_elements} batch elements, but "
            f"the BlockMask has {batch}."
        )
    size = (int(block_mask.BLOCK_SIZE[0]), int(block_mask.BLOCK_SIZE[1]))
    mask_mod = _relabelled(_rule(block_mask), q_at, kv_at)
    lead = (max(batch, batch_elements), heads)
    if q_at.shape[-1] == 0:
        local = _without_rows(mask_mod, lead, kv_at.shape[-1], size, device)
    else:
        local = build_block_grid(
            mask_mod,
            q_at.shape[-1],
            kv_at.shape[-1],
            block_size=size,
            batch=lead[0],
            heads=lead[1],
        ).to_block_mask(device=device)
    keep_positions(local, q_at, kv_at)
    return local


def _without_rows(
    mask_mod: MaskMod,
    lead: tuple[int, int],
    kv_len: int,
    size: tuple[int, int],
    device: torch.device,
) -> BlockMask:
    """The BlockMask of a rank without tokens, so that it takes part like the others."""
    columns = -(-kv_len // size[1])

    def lists(*shape: int) -> Tensor:
        return torch.zeros(*lead, *shape, dtype=torch.int32, device=device)

    return BlockMask(
        seq_lengths=(0, kv_len),
        kv_num_blocks=lists(0),
        kv_indices=lists(0, columns),
        full_kv_num_blocks=lists(0),
        full_kv_indices=lists(0, columns),
        q_num_blocks=lists(columns),
        q_indices=lists(columns, 0),
        full_q_num_blocks=lists(columns),
        full_q_indices=lists(columns, 0),
        BLOCK_SIZE=size,
        mask_mod=mask_mod,
    )


def _batch_and_heads(block_mask: BlockMask) -> tuple[int, int]:
    counts = block_mask.kv_num_blocks
    lead = (1, 1, *counts.shape[:-1])[-2:]
    return int(lead[0]), int(lead[1])


def _relabelled(mask_mod: MaskMod, q_at: Tensor, kv_at: Tensor) -> MaskMod:
    """A mask_mod of local queries and gathered keys."""
    if q_at.dim() == 2:
        return lambda b, h, q, kv: mask_mod(b, h, q_at[b, q], kv_at[b, kv])
    return lambda b, h, q, kv: mask_mod(b, h, q_at[q], kv_at[kv])


def _rule(block_mask: BlockMask) -> MaskMod:
    """Which pairs a BlockMask allows: its mask_mod, unless its lists of blocks say otherwise."""
    mask_mod: MaskMod = block_mask.mask_mod
    listed = BlockGrid.from_block_mask(block_mask)
    kinds = listed.to_dense()
    built = build_block_grid(
        mask_mod,
        listed.q_len,
        listed.kv_len,
        block_size=listed.block_size,
        batch=listed.batch,
        heads=listed.heads,
    ).to_dense()
    empty, full = int(BlockKind.EMPTY), int(BlockKind.FULL)
    same_blocks = torch.equal(kinds == empty, built == empty)
    if same_blocks and bool(((kinds != full) | (built == full)).all()):
        return mask_mod
    table = kinds.to(block_mask.kv_num_blocks.device)
    rows, columns = listed.block_size

    def as_listed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        one = b * 0 if table.shape[0] == 1 else b
        head = h * 0 if table.shape[1] == 1 else h
        kind = table[one, head, q // rows, kv // columns]
        return (kind == full) | ((kind != empty) & mask_mod(b, h, q, kv))

    return as_listed
