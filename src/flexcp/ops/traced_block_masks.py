"""BlockMasks that the function which torch.compile traces has made, or assigned to.

`BlockMask.from_kv_blocks`, a slice, `_adjust` and `to` make a new one; decoding code assigns its
mask_mod. Such a mask has no handle to be found by when the graph runs: its lists are tensors of
the graph, and its mask_mod is traced with everything else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexcp.errors import FlexCPError
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.score import ScoreFunction
from flexcp.ops.arguments import check_mask_lengths
from flexcp.ops.mask_cache import GraphMadeMask
from flexcp.ops.positions import in_translation, looking_up, positions_of
from flexcp.ops.traced_rows import attend_by_rows
from flexcp.torch_names import constant_in_graphs, is_made_while_traced, look_while_traced


def is_of_the_graph(mask: object) -> TypeGuard[BlockMask]:
    """Whether a mask is a BlockMask that the code being traced has made, or assigned to."""
    if not isinstance(mask, BlockMask):
        return False
    if isinstance(mask, GraphMadeMask):
        return True
    look_while_traced(_look)
    return _take_answer()


class _Looking(threading.local):
    """Holds an answer from one step of a trace to the next."""

    answer = False


_looking = _Looking()


def _look(seen: Any) -> None:
    _looking.answer = is_made_while_traced(seen, "mask")


@constant_in_graphs
def _take_answer() -> bool:
    answer, _looking.answer = _looking.answer, False
    return answer


def in_graph_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    score_mod: ScoreFunction | None,
    scale: float,
    sinks: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and the largest scores of one device, with a BlockMask of the graph."""
    _check_size(mask, q, k)
    positions = positions_of(mask, q.device)
    dropout = Dropout(dropout_p, seed, positions=positions) if seed is not None else None
    if positions is not None and score_mod is not None:
        score_mod = looking_up(score_mod, *positions)
    found: tuple[Tensor, Tensor, Tensor] = in_translation(
        positions, attend_by_rows, q, k, v, None, _mask_mod_of(mask), score_mod, scale, sinks,
        dropout,
    )  # fmt: skip
    return found


def _check_size(mask: BlockMask, q: Tensor, k: Tensor) -> None:
    """Raises unless a BlockMask was made for tensors like these; see `check_mask_size`."""
    check_mask_lengths(q, k, *mask.seq_lengths)
    rows = mask.kv_num_blocks.shape[-1] * mask.BLOCK_SIZE[0]
    if rows < q.shape[2]:
        raise FlexCPError(
            f"a block_mask with lists for {q.shape[2]} queries",
            f"one with lists for {rows}",
            "make it with a list for every block of queries",
        )
    for name, size, have in zip(
        ("batch elements", "heads"), q.shape[:2], _planes(mask.kv_num_blocks), strict=True
    ):
        if have not in (1, size):
            raise FlexCPError(
                f"a block_mask for {size} {name}, or for one that stands for all",
                f"one for {have}",
                "make it for as many as the query has, or with B=None and H=None",
            )


def _planes(num_blocks: Tensor) -> tuple[int, int]:
    """Batch elements and heads that lists are of."""
    batch, heads = (1, 1, *num_blocks.shape[:-1])[-2:]
    return batch, heads


def _mask_mod_of(block_mask: BlockMask) -> Callable[..., Tensor]:
    """The mask_mod of a BlockMask of the graph, which allows no more than its lists do.

    As in a kernel, pairs of a full tile are allowed without asking the mask_mod.
    """
    mask_mod = block_mask.mask_mod
    if isinstance(block_mask, GraphMadeMask) and block_mask.is_as_made():
        return mask_mod
    q_size, kv_size = block_mask.BLOCK_SIZE
    columns = (block_mask.seq_lengths[1] + kv_size - 1) // kv_size
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    full = None
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)

    def allowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        tile = (q // q_size, kv // kv_size)
        found = _looked_up(partial, b, h, *tile) & mask_mod(b, h, q, kv)
        return found if full is None else found | _looked_up(full, b, h, *tile)

    return allowed


def _listed(num_blocks: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Bool [B, H, rows, columns]: the tiles of a list; B and H are 1 where it holds for all.

    >>> _listed(torch.tensor([[[1, 2]]]), torch.tensor([[[[1, 0], [0, 1]]]]), 2).int().tolist()
    [[[[0, 1], [1, 1]]]]
    """
    while num_blocks.dim() < 3:
        num_blocks, indices = num_blocks[None], indices[None]
    places = torch.arange(indices.shape[-1], device=indices.device)
    # Places that are not in use, and tiles that were cropped, go to a column that is cut off.
    used = torch.where(places < num_blocks[..., None], indices, columns).clamp(max=columns)
    nothing = torch.zeros((*num_blocks.shape, columns + 1), dtype=torch.bool, device=indices.device)
    return nothing.scatter(-1, used.long(), True)[..., :columns]


def _looked_up(tiles: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
    b = b if tiles.shape[0] > 1 else torch.zeros_like(b)
    h = h if tiles.shape[1] > 1 else torch.zeros_like(h)
    return tiles[b, h, row, column]
