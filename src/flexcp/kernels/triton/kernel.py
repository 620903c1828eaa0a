"""The Triton kernels behind the kernel contract: one launch forward, three backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexcp.kernels.interface import Partial, PartialGradients
from flexcp.kernels.triton.available import kernels
from flexcp.kernels.triton.captured_sums import captured_gradients
from flexcp.kernels.triton.launch import (
    Launch,
    assert_in_rows,
    described,
    dim_constants,
    dropout_arguments,
    mask_arguments,
    padded,
    readable,
    row_strides,
    scale_arguments,
    strides,
    unit_of,
    widens,
)
from flexcp.kernels.triton.scoring import ScoreArguments, score_constants
from flexcp.kernels.triton.tuning import TileConfig, Tuning

if TYPE_CHECKING:
    from flexcp.kernels.compiled_shapes import CompiledShapes
    from flexcp.kernels.dropout import Dropout
    from flexcp.kernels.score import ScoreMod

_PREP = TileConfig(64, 64, 4, 1)
"""Delta is a sum over each row: memory-bound, whatever the tile."""


@dataclass(frozen=True)
class TritonKernel:
    """Attention by the Triton kernels, compiled as `tuning` says."""

    tuning: Tuning

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        compiled: CompiledShapes,
        *,
        scale: float,
        score_mod: ScoreMod | None = None,
        max_scores: bool = False,
        former: Partial | None = None,
        dropout: Dropout | None = None,
    ) -> Partial:
        """The partial result over the pairs of `compiled`, merged into `former` if given."""
        assert not max_scores
        if former is None:
            out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float32, device=q.device)
            lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
            former_or_new = Partial(out, lse)
        else:
            former_or_new = former
        launch = forward_launch(
            q,
            k,
            v,
            former_or_new,
            compiled,
            scale,
            self.tuning.forward,
            former is not None,
            dropout,
            ScoreArguments.of(score_mod, compiled, q.device, scale),
        )
        launch.run(kernels()[0].forward)
        return former_or_new

    def delta(self, grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
        """[B, H, Lq] What the backward pass needs of each row, over all rounds."""
        found = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
        prep_launch(grad_out, out, grad_lse, found).run(kernels()[1].prep)
        return found

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        compiled: CompiledShapes,
        *,
        scale: float,
        score_mod: ScoreMod | None = None,
        grad_lse: Tensor | None = None,
        delta: Tensor | None = None,
        grad_q: Tensor | None = None,
        grad_kv: tuple[Tensor, Tensor] | None = None,
        dropout: Dropout | None = None,
    ) -> PartialGradients:
        """The gradients' share of the pairs of `compiled`; that of q is added to `grad_q`."""
        score = ScoreArguments.of(score_mod, compiled, q.device, scale)
        if delta is None:
            delta = self.delta(grad_out, out, grad_lse)
        function = kernels()[1]
        found_q = grad_q
        if found_q is None:
            found_q = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        given = (grad_out, q, k, v, lse, delta)
        dq = dq_launch(
            *given, found_q, compiled, scale, self.tuning.dq, grad_q is not None, dropout, score
        )
        dq.run(function.dq)
        found_k, found_v = _side_by_side(k, v) if grad_kv is None else grad_kv
        for config, wanted in self._key_launches():
            launch = dkdv_launch(
                *given, found_k, found_v, compiled, scale, config, wanted, dropout, score
            )
            launch.run(function.dkdv)
        captured: tuple[Tensor, ...] = ()
        if score_mod is not None and score is not None and score_mod.captured:
            captured = captured_gradients(
                score_mod,
                score,
                lambda kind: lookup_launch(
                    *given, compiled, scale, self.tuning.captured(kind), dropout, score
                ),
                k.shape[2],
                apart=compiled.are_apart,
            )
        return PartialGradients(found_q, found_k, found_v, captured)

    def _key_launches(self) -> tuple[tuple[TileConfig, Mapping[str, bool]], ...]:
        if self.tuning.dv is None:
            return ((self.tuning.dkdv, {"DK": True, "DV_WANTED": True}),)
        return (
            (self.tuning.dv, {"DK": False, "DV_WANTED": True}),
            (self.tuning.dkdv, {"DK": True, "DV_WANTED": False}),
        )


