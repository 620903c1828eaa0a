"""Strips: small pieces computed by batched matrix products, with any score function.

At 128 rows a strip's scores stay in cache, and the time goes into the matrix products. Key heads
that several query heads share are never repeated: those heads become further rows.

Letters in names: N batch elements times key heads, R query heads per key head, T rows and U keys
of a strip, D head dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.kernels.program import Piece
from flexcp.kernels.score import ScoreMod

_CHUNK_PER_THREAD = 1 << 20
"""Scores held at a time, per thread."""
_CHUNK_MOST = 1 << 24


@dataclass(frozen=True, eq=False)
class Rows:
    """The tensors of a lane, with its heads laid out for batched products."""

    q_NRLD: Tensor  # noqa: N815
    k_NLD: Tensor  # noqa: N815
    v_NLD: Tensor  # noqa: N815
    scale: float
    b_N: Tensor  # noqa: N815
    """int64 Batch element of each n."""
    h_NR: Tensor  # noqa: N815
    """int64 Query head of each n, r."""
    q_positions: Tensor
    kv_positions: Tensor

    def scaled_q(self, chunk: slice, piece: Piece) -> Tensor:
        """The rows of a piece, times the scale, in the accumulation type: [N, R*T, D]."""
        q = self.q_NRLD[chunk, :, piece.q0 : piece.q1]
        q = q.to(self.k_NLD.dtype) * self.scale
        return q.reshape(q.shape[0], -1, q.shape[-1])


class Workspace:
    """Two blocks of memory that hold scores, used again by every piece of a call."""

    def __init__(self, rows: Rows, largest_strip: int) -> None:
        n, r = rows.q_NRLD.shape[:2]
        most = min(_CHUNK_PER_THREAD * torch.get_num_threads(), _CHUNK_MOST)
        self.size = min(n * r * largest_strip, max(most, r * largest_strip))
        self._blocks = [rows.k_NLD.new_empty(self.size) for _ in range(2)]

    def block(self, which: int, *shape: int) -> Tensor:
        """Uninitialised memory of some shape, in block 0 or 1."""
        size = 1
        for n in shape:
            size *= n
        return self._blocks[which][:size].view(shape)

    def chunks(self, rows: Rows, piece: Piece) -> Iterator[slice]:
        """The n of a piece in groups that fit."""
        n, r = rows.q_NRLD.shape[:2]
        step = max(1, self.size // (r * piece.rows * piece.keys))
        for first in range(0, n, step):
            yield slice(first, min(first + step, n))


def strip_forward(
    rows: Rows, piece: Piece, chunk: slice, mod: ScoreMod | None, work: Workspace
) -> tuple[Tensor, Tensor, Tensor]:
    """The partial result over a strip: out [N, R, T, D], lse and largest score [N, R, T]."""
    q = rows.scaled_q(chunk, piece)
    k = rows.k_NLD[chunk, piece.k0 : piece.k1]
    v = rows.v_NLD[chunk, piece.k0 : piece.k1]
    n, r = q.shape[0], rows.q_NRLD.shape[1]
    scores = work.block(0, n, q.shape[1], piece.keys)
    torch.bmm(q, k.transpose(1, 2), out=scores)
    if mod is not None:
        tile = scores.view(n, r, piece.rows, piece.keys)
        scores = _modified(rows, piece, chunk, mod, tile).reshape(scores.shape)
    _forbid(scores, piece)
    highest = scores.amax(-1, keepdim=True)
    if mod is None and not piece.has_blind_rows:
        weights = torch.softmax(scores, -1, out=work.block(1, *scores.shape))
        out = torch.bmm(weights, v)
        # The largest weight is exp(highest - lse).
        lse = highest - weights.amax(-1, keepdim=True).log_()
    else:
        # Rows of -inf: a finite stand-in for their maximum makes all their weights 0, not NaN.
        safe = highest.clamp(min=torch.finfo(scores.dtype).min)
        weights = torch.sub(scores, safe, out=work.block(1, *scores.shape)).exp_()
        total = weights.sum(-1, keepdim=True)
        out = torch.bmm(weights, v)
        out.div_(total.masked_fill(total == 0, 1.0))
        lse = total.log_().add_(safe)
    heads_and_rows = (n, r, piece.rows)
    return (
        out.view(*heads_and_rows, -1),
        lse.view(heads_and_rows),
        highest.view(heads_and_rows),
    )


@dataclass(frozen=True, eq=False)
class Sums:
    """Where backward strips add their results, all in the accumulation type."""

    q_NRLD: Tensor  # noqa: N815
    k_NLD: Tensor  # noqa: N815
    v_NLD: Tensor  # noqa: N815
    captured: list[Tensor]
    """One for each captured tensor that needs a gradient."""


def strip_backward(
    rows: Rows,
    piece: Piece,
    chunk: slice,
    mod: ScoreMod | None,
    work: Workspace,
    grad_out_NRLD: Tensor,  # noqa: N803
    lse_NRL: Tensor,  # noqa: N803
    delta_NRL: Tensor,  # noqa: N803
    sums: Sums,
) -> None:
    """Adds a strip's share of the gradients to `sums`.

    Args:
        rows: the lane's tensors.
        piece: the strip.
        chunk: which n.
        mod: the score function.
        work: scratch memory.
        grad_out_NRLD: gradient of out, in the accumulation type.
        lse_NRL: the *global* lse; +inf for rows that see nothing at all.
        delta_NRL: the row sums of out * grad_out, minus the gradient of lse.
        sums: what to add to.
    """
    q = rows.scaled_q(chunk, piece)
    k = rows.k_NLD[chunk, piece.k0 : piece.k1]
    v = rows.v_NLD[chunk, piece.k0 : piece.k1]
    n, r = q.shape[0], rows.q_NRLD.shape[1]

    def of_piece(x: Tensor) -> Tensor:
        part = x[chunk, :, piece.q0 : piece.q1]
        return part.reshape(n, r * piece.rows, -1)

    grad_out, lse, delta = of_piece(grad_out_NRLD), of_piece(lse_NRL), of_piece(delta_NRL)
    scores = work.block(0, n, q.shape[1], piece.keys)
    modified = None
    if mod is None:
        torch.baddbmm(lse.neg(), q, k.transpose(1, 2), out=scores)
        _forbid(scores, piece)
        weights = scores.exp_()
    else:
        torch.bmm(q, k.transpose(1, 2), out=scores)
        tile = scores.view(n, r, piece.rows, piece.keys).requires_grad_()
        with torch.enable_grad():
            modified = _modified(rows, piece, chunk, mod, tile)
        weights = modified.detach().reshape(scores.shape) - lse
        _forbid(weights, piece)
        weights.exp_()
    sums.v_NLD[chunk, piece.k0 : piece.k1].baddbmm_(weights.transpose(1, 2), grad_out)
    grad_scores = work.block(1, *scores.shape)
    torch.baddbmm(delta.neg(), grad_out, v.transpose(1, 2), out=grad_scores)
    grad_scores.mul_(weights)
    if mod is not None:
        assert modified is not None
        grad_scores = mod.pull_back(tile, modified, grad_scores.view(tile.shape), sums.captured)
        grad_scores = grad_scores.reshape(scores.shape)
    sums.k_NLD[chunk, piece.k0 : piece.k1].baddbmm_(grad_scores.transpose(1, 2), q)
    grad_q = torch.bmm(grad_scores, k).view(n, r, piece.rows, -1)
    target = sums.q_NRLD[chunk, :, piece.q0 : piece.q1]
    if piece.fresh:
        torch.mul(grad_q, rows.scale, out=target)
    else:
        target.add_(grad_q, alpha=rows.scale)


def _modified(rows: Rows, piece: Piece, chunk: slice, mod: ScoreMod, tile: Tensor) -> Tensor:
    return mod.apply(
        tile,
        rows.b_N[chunk],
        rows.h_NR[chunk],
        rows.q_positions[piece.q0 : piece.q1],
        rows.kv_positions[piece.k0 : piece.k1],
    )


def _forbid(scores: Tensor, piece: Piece) -> None:
    """Sets the scores of forbidden pairs to -inf."""
    if not piece.forbidden:
        return
    tile = scores.view(-1, piece.rows, piece.keys)
    for edge in piece.forbidden:
        tile[:, :, edge.c0 : edge.c1].masked_fill_(edge.pairs.to(scores.device), -torch.inf)


@contextlib.contextmanager
def deterministic_sums() -> Iterator[None]:
    """Scatter-adds in a fixed order: the gradients of captured tensors are made of them."""
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
