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

from flexcp.kernels.program import Piece, Program
from flexcp.kernels.score import ScoreMod

_CHUNK_PER_THREAD = 1 << 20
"""Scores held at a time, per thread."""
_CHUNK_MOST = 1 << 24


def n_of(x: Tensor, chunk: slice) -> Tensor:
    """The part of dimension 0 that a chunk covers."""
    start: int = chunk.start
    return x.narrow(0, start, chunk.stop - start)


def rows_of(x: Tensor, piece: Piece, dim: int = 2) -> Tensor:
    """The query rows of a piece."""
    return x.narrow(dim, piece.q0, piece.rows)


def keys_of(x: Tensor, piece: Piece, dim: int = 2) -> Tensor:
    """The keys of a piece."""
    return x.narrow(dim, piece.k0, piece.keys)


@dataclass(frozen=True, eq=False)
class Rows:
    """The tensors of a lane, with its heads laid out for batched products."""

    q_NRLD: Tensor  # noqa: N815
    """Times the scale, in the accumulation type, as all of these."""
    k_NLD: Tensor  # noqa: N815
    k_scaled_NLD: Tensor | None  # noqa: N815
    """Keys times the scale; the backward pass needs them."""
    v_NLD: Tensor  # noqa: N815
    b_N: Tensor  # noqa: N815
    """int64 Batch element of each n."""
    h_NR: Tensor  # noqa: N815
    """int64 Query head of each n, r."""
    q_positions: Tensor
    kv_positions: Tensor

    def q_of(self, chunk: slice, piece: Piece) -> Tensor:
        """The rows of a piece, [N, R*T, D]; a view unless key heads are shared."""
        q = rows_of(n_of(self.q_NRLD, chunk), piece)
        return q.reshape(q.shape[0], -1, q.shape[-1])


