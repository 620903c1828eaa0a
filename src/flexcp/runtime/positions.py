"""Global positions of a BlockMask's rows and columns, kept with it, so that score_mod sees them."""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexcp.kernels.score import ScoreFunction


def keep_positions(block_mask: BlockMask, q_at: Tensor, kv_at: Tensor) -> None:
    """Notes which positions the rows and columns of a BlockMask are: [L], or [B, L]."""
    block_mask._flexcp_positions = (q_at, kv_at)  # type: ignore[attr-defined]


def positions_of(block_mask: object) -> tuple[Tensor, Tensor] | None:
    """What was noted, if anything."""
    found: tuple[Tensor, Tensor] | None = getattr(block_mask, "_flexcp_positions", None)
    return found


def on_global_positions(score_mod: ScoreFunction, q_at: Tensor, kv_at: Tensor) -> ScoreFunction:
    """A score_mod that is called with rows and columns, and sees positions."""
    if q_at.shape[-1] == 0:  # a rank without queries has no position to look up
        return score_mod

    def seen(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if q_at.dim() == 2:
            return score_mod(score, b, h, q_at[b, q], kv_at[b, kv])
        return score_mod(score, b, h, q_at[q], kv_at[kv])

    return seen
