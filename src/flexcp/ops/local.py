"""Attention on one device: an `AttentionOp` over the shapes of a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.flex import flex_forward
from flexcp.kernels.interface import Kernel, allowed_pairs
from flexcp.kernels.merge import accumulation_dtype, add_sinks, sinks_gradient
from flexcp.kernels.reference import dense_attention
from flexcp.kernels.registry import choose
from flexcp.kernels.score import ScoreFunction, ScoreMod, examine
from flexcp.ops.autograd import differentiable
from flexcp.ops.interface import Gradients, OutputGradients, Saved
from flexcp.ops.mask_cache import MaskLike, as_grid, compiled_shapes_for
from flexcp.ops.positions import in_translation, looking_up, on_global_positions, positions_of


@dataclass(frozen=True, eq=False)
class LocalAttention:
    """Attention over the whole sequence, of which this device has everything."""

    shapes: CompiledShapes
    """Which pairs attend."""
    scale: float
    kernel: Kernel
    score_mod: ScoreMod | None = None
    max_scores: bool = False
    """Whether each row's largest score is wanted: then it is the one extra."""
    dropout: Dropout | None = None
    """Of the weights."""

    name = "attention"
    replaces_inputs = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Saved:
        """The result over all keys, sinks included."""
        with torch.autocast(q.device.type, enabled=False):
            found = self.kernel.forward(
                q,
                k,
                v,
                self.shapes,
                scale=self.scale,
                score_mod=self.score_mod,
                max_scores=self.max_scores,
                dropout=self.dropout,
            )
            out, lse = found.out, found.lse
            if sinks is not None:
                out, lse = add_sinks(out, lse, sinks)
        extras = () if found.max_scores is None else (found.max_scores,)
        return Saved(q, k, v, sinks, out.to(q.dtype), lse, extras)

    def backward(self, saved: Saved, grads: OutputGradients) -> Gradients:
        """Gradients of everything, from the saved out and lse."""
        q, k, v, sinks = saved.q, saved.k, saved.v, saved.sinks
        with torch.autocast(q.device.type, enabled=False):
            found = self.kernel.backward(
                grads.out,
                q,
                k,
                v,
                saved.out,
                saved.lse,
                self.shapes,
                scale=self.scale,
                score_mod=self.score_mod,
                grad_lse=grads.lse,
                dropout=self.dropout,
            )
            grad_sinks = None
            if sinks is not None:
                grad_sinks = sinks_gradient(sinks, grads.out, grads.lse, saved.out, saved.lse)
        in_type = (found.q.to(q.dtype), found.k.to(k.dtype), found.v.to(v.dtype))
        mod = self.score_mod
        captured = () if mod is None else mod.in_type(found.captured)
        return Gradients(*in_type, grad_sinks, captured)

    def pack(self, saved: Saved) -> list[Tensor]:
        """The extras as they are."""
        return list(saved.extras)

    def unpack(self, packed: Sequence[Tensor], saved: Saved) -> tuple[Tensor, ...]:  # noqa: ARG002
        """The extras as they were."""
        return tuple(packed)


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None,
    *,
    scale: float,
    score_mod: ScoreFunction | None,
    sinks: Tensor | None,
    max_scores: bool,
    kernel: str | None,
    options: Mapping[str, Any],
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and, if wanted, the largest scores, by the kernel that suits the tensors best."""
    positions = None if score_mod is None else positions_of(mask, q.device)
    dropout = _on_global_positions(dropout, mask, q.device)
    if kernel is None and options and mask is not None and q.device.type == "cuda":
        kernel = "flex"  # tuning options of torch's own kernels are for these
    shapes_once = lru_cache(maxsize=1)(lambda: compiled_shapes_for(mask, q, k))
    translated = score_mod
    if score_mod is not None and positions is not None:
        translated = on_global_positions(score_mod, *positions)
    mod = None
    if translated is not None and kernel not in ("flex", "reference"):
        # What can't be examined may still be compiled.
        with suppress(Exception) if kernel is None and q.device.type == "cuda" else nullcontext():
            mod = examine(translated, accumulation_dtype(q.dtype), q.device)
    choice = choose(
        q,
        v,
        score_mod=score_mod is not None if mod is None else mod,
        max_scores=max_scores,
        is_one_rectangle=mask is None,
        kernel=kernel,
        dropout=dropout is not None,
        mask_kind=lambda: shapes_once().kind,
        scores=lambda: shapes_once().shapes.area(*q.shape[:2]),
    )
    if choice.kernel == "flex":
        if score_mod is not None and positions is not None:
            score_mod = looking_up(score_mod, *positions)
        found: tuple[Tensor, Tensor, Tensor | None] = in_translation(
            positions,
            flex_forward,
            q,
            k,
            v,
            None if mask is None else as_grid(mask, q, k),
            scale=scale,
            score_mod=score_mod,
            sinks=sinks,
            max_scores=max_scores,
            options=options,
        )
        return found
    shapes = shapes_once()
    if choice.kernel == "reference":
        return _dense(shapes, q, k, v, translated, scale, sinks, dropout)
    if translated is not None and mod is None:
        mod = examine(translated, accumulation_dtype(q.dtype), q.device)  # raises what was wrong
    op = LocalAttention(shapes, scale, choice.runs, mod, max_scores, dropout)
    out, lse, *extras = differentiable(op, q, k, v, sinks)
    return out, lse, extras[0] if extras else None


def local_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None,
    *,
    scale: float,
    max_scores: bool,
    kernel: str | None,
    dropout: Dropout | None,
) -> LocalAttention:
    """The op of a call without a score function, as a compiled graph runs it."""
    # Not "flex": it would have to be compiled into the graph by itself.
    choice = choose(
        q,
        v,
        max_scores=max_scores,
        is_one_rectangle=mask is None,
        partial=True,
        kernel=kernel,
        dropout=dropout is not None,
        mask_kind=lambda: compiled_shapes_for(mask, q, k).kind,
    )
    return LocalAttention(
        compiled_shapes_for(mask, q, k),
        scale,
        choice.runs,
        max_scores=max_scores,
        dropout=_on_global_positions(dropout, mask, q.device),
    )


def _on_global_positions(
    dropout: Dropout | None, mask: MaskLike | None, device: torch.device
) -> Dropout | None:
    """Dropout by the positions that are noted with a BlockMask, if they are."""
    positions = None if dropout is None else positions_of(mask, device)
    return dropout if dropout is None else replace(dropout, positions=positions)


def _dense(
    shapes: CompiledShapes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: ScoreFunction | None,
    scale: float,
    sinks: Tensor | None,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The oracle, with a matrix of all scores."""
    pairs = shapes.shapes
    planes = torch.stack([allowed_pairs(pairs, plane) for plane in range(len(pairs.planes))])
    found = dense_attention(
        q,
        k,
        v,
        allowed=planes[torch.tensor(pairs.plane_of)].to(q.device),
        score_mod=score_mod,
        sinks=sinks,
        scale=scale,
        q_positions=shapes.positions("q", q.device),
        kv_positions=shapes.positions("kv", q.device),
        dropout=dropout,
    )
    return found.out, found.lse, found.max_scores
