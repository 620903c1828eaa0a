"""Strips: small pieces computed by batched matrix products, with any score function.

Scores of a strip stay in cache, and the time goes into the matrix products, which write straight
to where their result belongs. Softmax is taken to the base 2: that costs a third of the natural
exponential, and the change of base is a factor of a matrix product. But it rounds: where scores are
so large that their last digit counts, the base is e, as in the fused ops, whose lse then fits to
the last digit. Where scores are so small that no exponential overflows, as they are, strips only
add to sums. Key heads that several query heads share are never repeated: those heads become further
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flexcp.kernels.dropout import drop_, droppable
from flexcp.kernels.merge import merge_into
from flexcp.kernels.program import Piece
from flexcp.kernels.strip_data import (
    BackwardInputs,
    GradientSums,
    Scoring,
    StripResults,
    StripTensors,
    StripViews,
    Workspace,
    by_row,
    keys_of,
    rows_of,
)


def strips_forward(
    tensors: StripTensors,
    pieces: Sequence[Piece],
    scoring: Scoring,
    work: Workspace,
    results: StripResults,
    *,
    begun: bool,
) -> None:
    """Leaves the strips' share of the result in `results`, merged with what is there already.

    `begun` says whether something is there, of any row.
    """
    mod = scoring.mod
    views = [StripViews.of(tensors, piece, work, biased=mod is None) for piece in pieces]
    if scoring.small and mod is None and results.highest_NRL is None:
        _add_up(views, scoring, work, results, begun=begun)
        return
    for view in views:
        change, factor = (None, scoring.change) if mod is None else _change(tensors, view, scoring)
        _merge(view, change, factor, scoring, work, results)


def _add_up(
    views: Sequence[StripViews],
    scoring: Scoring,
    work: Workspace,
    results: StripResults,
    *,
    begun: bool,
) -> None:
    """`strips_forward` of small scores: sums of exponentials, which are divided in the end."""
    dropout, factor = scoring.dropout, scoring.scale * scoring.change
    out, total = results.out_NRLD, results.lse_NRL
    scoring.power_(total.mul_(scoring.change))
    if begun:
        out.mul_(total.unsqueeze(-1))
    in_place = work.in_place and out.shape[1] == 1
    strips = [
        (
            view,
            view.k_NUD.transpose(1, 2),
            droppable(view.scores),
            by_row(out, view.piece) if in_place else rows_of(out, view.piece),
            rows_of(total, view.piece),
        )
        for view in views
    ]
    for view, k_columns, weights, target, own_total in strips:
        scores, first = view.scores, view.piece.first_write
        scores.baddbmm_(view.q_NTD, k_columns, beta=0, alpha=factor)
        view.forbid()
        sums = scoring.power_(scores).sum(-1).view(own_total.shape)
        _store(own_total, sums, first=first)
        if dropout is not None:
            drop_(weights, view.numbers(), dropout.threshold)
        if in_place:
            target.baddbmm_(scores, view.v_NUD, beta=0 if first else 1)
        else:
            found = work.product(*scores.shape[:2], out.shape[-1])
            found.baddbmm_(scores, view.v_NUD, beta=0)
            _store(target, found.view(target.shape), first=first)
    divisor = total.masked_fill(total == 0, 1.0)
    out.div_((divisor if dropout is None else divisor.mul_(1.0 - dropout.p)).unsqueeze(-1))
    scoring.logarithm_(total).div_(scoring.change)


def _merge(
    view: StripViews,
    change: Callable[[Tensor], None] | None,
    factor: float,
    scoring: Scoring,
    work: Workspace,
    results: StripResults,
) -> None:
    """Merges a strip's result into `results`.

    `change` is done to scores that were multiplied with a factor, given as [N, R, T, U].
    """
    piece, scores, dropout = view.piece, view.scores, scoring.dropout
    target, target_lse = rows_of(results.out_NRLD, piece), rows_of(results.lse_NRL, piece)
    r, may_be_empty = target.shape[1], piece.has_fully_masked_rows or change is not None
    scores.baddbmm_(view.q_NTD, view.k_NUD.transpose(1, 2), beta=0, alpha=scoring.scale * factor)
    if change is None:
        view.forbid()
    else:
        change(scores.view(*target.shape[:3], piece.keys))
    highest = base = scores.amax(-1, keepdim=True)
    if may_be_empty:
        # A finite stand-in for the largest score of a row that sees nothing makes its weights 0.
        base = highest.clamp(min=torch.finfo(scores.dtype).min)
    total = scoring.power_(scores.sub_(base)).sum(-1, keepdim=True)
    divisor = total.masked_fill(total == 0, 1.0) if may_be_empty else total
    if dropout is not None:
        drop_(droppable(scores), view.numbers(), dropout.threshold)
        divisor = divisor * (1.0 - dropout.p)
    writes = piece.first_write and r == 1 and work.in_place
    out = target.squeeze(1) if writes else work.product(*scores.shape[:2], target.shape[-1])
    out.baddbmm_(scores, view.v_NUD, beta=0).div_(divisor)
    lse = scoring.logarithm_(total).add_(base).div_(scoring.change).view(target_lse.shape)
    if piece.first_write:
        if not writes:
            target.copy_(out.view(target.shape))
        target_lse.copy_(lse)
    else:
        merge_into(target, target_lse, out.view(target.shape), lse)
    if results.highest_NRL is not None:
        most = rows_of(results.highest_NRL, piece)
        torch.maximum(most, highest.div_(scoring.change).view(most.shape), out=most)


def _change(
    tensors: StripTensors, view: StripViews, scoring: Scoring
) -> tuple[Callable[[Tensor], None], float]:
    """What the score function and the mask's edges do to a strip's scores, in place.

    Also what the scores have to be multiplied with before. They are changed to another base too.
    """
    mod, piece = scoring.mod, view.piece
    assert mod is not None
    indices = _indices(tensors, piece, scoring)
    chain = None if mod.chain is None else mod.chain.prepared(view.scores.dtype, scoring.change)

    def change(tile: Tensor) -> None:
        if chain is None:
            torch.mul(mod.apply(tile, *indices), scoring.change, out=tile)
        else:
            b_N, h_NR = mod.numbered(*indices[:2])  # noqa: N806
            q_at, kv_at = indices[2:]
            found = chain.run(
                tile, b_N[:, None, None, None], h_NR[:, :, None, None], q_at[:, None], kv_at,
                consecutive=scoring.consecutive,
            )  # fmt: skip
            if found is not tile:
                tile.copy_(found)
        _fill_forbidden(tile, piece)

    return change, 1.0 if chain is None else chain.factor


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
            tile, modified = _modified(tensors, view, scoring, work)
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
            found = scoring.mod.pull_back(tile, modified, grads.view(tile.shape), sums.captured)
            grads = found.reshape(grads.shape)
        _add_product(sum_k, grads.transpose(1, 2), q, scale, work)
        if r == 1 and in_place:
            sum_q.baddbmm_(grads, k, beta=0 if first else 1, alpha=scale)
        else:
            found = work.product(*q.shape).baddbmm_(grads, k, beta=0, alpha=scale)
            _store(sum_q, found.view(sum_q.shape), first=first)


def _modified(
    tensors: StripTensors, view: StripViews, scoring: Scoring, work: Workspace
) -> tuple[Tensor, Tensor]:
    """The scores [N, R, T, U] of a strip as they were given to its score function, and its result.

    Both can be differentiated. What the function made of them, to another base, and without what
    is forbidden, is left in the strip's scores.
    """
    mod, piece, scores = scoring.mod, view.piece, view.scores
    assert mod is not None
    given = work.scores(2, *scores.shape)
    given.baddbmm_(view.q_NTD, view.k_NUD.transpose(1, 2), beta=0, alpha=scoring.scale)
    # They may be needed to differentiate the score function at them.
    tile = given.view(scores.shape[0], -1, piece.rows, piece.keys).requires_grad_()
    with torch.enable_grad():
        modified = mod.apply(tile, *_indices(tensors, piece, scoring))
    found = scores.view(tile.shape)
    torch.mul(modified.detach(), scoring.change, out=found)
    _fill_forbidden(found, piece)
    return tile, modified


def _store(target: Tensor, found: Tensor, *, first: bool) -> None:
    """Writes to, or adds to, what is there."""
    if first:
        target.copy_(found)
    else:
        target.add_(found)


def _add_product(target: Tensor, a: Tensor, b: Tensor, factor: float, work: Workspace) -> None:
    """Adds factor * a @ b to target."""
    if work.in_place:
        target.baddbmm_(a, b, alpha=factor)
    else:
        target.add_(work.product(*target.shape).baddbmm_(a, b, beta=0, alpha=factor))


def _indices(
    tensors: StripTensors, piece: Piece, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a score function is told of a strip: b [N], h [N, R], positions [T] and [U]."""
    assert tensors.b_N is not None
    assert tensors.h_NR is not None
    assert scoring.q_positions is not None
    assert scoring.kv_positions is not None
    q_at = rows_of(scoring.q_positions, piece, 0)
    return tensors.b_N, tensors.h_NR, q_at, keys_of(scoring.kv_positions, piece, 0)


def _fill_forbidden(tile: Tensor, piece: Piece) -> None:
    """Fills forbidden scores with -inf: a score function may have made them infinite or NaN."""
    for edge in piece.forbidden:
        pairs = edge.pairs.to(tile.device)
        tile.narrow(3, edge.c0, edge.c1 - edge.c0).masked_fill_(pairs, -torch.inf)
