"""Strips: small pieces computed by batched matrix products, with any score function.

At 128 rows a strip's scores stay in cache, and the time goes into the matrix products, which write
straight to where their result belongs. Softmax is taken to the base 2: that costs a third of the
natural exponential, and the change of base is a factor of a matrix product. Key heads that several
query heads share are never repeated: those heads become further rows.

Letters in names: N batch elements times key heads, R query heads per key head, T rows and U keys
of a strip, D head dim.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flexcp.kernels.merge import merge_into
from flexcp.kernels.program import Piece
from flexcp.kernels.score import ScoreMod
from flexcp.kernels.strip_data import (
    Incoming,
    Results,
    Rows,
    Scoring,
    Sums,
    Workspace,
    keys_of,
    rows_of,
)

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)


def strip_forward(
    rows: Rows, piece: Piece, scoring: Scoring, work: Workspace, results: Results
) -> None:
    """Leaves a strip's share of the result in `results`, merged with what is there already."""
    q = _by_row(rows.q_NRLD, piece)
    n, r = rows.q_NRLD.shape[:2]
    k_columns = keys_of(rows.k_NLD, piece, 1).transpose(1, 2)
    v = keys_of(rows.v_NLD, piece, 1)
    scores = work.scores(0, n, q.shape[1], piece.keys)
    mod = scoring.mod
    if mod is None:
        scores.baddbmm_(q, k_columns, beta=0, alpha=scoring.scale * LOG2_E)
        _forbid(scores, piece)
    else:
        scores.baddbmm_(q, k_columns, beta=0, alpha=scoring.scale)
        tile = scores.view(n, r, piece.rows, piece.keys)
        modified = _modified(rows, piece, scoring, mod, tile)
        scores = work.scores(1, n, q.shape[1], piece.keys)
        torch.mul(modified, LOG2_E, out=scores.view(tile.shape))
        _forbid_modified(scores, piece)
    highest = scores.amax(-1, keepdim=True)
    some_row_is_blind = piece.has_blind_rows or mod is not None
    # A finite stand-in for the largest score of a row that sees nothing makes all its weights 0.
    base = highest.clamp(min=torch.finfo(scores.dtype).min) if some_row_is_blind else highest
    weights = scores.sub_(base).exp2_()
    total = weights.sum(-1, keepdim=True)
    writes = piece.fresh and r == 1 and work.in_place
    target = rows_of(results.out_NRLD, piece)
    out = target.squeeze(1) if writes else work.product(n, q.shape[1], v.shape[-1])
    out.baddbmm_(weights, v, beta=0)
    out.div_(total.masked_fill(total == 0, 1.0) if some_row_is_blind else total)
    lse = total.log2_().add_(base).mul_(LN_2).view(n, r, piece.rows)
    target_lse = rows_of(results.lse_NRL, piece)
    if piece.fresh:
        if not writes:
            target.copy_(out.view(target.shape))
        target_lse.copy_(lse)
    else:
        merge_into(target, target_lse, out.view(target.shape), lse)
    if results.highest_NRL is not None:
        most = rows_of(results.highest_NRL, piece)
        torch.maximum(most, highest.mul_(LN_2).view(most.shape), out=most)


def strip_backward(
    rows: Rows, piece: Piece, scoring: Scoring, work: Workspace, given: Incoming, sums: Sums
) -> None:
    """Adds a strip's share of the gradients to `sums`."""
    q = _by_row(rows.q_NRLD, piece)
    n, r = rows.q_NRLD.shape[:2]
    k, v = keys_of(rows.k_NLD, piece, 1), keys_of(rows.v_NLD, piece, 1)
    grad_out = _by_row(given.grad_out_NRLD, piece)
    minus_lse = _by_row(given.minus_lse_NRL, piece).unsqueeze(-1)
    minus_delta = _by_row(given.minus_delta_NRL, piece).unsqueeze(-1)
    weights = work.scores(0, n, q.shape[1], piece.keys)
    mod, scale = scoring.mod, scoring.scale
    if mod is None:
        torch.baddbmm(minus_lse, q, k.transpose(1, 2), alpha=scale * LOG2_E, out=weights)
        _forbid(weights, piece)
    else:
        scores = work.scores(2, n, q.shape[1], piece.keys)
        scores.baddbmm_(q, k.transpose(1, 2), beta=0, alpha=scale)
        # They may be needed to differentiate the score function at them.
        tile = scores.view(n, r, piece.rows, piece.keys).requires_grad_()
        with torch.enable_grad():
            modified = _modified(rows, piece, scoring, mod, tile)
        torch.mul(modified.detach(), LOG2_E, out=weights.view(tile.shape))
        _forbid_modified(weights, piece)
        weights.add_(minus_lse)
    weights.exp2_()
    _add_product(keys_of(sums.v_NLD, piece, 1), weights.transpose(1, 2), grad_out, 1.0, work)
    grad_scores = work.scores(1, n, q.shape[1], piece.keys)
    torch.baddbmm(minus_delta, grad_out, v.transpose(1, 2), out=grad_scores)
    grad_scores.mul_(weights)
    if mod is not None:
        found = mod.pull_back(tile, modified, grad_scores.view(tile.shape), sums.captured)
        grad_scores = found.reshape(grad_scores.shape)
    _add_product(keys_of(sums.k_NLD, piece, 1), grad_scores.transpose(1, 2), q, scale, work)
    target = rows_of(sums.q_NRLD, piece)
    if r == 1 and work.in_place:
        target.squeeze(1).baddbmm_(grad_scores, k, beta=0 if piece.fresh else 1, alpha=scale)
        return
    grad_q = work.product(*q.shape).baddbmm_(grad_scores, k, beta=0, alpha=scale)
    if piece.fresh:
        target.copy_(grad_q.view(target.shape))
    else:
        target.add_(grad_q.view(target.shape))


def _add_product(target: Tensor, a: Tensor, b: Tensor, factor: float, work: Workspace) -> None:
    """Adds factor * a @ b to target."""
    if work.in_place:
        target.baddbmm_(a, b, alpha=factor)
    else:
        target.add_(work.product(*target.shape).baddbmm_(a, b, beta=0, alpha=factor))


def _by_row(x: Tensor, piece: Piece) -> Tensor:
    """[N, R, L, ...] at the rows of a piece, as [N, R*T, ...]; a view unless heads share keys."""
    return rows_of(x, piece).flatten(1, 2)


def _modified(rows: Rows, piece: Piece, scoring: Scoring, mod: ScoreMod, tile: Tensor) -> Tensor:
    assert rows.b_N is not None
    assert rows.h_NR is not None
    assert scoring.q_positions is not None
    assert scoring.kv_positions is not None
    return mod.apply(
        tile,
        rows.b_N,
        rows.h_NR,
        rows_of(scoring.q_positions, piece, 0),
        keys_of(scoring.kv_positions, piece, 0),
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
