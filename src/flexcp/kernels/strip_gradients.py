"""Gradients of strips: three batched products for each, beside those that repeat its weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexcp.kernels.dropout import drop_, droppable
from flexcp.kernels.program import Piece
from flexcp.kernels.strip_scores import modified_scores
from flexcp.kernels.strips import (
    BackwardInputs,
    GradientSums,
    Scoring,
    StripTensors,
    StripViews,
    Workspace,
    by_row,
    keys_of,
    rows_of,
    store,
)
from flexcp.kernels.wide_sums import WideSums


def strips_backward(
    tensors: StripTensors,
    pieces: Sequence[Piece],
    scoring: Scoring,
    work: Workspace,
    given: BackwardInputs,
    sums: GradientSums,
) -> None:
    """Adds the strips' share of the gradients to `sums`."""
    r, in_place = tensors.q_NRLD.shape[1], work.in_place
    scale, dropout = scoring.scale, scoring.dropout
    wide = WideSums(() if scoring.mod is None else scoring.mod.captured)
    strips = []
    for piece in pieces:
        view = StripViews.of(tensors, piece, work, biased=scoring.mod is None)
        strips.append(
            (
                view,
                work.scores(1, *view.scores.shape),
                by_row(given.grad_out_NRLD, piece),
                by_row(given.minus_lse_NRL, piece).unsqueeze(-1),
                by_row(given.minus_delta_NRL, piece).unsqueeze(-1),
                by_row(sums.q_NRLD, piece) if r == 1 and in_place else rows_of(sums.q_NRLD, piece),
                keys_of(sums.k_NLD, piece, 1),
                keys_of(sums.v_NLD, piece, 1),
            )
        )
    for view, grads, grad_out, minus_lse, minus_delta, sum_q, sum_k, sum_v in strips:
        q, k, weights, first = view.q_NTD, view.k_NUD, view.scores, view.piece.first_write
        if scoring.mod is None:
            weights.baddbmm_(q, k.transpose(1, 2), beta=0, alpha=scale * scoring.change)
            view.forbid()
        else:
            tile, modified = modified_scores(tensors, view, scoring, work, wide)
        scoring.power_(weights.add_(minus_lse))
        factor = 1.0 if dropout is None else dropout.factor
        grads.baddbmm_(grad_out, view.v_NUD.transpose(1, 2), beta=0, alpha=factor)
        if dropout is None:
            grads.add_(minus_delta).mul_(weights)
        else:
            numbers, threshold = view.numbers(), dropout.threshold
            drop_(droppable(grads), numbers, threshold)
            grads.add_(minus_delta).mul_(weights)
            drop_(droppable(weights), numbers, threshold)
        _add_product(sum_v, weights.transpose(1, 2), grad_out, factor, work)
        if scoring.mod is not None:
            given_back = grads.view(tile.shape)
            found = scoring.mod.pull_back(tile, modified, wide, given_back, sums.captured)
            grads = found.reshape(grads.shape)
        _add_product(sum_k, grads.transpose(1, 2), q, scale, work)
        if r == 1 and in_place:
            sum_q.baddbmm_(grads, k, beta=0 if first else 1, alpha=scale)
        else:
            found = work.product(*q.shape).baddbmm_(grads, k, beta=0, alpha=scale)
            store(sum_q, found.view(sum_q.shape), first=first)


def _add_product(target: Tensor, a: Tensor, b: Tensor, factor: float, work: Workspace) -> None:
    """Adds factor * a @ b to target."""
    if work.in_place:
        target.baddbmm_(a, b, alpha=factor)
    else:
        target.add_(work.product(*target.shape).baddbmm_(a, b, beta=0, alpha=factor))
