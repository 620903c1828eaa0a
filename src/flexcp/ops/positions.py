"""Global positions of a BlockMask's rows and columns, kept with it, so that score_mod sees them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexcp.kernels.score import ScoreFunction

_translated: ContextVar[bool] = ContextVar("flexcp_positions_are_global", default=False)
"""Whether the indices that a score function is being called with are global already."""


class Tracing:
    """What `_translated` says, for code that is being compiled: that can't follow a ContextVar."""

    translated = False


_tracing = Tracing()
"""The only one: dynamo before torch 2.13 can't follow assignments to a class."""


def in_translation(positions: object, attend: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs attention that is compiled, whose score_mod is translated already if it has to be."""
    if positions is None:
        return attend(*args, **kwargs)
    outer = None if torch.compiler.is_compiling() else _translated.set(True)
    before, _tracing.translated = _tracing.translated, True
    try:
        return attend(*args, **kwargs)
    finally:
        _tracing.translated = before
        if outer is not None:
            _translated.reset(outer)


def keep_positions(block_mask: BlockMask, q_at: Tensor, kv_at: Tensor) -> None:
    """Notes which positions the rows and columns of a BlockMask are: [L], or [B, L].

    They are kept on its mask_mod, which is of these rows and columns alone: `BlockMask.to` and
    pytrees make new BlockMasks, but keep that function and what is noted on it.
    """
    block_mask.mask_mod._flexcp_positions = (q_at, kv_at)  # type: ignore[attr-defined]


def positions_of(
    block_mask: object, device: torch.device | None = None
) -> tuple[Tensor, Tensor] | None:
    """The global positions that `keep_positions` noted for a BlockMask, if any."""
    if not isinstance(block_mask, BlockMask):
        return None  # without a look at its mask_mod, on whose code dynamo would guard
    mask_mod = getattr(block_mask, "mask_mod", None)
    found: tuple[Tensor, Tensor] | None = getattr(mask_mod, "_flexcp_positions", None)
    if found is None or device is None:
        return found
    return found[0].to(device), found[1].to(device)


def looking_up(score_mod: ScoreFunction, q_at: Tensor, kv_at: Tensor) -> ScoreFunction:
    """A score_mod that is called with rows and columns, and looks up positions."""
    if q_at.shape[-1] == 0:  # a rank without queries has no position to look up
        return score_mod

    def look_up(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if q_at.dim() == 2:
            return score_mod(score, b, h, q_at[b, q], kv_at[b, kv])
        return score_mod(score, b, h, q_at[q], kv_at[kv])

    return look_up


def on_global_positions(score_mod: ScoreFunction, q_at: Tensor, kv_at: Tensor) -> ScoreFunction:
    """A score_mod that is called with rows and columns, and sees positions.

    Where one of these is called by another, as when a module wraps it in a function of its own
    which is then translated too, the outermost translates for all.
    """
    look_up = looking_up(score_mod, q_at, kv_at)

    def seen(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            # Asked only here: another thread may be compiling while this one runs.
            return (score_mod if _tracing.translated else look_up)(score, b, h, q, kv)
        if _translated.get():
            return score_mod(score, b, h, q, kv)
        token = _translated.set(True)
        try:
            return look_up(score, b, h, q, kv)
        finally:
            _translated.reset(token)

    return seen