def _side_by_side(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Room for gradients of K and V in one tensor, as their rows travel."""
    widths = (k.shape[3], v.shape[3])
    both = torch.empty(*k.shape[:3], sum(widths), dtype=torch.float32, device=k.device)
    found_k, found_v = both.split(widths, -1)
    return found_k, found_v


def forward_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Partial,
    compiled: CompiledShapes,
    scale: float,
    config: TileConfig,
    has_former: bool,
    dropout: Dropout | None = None,
    score: ScoreArguments | None = None,
) -> Launch:
    """The launch that writes `result`."""
    assert_in_rows(result.out, result.lse)
    q, k, v = (readable(x, max(config.rows, config.cols)) for x in (q, k, v))
    lists = compiled.tile_lists(config.rows, config.cols, "query", q.device)
    unit, out_unit = unit_of(q, k, v), unit_of(result.out)
    arguments: dict[str, Any] = {
        "q": q, "k": k, "v": v, "out": result.out, "lse": result.lse,
        **mask_arguments(lists), **dropout_arguments(dropout, compiled, lists, q.device),
        **scale_arguments(scale, scored=score is not None), **score_constants(score, "SCORE"),
        **strides("q", q, unit), **strides("k", k, unit), **strides("v", v, unit),
        **strides("out", result.out, out_unit), **row_strides("lse", result.lse),
        **_sizes(q, k), "heads": q.shape[1], "has_former": int(has_former),
        **dim_constants(q.shape[3], v.shape[3]), **_constants(config, unit, out_unit, q.dtype),
    }  # fmt: skip
    arguments |= described(arguments, ("k", "v"), config.cols, unit, config)
    return Launch("forward", lists.lines * q.shape[0] * q.shape[1], arguments, config)


def prep_launch(grad_out: Tensor, out: Tensor, grad_lse: Tensor | None, delta: Tensor) -> Launch:
    """The launch that writes `delta`."""
    grad_out, out = (readable(x, _PREP.rows) for x in (grad_out, out))
    unit, out_unit = unit_of(grad_out), unit_of(out)
    # Without a gradient of lse, any pointer of the type will do: it is not read.
    from_lse = delta if grad_lse is None else _in_rows(grad_lse)
    tiles = -(-out.shape[2] // _PREP.rows)
    arguments = {
        "grad_out": grad_out, "out": out, "grad_lse": from_lse, "delta": delta,
        **strides("g", grad_out, unit), **strides("out", out, out_unit),
        **row_strides("lse", from_lse), **row_strides("delta", delta),
        "heads": out.shape[1], "q_len": out.shape[2], "tiles": tiles,
        "has_grad_lse": int(grad_lse is not None),
        "VALUE_DIM": out.shape[3], "DV": padded(out.shape[3]), "BM": _PREP.rows, "UNIT": unit,
        "OUT_UNIT": out_unit,
    }  # fmt: skip
    return Launch("prep", tiles * out.shape[0] * out.shape[1], arguments, _PREP)


def dq_launch(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    grad_q: Tensor,
    compiled: CompiledShapes,
    scale: float,
    config: TileConfig,
    has_former: bool,
    dropout: Dropout | None = None,
    score: ScoreArguments | None = None,
) -> Launch:
    """The launch that writes or adds to `grad_q`."""
    assert_in_rows(grad_q)
    lse, delta = _in_rows(lse), _in_rows(delta)
    most = max(config.rows, config.cols)
    grad_out, q, k, v = (readable(x, most) for x in (grad_out, q, k, v))
    lists = compiled.tile_lists(config.rows, config.cols, "query", q.device)
    unit, out_unit = unit_of(q, k, v, grad_out), unit_of(grad_q)
    arguments: dict[str, Any] = {
        **_backward_inputs(grad_out, q, k, v, lse, delta, unit),
        "grad_q": grad_q, **strides("dq", grad_q, out_unit),
        **mask_arguments(lists), **dropout_arguments(dropout, compiled, lists, q.device),
        **scale_arguments(scale, scored=score is not None), "scale": scale,
        **score_constants(score, "SCORE", "PULL_BACK"),
        **_sizes(q, k), "heads": q.shape[1], "has_former": int(has_former),
        **dim_constants(q.shape[3], v.shape[3]), **_constants(config, unit, out_unit, q.dtype),
    }  # fmt: skip
    arguments |= described(arguments, ("k", "v"), config.cols, unit, config)
    return Launch("dq", lists.lines * q.shape[0] * q.shape[1], arguments, config)


def dkdv_launch(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    compiled: CompiledShapes,
    scale: float,
    config: TileConfig,
    wanted: Mapping[str, bool],
    dropout: Dropout | None = None,
    score: ScoreArguments | None = None,
) -> Launch:
    """The launch that writes `grad_k`, `grad_v` or both, as `wanted` says."""
    assert_in_rows(grad_k, grad_v)
    lse, delta = _in_rows(lse), _in_rows(delta)
    most = max(config.rows, config.cols)
    grad_out, q, k, v = (readable(x, most) for x in (grad_out, q, k, v))
    lists = compiled.tile_lists(config.rows, config.cols, "key", q.device)
    unit, out_unit = unit_of(q, k, v, grad_out), unit_of(grad_k, grad_v)
    arguments: dict[str, Any] = {
        **_backward_inputs(grad_out, q, k, v, lse, delta, unit),
        "grad_k": grad_k, **strides("dk", grad_k, out_unit),
        "grad_v": grad_v, **strides("dv", grad_v, out_unit),
        **mask_arguments(lists), **dropout_arguments(dropout, compiled, lists, q.device),
        **scale_arguments(scale, scored=score is not None), "scale": scale,
        **score_constants(score, "SCORE", "PULL_BACK"),
        **_sizes(q, k), "kv_heads": k.shape[1],
        **dim_constants(q.shape[3], v.shape[3]), **_constants(config, unit, out_unit, q.dtype),
        **wanted,
    }  # fmt: skip
    arguments |= described(arguments, ("q", "grad_out"), config.rows, unit, config)
    return Launch("dkdv", lists.lines * k.shape[0] * k.shape[1], arguments, config)


def lookup_launch(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    compiled: CompiledShapes,
    scale: float,
    config: TileConfig,
    dropout: Dropout | None,
    score: ScoreArguments,
) -> Launch:
    """The launch that writes gradients of what a score function reads; see `captured_sums.py`."""
    lse, delta = _in_rows(lse), _in_rows(delta)
    most = max(config.rows, config.cols)
    grad_out, q, k, v = (readable(x, most) for x in (grad_out, q, k, v))
    lists = compiled.tile_lists(config.rows, config.cols, "query", q.device)
    unit = unit_of(q, k, v, grad_out)
    arguments: dict[str, Any] = {
        **_backward_inputs(grad_out, q, k, v, lse, delta, unit),
        **mask_arguments(lists), **dropout_arguments(dropout, compiled, lists, q.device),
        **scale_arguments(scale, scored=True), **score_constants(score, "SCORE"),
        **_sizes(q, k), "heads": q.shape[1],
        **dim_constants(q.shape[3], v.shape[3]), **_constants(config, unit, unit, q.dtype),
    }  # fmt: skip
    del arguments["OUT_UNIT"]
    arguments |= described(arguments, ("k", "v"), config.cols, unit, config)
    return Launch("lookup_gradients", lists.lines * q.shape[0] * q.shape[1], arguments, config)


def _backward_inputs(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, unit: int
) -> dict[str, Any]:
    return {
        "q": q, "k": k, "v": v, "grad_out": grad_out, "lse": lse, "delta": delta,
        **strides("q", q, unit), **strides("k", k, unit), **strides("v", v, unit),
        **strides("g", grad_out, unit), **row_strides("lse", lse), **row_strides("delta", delta),
    }  # fmt: skip


def _in_rows(x: Tensor) -> Tensor:
    """One number per row, with those of a head side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _sizes(q: Tensor, k: Tensor) -> dict[str, int]:
    return {"group": q.shape[1] // k.shape[1], "q_len": q.shape[2], "kv_len": k.shape[2]}


def _constants(config: TileConfig, unit: int, out_unit: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "BM": config.rows, "BN": config.cols, "UNIT": unit, "OUT_UNIT": out_unit,
        "WIDEN": widens(dtype),
    }  # fmt: skip
