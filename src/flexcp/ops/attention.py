"""Attention on one device: any mask, any score function, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from flexcp.errors import FlexCPError
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.flex import flex_forward
from flexcp.kernels.interface import allowed_pairs
from flexcp.kernels.merge import accumulation_dtype
from flexcp.kernels.reference import dense_attention
from flexcp.kernels.registry import Choice, choose
from flexcp.kernels.score import ScoreFunction, ScoreMod, examine
from flexcp.ops.autocast import autocast
from flexcp.ops.autograd import Attention, Call
from flexcp.ops.checks import check_sinks, check_tensors
from flexcp.ops.compiled import compiled_attention
from flexcp.ops.mask_cache import MaskLike, as_grid, compiled_shapes_for
from flexcp.ops.overridable import overridable
from flexcp.ops.positions import Tracing, looking_up, on_global_positions, positions_of
from flexcp.ops.traced import traced_attention


@overridable
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = None,
    block_mask: MaskLike | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention as torch's `flex_attention`, with gradients for everything.

    A query that may see nothing gives 0, lse -inf, and zero gradients. Planning happens on the
    first call with a mask object and is kept with it: a Mask is a value, so make a new one rather
    than change a tensor that it captures. A plain function is planned again at every call.

    Args:
        query: [B, H, Lq, D] in float64, float32, bfloat16 or float16.
        key: [B, G, Lkv, D]; a batch size of 1 is shared by all batch elements.
        value: [B, G, Lkv, Dv].
        score_mod: a function of (score, b, h, q_idx, kv_idx) that returns the score to use.
            Tensors that it captures get gradients.
        block_mask: a torch BlockMask, a BlockGrid, a Mask or a mask_mod; None allows every pair.
        scale: factor on the scores; 1 / sqrt(D) by default.
        enable_gqa: whether G may be less than H; H must then be a multiple of G.
        return_lse: whether to return lse as well.
        kernel_options: {"kernel": name} asks for one of `flexcp.kernels.KERNELS`. The tuning
            options of torch's GPU kernels are for the kernel "flex".
        return_aux: which auxiliary outputs to return: `AuxRequest(lse=..., max_scores=...)`.
        sinks: [H] logits that join each row's denominator.

    Returns:
        out [B, H, Lq, Dv] in the query's type; with `return_lse` also lse [B, H, Lq], the natural
        logarithm of the denominators in float32 (float64 for float64); with `return_aux` an
        `AuxOutput` instead. Gradients flow through out and lse.

    >>> from flexcp import masks
    >>> q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    >>> out, lse = flex_attention(q, k, v, block_mask=masks.causal(), return_lse=True)
    >>> torch.allclose(out[:, :, 0], v[:, :, 0])
    True
    """
    query, key, value = autocast(query, key, value)
    check_tensors(query, key, value, enable_gqa)
    if return_lse and return_aux is not None:
        raise FlexCPError(
            "return_lse or return_aux", "both", "pass return_aux=AuxRequest(lse=True) alone"
        )
    if sinks is not None:
        check_sinks(sinks, query)
    positions = None if score_mod is None else positions_of(block_mask)
    if positions is not None:
        positions = (positions[0].to(query.device), positions[1].to(query.device))
    if key.shape[0] != query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    wants_max = return_aux is not None and return_aux.max_scores
    kernel = _asked_for(kernel_options)
    if torch.compiler.is_compiling() and kernel in ("flex", "reference"):
        raise FlexCPError(
            "a kernel that can be part of a compiled graph",
            repr(kernel),
            "leave it out inside torch.compile, or call it outside",
        )
    if torch.compiler.is_compiling() and score_mod is None:
        out, lse, highest = compiled_attention(
            query, key, value, block_mask, scale, sinks, wants_max, kernel
        )
    elif torch.compiler.is_compiling() and score_mod is not None:
        mod = _translated(score_mod, positions, looking_up)
        arguments = (query, key, value, mod, block_mask, scale, sinks)
        out, lse, highest = _traced(positions, traced_attention, *arguments)
    else:
        choice = choose(
            query,
            value,
            score_mod=score_mod is not None,
            max_scores=wants_max,
            is_one_rectangle=block_mask is None,
            kernel=kernel,
        )
        if choice.kernel == "flex":
            grid = None if block_mask is None else as_grid(block_mask, query, key)
            out, lse, most = _traced(
                positions,
                flex_forward,
                query,
                key,
                value,
                grid,
                scale=scale,
                score_mod=_translated(score_mod, positions, looking_up),
                sinks=sinks,
                max_scores=wants_max,
                options={k: v for k, v in (kernel_options or {}).items() if k != "kernel"},
            )
            highest = query.new_empty(0) if most is None else most
        else:
            prepared = compiled_shapes_for(block_mask, query, key)
            mod = _translated(score_mod, positions, on_global_positions)
            out, lse, highest = _run(
                choice, prepared, query, key, value, mod, scale, sinks, wants_max
            )
    if return_aux is not None:
        return out, AuxOutput(lse if return_aux.lse else None, highest if wants_max else None)
    return (out, lse) if return_lse else out


