"""Attention with a score_mod inside torch.compile, in one graph for any mask and any length.

`traced.py` writes out the blocks of one mask, so that its graph is of that mask alone. This is what
is compiled once that has changed: blocks of rows against all keys, as many for all lengths of a
wide range, and the mask read where the graph runs, by its handle. A mask that is made inside the
graph has no handle; its function is part of the graph as the score_mod is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from flexcp.graph_handles import owner_of
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.interface import pairs_within
from flexcp.kernels.merge import accumulation_dtype
from flexcp.kernels.score import ScoreFunction
from flexcp.ops.arguments import needs_gradients
from flexcp.ops.dropout import traced_kept
from flexcp.ops.mask_cache import compiled_shapes_for
from flexcp.ops.traced_scores import (
    ScoreSemantics,
    attend_to_scores,
    fully_masked_rows,
    is_recomputed,
    over_axes,
    run_block,
    semantics_of,
)

_MOST_ROWS = 1024
"""Of a block, whose scores against all keys are in memory at a time."""
_FEWEST_BLOCKS = 2


def attend_by_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forbidden: Callable[[Tensor], Tensor] | None,
    mask_mod: Callable[..., Tensor] | None,
    score_mod: ScoreFunction | None,
    scale: float,
    sinks: Tensor | None,
    dropout: Dropout | None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and the largest scores.

    Args:
        q: [B, H, Lq, D].
        k: [B, G, Lkv, D].
        v: [B, G, Lkv, Dv].
        forbidden: Which pairs of some rows may not attend, as a mask says that the graph does not
            know; None if there is none.
        mask_mod: A mask that is part of the graph.
        score_mod: The score function.
        scale: Factor on the scores.
        sinks: [H] logits that join each row's denominator.
        dropout: Which weights are dropped.
        positions: int64 [Lq] Global positions of the queries; None if they are all of a sequence.
    """
    dtype, device = accumulation_dtype(q.dtype), q.device
    batch, heads, length = q.shape[:3]
    if length == 0 or k.shape[2] == 0:
        return fully_masked_rows(q, v, sinks)
    blocks = _row_blocks(length)
    rows = (length + blocks - 1) // blocks
    b, h = torch.arange(batch, device=device), torch.arange(heads, device=device)
    # The last row fills up the last block: whatever is computed for it is computed for a real row.
    # Rows are looked up, not sliced: a graph would be tied to lengths that the blocks divide.
    q_at = [
        (torch.arange(rows, device=device) + i * rows).clamp(max=length - 1) for i in range(blocks)
    ]
    kv_at = torch.arange(k.shape[2], device=device)
    scaled = q.to(dtype) * scale
    keys, values = (x.to(dtype).repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    sink = None if sinks is None else sinks.to(dtype)[None, :, None, None]
    again = is_recomputed(needs_gradients(q, k, v, sinks), batch * heads * length * k.shape[2])

    def block_of_rows(
        i: int, semantics: ScoreSemantics, q: Tensor, k: Tensor, v: Tensor
    ) -> list[Tensor]:
        rows_at = q_at[i]
        at = rows_at if positions is None else positions.index_select(0, rows_at)
        scores = q @ k.transpose(-1, -2)
        allowed = None if forbidden is None else ~forbidden(rows_at)
        if mask_mod is not None:
            within = over_axes(mask_mod, (), (b, h, at, kv_at))
            allowed = within if allowed is None else allowed & within
        if score_mod is not None:
            scores = semantics.modify(score_mod, scores, allowed, b, h, at, kv_at)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        kept = None
        if dropout is not None:
            q_pos, kv_pos = at, kv_at
            if dropout.positions is not None:
                q_pos, kv_pos = (
                    x[picked] if x.dim() == 1 else x[:, None, picked]
                    for x, picked in zip(dropout.positions, (rows_at, kv_at), strict=True)
                )
            kept = traced_kept(
                dropout, b[:, None, None, None], h[:, None, None], q_pos[..., None],
                kv_pos[..., None, :],
            )  # fmt: skip
        return attend_to_scores(scores, v, sink, kept, 1.0 if dropout is None else dropout.factor)

    semantics = semantics_of(again, score_mod, b, h, q_at[0], kv_at)
    parts = [
        run_block(
            again, semantics, partial(block_of_rows, i),
            scaled.index_select(2, q_at[i]), keys, values,
        )
        for i in range(blocks)
    ]  # fmt: skip
    real = torch.arange(length, device=device)
    out, lse, highest = (
        torch.cat(x, dim=2).index_select(2, real) for x in zip(*parts, strict=True)
    )
    return out.to(q.dtype), lse, highest.detach()


def _row_blocks(length: int) -> int:
    """Into how many blocks rows are cut; a graph is of all lengths that have the same number.

    >>> _row_blocks(300), _row_blocks(2048), _row_blocks(2049)
    (2, 2, 8)
    """
    blocks = _FEWEST_BLOCKS
    while blocks * _MOST_ROWS < length:
        blocks *= 4
    return blocks


def by_handle(handle: Tensor | None, q: Tensor, k: Tensor) -> Callable[[Tensor], Tensor] | None:
    """What `attend_by_rows` asks of the mask that a handle stands for; None for none."""
    if handle is None:
        return None
    shape_of = (q.detach(), k.detach())

    def forbidden(rows: Tensor) -> Tensor:
        found: Tensor = forbidden_pairs(handle, *shape_of, rows)
        return found

    return forbidden


@torch.library.custom_op("flexcp::forbidden_pairs", mutates_args=())
def forbidden_pairs(handle: Tensor, q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """Bool [B, H, rows, Lkv]: where a pair may not attend, by the mask that a handle stands for.

    Args:
        handle: The mask's.
        q: [B, H, Lq, D], of which only the shape is read.
        k: [B, G, Lkv, D], of which only the shape is read.
        rows: int64 The queries asked for, ascending.
    """
    mask = owner_of(handle, keep=True)
    shapes = compiled_shapes_for(mask, q, k)  # type: ignore[arg-type]
    batch, heads, kv_len = q.shape[0], q.shape[1], k.shape[2]
    asked = rows.cpu()
    first = int(asked[0]) if len(asked) else 0
    last = int(asked[-1]) + 1 if len(asked) else 0
    found = torch.ones(batch, heads, len(asked), kv_len, dtype=torch.bool)
    for group in shapes.head_groups(batch, heads, k.shape[1]):
        allowed = pairs_within(shapes.shapes.planes[group.plane], first, last, 0, kv_len)
        forbidden = ~allowed[asked - first]
        for b in group.batch_elements:
            for h in group.q_heads:
                found[b, h] = forbidden
    return found.to(q.device)


@forbidden_pairs.register_fake
def _(handle: Tensor, q: Tensor, k: Tensor, rows: Tensor) -> Tensor:  # noqa: ARG001
    return q.new_empty((q.shape[0], q.shape[1], rows.shape[0], k.shape[2]), dtype=torch.bool)
