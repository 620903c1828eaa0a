"""Score functions on strips: what they are told, and what they make of a strip's scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexcp.kernels.program import Piece
from flexcp.kernels.wide_sums import WideSums

if TYPE_CHECKING:
    from flexcp.kernels.strips import Scoring, StripTensors, StripViews, Workspace


def changed_scores(
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


def modified_scores(
    tensors: StripTensors, view: StripViews, scoring: Scoring, work: Workspace, wide: WideSums
) -> tuple[Tensor, Tensor]:
    """The scores [N, R, T, U] of a strip as they were given to its score function, and its result.

    Both can be differentiated, also by `wide`, which stands for captured tensors. What the function
    made of them, to another base, and without what is forbidden, is left in the strip's scores.
    """
    mod, piece, scores = scoring.mod, view.piece, view.scores
    assert mod is not None
    given = work.scores(2, *scores.shape)
    given.baddbmm_(view.q_NTD, view.k_NUD.transpose(1, 2), beta=0, alpha=scoring.scale)
    # They may be needed to differentiate the score function at them.
    tile = given.view(scores.shape[0], -1, piece.rows, piece.keys).requires_grad_()
    modified = mod.differentiable(tile, wide, *_indices(tensors, piece, scoring))
    found = scores.view(tile.shape)
    torch.mul(modified.detach(), scoring.change, out=found)
    _fill_forbidden(found, piece)
    return tile, modified


def _indices(
    tensors: StripTensors, piece: Piece, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a score function is told of a strip: b [N], h [N, R], positions [T] and [U]."""
    assert tensors.b_N is not None
    assert tensors.h_NR is not None
    assert scoring.q_positions is not None
    assert scoring.kv_positions is not None
    q_at = scoring.q_positions.narrow(0, piece.q0, piece.rows)
    kv_at = scoring.kv_positions.narrow(0, piece.k0, piece.keys)
    return tensors.b_N, tensors.h_NR, q_at, kv_at


def _fill_forbidden(tile: Tensor, piece: Piece) -> None:
    """Fills forbidden scores with -inf: a score function may have made them infinite or NaN."""
    for edge in piece.forbidden:
        pairs = edge.pairs.to(tile.device)
        tile.narrow(3, edge.c0, edge.c1 - edge.c0).masked_fill_(pairs, -torch.inf)
