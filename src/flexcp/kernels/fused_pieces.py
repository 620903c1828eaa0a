"""Fused pieces: the parts of a program that a fused op computes, put where they belong.

A piece is a rectangle, a causal square, or a band. The rows of a band are taken in blocks of a few:
with the keys that any of its rows sees, each is a small rectangle with slanted edges, the same for
all, so that one call computes them all as a batch, on views that overlap, with one bias.
"""

from __future__ import annotations

from torch import Tensor

from flexcp.kernels.fused import FusedOp, as_rows
from flexcp.kernels.merge import merge_into
from flexcp.kernels.program import Piece
from flexcp.kernels.strips import bias_of, keys_of, rows_of


def fused_forward(
    fused: FusedOp,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    piece: Piece,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Leaves a piece's result in its rows of `out` and `lse`, merged with what is there already."""
    if piece.blocks > 1:
        for b in range(q.shape[0]):
            # Before views overlap: a copy of those would hold every key dozens of times.
            own_q, own_k, own_v = as_rows(q[b], k[b], v[b])
            part, part_lse = _band(fused, own_q, own_k, own_v, piece, scale)
            _store(out[b], lse[b], part, part_lse, piece)
        return
    own = rows_of(q, piece), keys_of(k, piece), keys_of(v, piece)
    _store(out, lse, *fused.mode(piece.causal)(*own, scale), piece)


def fused_backward(
    fused: FusedOp,
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    piece: Piece,
    scale: float,
    sums: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Adds a piece's gradients to `sums` of q, k and v.

    `given` are the gradient of out, q, k, v, and the global out and lse.
    """
    grad_out, q, k, v, out, lse = given
    part_q, part_k, part_v = fused.backward_mode(piece.causal)(
        rows_of(grad_out, piece), rows_of(q, piece), keys_of(k, piece), keys_of(v, piece),
        rows_of(out, piece), rows_of(lse, piece), scale,
    )  # fmt: skip
    target = rows_of(sums[0], piece)
    if piece.first_write:
        target.copy_(part_q)
    else:
        target.add_(part_q)
    keys_of(sums[1], piece).add_(part_k)
    keys_of(sums[2], piece).add_(part_v)


def _band(
    fused: FusedOp, q: Tensor, k: Tensor, v: Tensor, piece: Piece, scale: float
) -> tuple[Tensor, Tensor]:
    """The result of a band for one batch element: q is [H, L, D], k and v are [G, L, D].

    Heads are the op's batch, and blocks its heads: threads then go from a block to the next, whose
    keys are nearly the same. Query heads that share keys stand side by side, as the op expects.
    """
    assert fused.masked_forward is not None
    rows, heads = piece.rows // piece.blocks, k.shape[0]
    bias = bias_of(piece.forbidden[0], q.dtype, q.device)
    q = rows_of(q, piece, 1).unflatten(1, (-1, rows)).unflatten(0, (heads, -1))
    k, v = (keys_of(x, piece, 1).unfold(1, bias.shape[1], rows).transpose(2, 3) for x in (k, v))
    found = fused.masked_forward(q.transpose(1, 2).flatten(1, 2), k, v, bias, scale)
    by_block = (x.unflatten(1, (piece.blocks, -1)).transpose(1, 2) for x in found)
    out, lse = (x.flatten(2, 3).flatten(0, 1) for x in by_block)
    return out, lse


def _store(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, piece: Piece) -> None:
    """Writes a piece's result to its rows of `out` and `lse`, or merges it with what is there."""
    out, lse = rows_of(out, piece, out.dim() - 2), rows_of(lse, piece, lse.dim() - 1)
    if piece.first_write:
        out.copy_(part)
        lse.copy_(part_lse)
    else:
        merge_into(out, lse, part.to(out.dtype), part_lse.to(lse.dtype))