class Workspace:
    """Blocks of memory, used again by every piece of a call: for a product, and for scores.

    Allocating them anew each time would cost as much as a matrix product.
    """

    def __init__(self, rows: Rows, program: Program, *, scored: bool) -> None:
        n, r = rows.q_NRLD.shape[:2]
        largest = program.largest_strip
        most = min(_CHUNK_PER_THREAD * torch.get_num_threads(), _CHUNK_MOST)
        self.size = min(n * r * largest, max(most, r * largest))
        dim = max(rows.k_NLD.shape[-1], rows.v_NLD.shape[-1])
        product = max(
            dim * max(r * piece.rows, piece.keys) * self._step(rows, piece)
            for piece in program.pieces
            if not piece.fused
        )
        sizes = (product, self.size, self.size, *([self.size] if scored else []))
        self._blocks = [rows.k_NLD.new_empty(size) for size in sizes]

    def _step(self, rows: Rows, piece: Piece) -> int:
        n, r = rows.q_NRLD.shape[:2]
        return min(n, max(1, self.size // (r * piece.rows * piece.keys)))

    def block(self, which: int, *shape: int) -> Tensor:
        """Uninitialised memory of some shape: block 0 is for a product, the others for scores."""
        size = 1
        for n in shape:
            size *= n
        return self._blocks[which].narrow(0, 0, size).view(shape)

    def chunks(self, rows: Rows, piece: Piece) -> Iterator[slice]:
        """The n of a piece in groups that fit."""
        n, step = rows.q_NRLD.shape[0], self._step(rows, piece)
        for first in range(0, n, step):
            yield slice(first, min(first + step, n))


def strip_forward(
    rows: Rows, piece: Piece, chunk: slice, mod: ScoreMod | None, work: Workspace
) -> tuple[Tensor, Tensor, Tensor]:
    """The partial result over a strip: out [N, R, T, D], lse and largest score [N, R, T].

    `out` lies in scratch memory, valid until the next strip.
    """
    q = rows.q_of(chunk, piece)
    k = keys_of(n_of(rows.k_NLD, chunk), piece, 1)
    v = keys_of(n_of(rows.v_NLD, chunk), piece, 1)
    n, r = q.shape[0], rows.q_NRLD.shape[1]
    scores = work.block(1, n, q.shape[1], piece.keys)
    torch.bmm(q, k.transpose(1, 2), out=scores)
    if mod is None:
        _forbid(scores, piece)
    else:
        tile = scores.view(n, r, piece.rows, piece.keys)
        scores = _modified(rows, piece, chunk, mod, tile).reshape(scores.shape)
        _forbid_modified(scores, piece)
    highest = scores.amax(-1, keepdim=True)
    if not _some_row_is_blind(piece, mod, highest):
        weights = torch.softmax(scores, -1, out=work.block(2, *scores.shape))
        out = torch.bmm(weights, v, out=work.block(0, n, q.shape[1], v.shape[-1]))
        # The largest weight is exp(highest - lse).
        lse = highest - weights.amax(-1, keepdim=True).log_()
    else:
        # Rows of -inf: a finite stand-in for their maximum makes all their weights 0, not NaN.
        safe = highest.clamp(min=torch.finfo(scores.dtype).min)
        weights = torch.sub(scores, safe, out=work.block(2, *scores.shape)).exp_()
        total = weights.sum(-1, keepdim=True)
        out = torch.bmm(weights, v, out=work.block(0, n, q.shape[1], v.shape[-1]))
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
    minus_delta_NRL: Tensor,  # noqa: N803
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
        minus_delta_NRL: the gradient of lse, minus the row sums of out * grad_out.
        sums: what to add to.
    """
    q = rows.q_of(chunk, piece)
    k = keys_of(n_of(rows.k_NLD, chunk), piece, 1)
    v = keys_of(n_of(rows.v_NLD, chunk), piece, 1)
    n, r = q.shape[0], rows.q_NRLD.shape[1]

    def of_piece(x: Tensor) -> Tensor:
        part = rows_of(n_of(x, chunk), piece)
        return part.reshape(n, r * piece.rows, -1)

    grad_out, lse = of_piece(grad_out_NRLD), of_piece(lse_NRL)
    minus_delta = of_piece(minus_delta_NRL)
    scores = work.block(1, n, q.shape[1], piece.keys)
    torch.bmm(q, k.transpose(1, 2), out=scores)
    if mod is None:
        _forbid(scores, piece)
        modified, tile, final = None, scores, scores
    else:
        tile = scores.view(n, r, piece.rows, piece.keys).requires_grad_()
        with torch.enable_grad():
            modified = _modified(rows, piece, chunk, mod, tile)
        # The scores themselves may be needed to differentiate the score function at them.
        final = modified.detach().reshape(scores.shape)
        if piece.forbidden:
            final = work.block(3, *scores.shape).copy_(final)
            _forbid_modified(final, piece)
    highest = final.amax(-1, keepdim=True)
    weights = work.block(2, *scores.shape)
    if _some_row_is_blind(piece, mod, highest):
        torch.sub(final, lse, out=weights).exp_()
    else:
        # The softmax kernel has the fastest exp. Its weights are relative to this strip's own
        # lse; the factor that makes them global goes to what they are multiplied with.
        torch.softmax(final, -1, out=weights)
        own_lse = highest.sub_(weights.amax(-1, keepdim=True).log_())
        factor = own_lse.sub_(lse).exp_()
        grad_out, minus_delta = grad_out * factor, minus_delta * factor
    grad_v = work.block(0, *v.shape)
    torch.bmm(weights.transpose(1, 2), grad_out, out=grad_v)
    keys_of(n_of(sums.v_NLD, chunk), piece, 1).add_(grad_v)
    grad_scores = work.block(1 if mod is None else 3, *scores.shape)
    torch.baddbmm(minus_delta, grad_out, v.transpose(1, 2), out=grad_scores)
    grad_scores.mul_(weights)
    if mod is not None:
        assert modified is not None
        grad_scores = mod.pull_back(tile, modified, grad_scores.view(tile.shape), sums.captured)
        grad_scores = grad_scores.reshape(scores.shape)
    grad_k = work.block(0, *k.shape)
    torch.bmm(grad_scores.transpose(1, 2), q, out=grad_k)
    keys_of(n_of(sums.k_NLD, chunk), piece, 1).add_(grad_k)
    assert rows.k_scaled_NLD is not None
    grad_q = work.block(0, *q.shape)
    torch.bmm(grad_scores, keys_of(n_of(rows.k_scaled_NLD, chunk), piece, 1), out=grad_q)
    target = rows_of(n_of(sums.q_NRLD, chunk), piece)
    if piece.fresh:
        target.copy_(grad_q.view(target.shape))
    else:
        target.add_(grad_q.view(target.shape))


def _some_row_is_blind(piece: Piece, mod: ScoreMod | None, highest: Tensor) -> bool:
    """Whether a row sees nothing in this strip; a score function may have seen to that."""
    if mod is None:
        return piece.has_blind_rows
    return bool((highest == -torch.inf).any())


def _modified(rows: Rows, piece: Piece, chunk: slice, mod: ScoreMod, tile: Tensor) -> Tensor:
    return mod.apply(
        tile,
        n_of(rows.b_N, chunk),
        n_of(rows.h_NR, chunk),
        rows_of(rows.q_positions, piece, 0),
        keys_of(rows.kv_positions, piece, 0),
    )


def _forbid(scores: Tensor, piece: Piece) -> None:
    """Sets the scores of forbidden pairs to -inf, by adding it: far faster than filling."""
    if piece.forbidden:
        tile = scores.view(-1, piece.rows, piece.keys)
        for edge in piece.forbidden:
            tile.narrow(2, edge.c0, edge.c1 - edge.c0).add_(edge.bias(scores.dtype, scores.device))


def _forbid_modified(scores: Tensor, piece: Piece) -> None:
    """Likewise, where a score function may have made a forbidden score infinite or NaN."""
    if piece.forbidden:
        tile = scores.view(-1, piece.rows, piece.keys)
        for edge in piece.forbidden:
            tile.narrow(2, edge.c0, edge.c1 - edge.c0).masked_fill_(
                edge.pairs.to(scores.device), -torch.inf
            )


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