def _translated(
    score_mod: ScoreFunction | None,
    positions: tuple[Tensor, Tensor] | None,
    translate: Callable[[ScoreFunction, Tensor, Tensor], ScoreFunction],
) -> ScoreFunction | None:
    if score_mod is None or positions is None:
        return score_mod
    return translate(score_mod, *positions)


def _traced(positions: object, attend: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Attention that is compiled, in which score_mod is translated already if it has to be."""
    if positions is None:
        return attend(*arguments, **options)
    before, Tracing.translated = Tracing.translated, True
    try:
        return attend(*arguments, **options)
    finally:
        Tracing.translated = before


def _run(
    choice: Choice,
    prepared: CompiledShapes,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None,
    scale: float,
    sinks: Tensor | None,
    wants_max: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if choice.kernel == "reference":
        return _run_reference(prepared, query, key, value, score_mod, scale, sinks)
    mod: ScoreMod | None = None
    if score_mod is not None:
        mod = examine(score_mod, accumulation_dtype(query.dtype), query.device)
    call = Call(prepared, scale, choice.fused, mod, wants_max)
    captured = () if mod is None else mod.captured
    out, lse, highest = Attention.apply(  # type: ignore[no-untyped-call]
        call, query, key, value, sinks, *captured
    )
    return out, lse, highest


def _run_reference(
    prepared: CompiledShapes,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None,
    scale: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = prepared.shapes
    planes = torch.stack([allowed_pairs(shapes, plane) for plane in range(len(shapes.planes))])
    allowed = planes[torch.tensor(shapes.plane_of)].to(query.device)
    found = dense_attention(
        query,
        key,
        value,
        allowed=allowed,
        score_mod=score_mod,
        sinks=sinks,
        scale=scale,
        q_positions=prepared.positions("q", query.device),
        kv_positions=prepared.positions("kv", query.device),
    )
    return found.out, found.lse, found.max_scores


# Tuning options of torch's GPU kernels. torch ignores them on CPU as well.
_GPU_OPTIONS = frozenset(
    {
        "num_warps", "num_stages", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2",
        "BLOCK_N2", "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ",
        "FORCE_USE_FLEX_ATTENTION", "USE_TMA", "kpack", "matrix_instr_nonkdim", "waves_per_eu",
        "BACKEND",
    }
)  # fmt: skip


def _asked_for(options: Mapping[str, Any] | None) -> str | None:
    for name in options or {}:
        plain = name.removeprefix("fwd_").removeprefix("bwd_")
        if name != "kernel" and plain not in _GPU_OPTIONS:
            raise FlexCPError(
                "kernel_options to have the key 'kernel' or options of torch's FlexKernelOptions",
                repr(name),
                "leave it out",
            )
    return None if options is None else options.get("kernel")
