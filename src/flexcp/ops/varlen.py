"""Attention of packed sequences, [tokens, heads, head dim], on one device and over a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexcp.errors import FlexCPError, check_flags, quote, require, told
from flexcp.graph_handles import constant_handle, owner_of
from flexcp.kernels.score import ScoreFunction
from flexcp.ops.api import attention, flex_attention
from flexcp.ops.arguments import (
    Seed,
    as_dropout_p,
    as_dropout_seed,
    as_scale,
    autocast,
    check_sinks,
    check_tensors,
    needs_gradients,
    overridable,
    shape_text,
)
from flexcp.ops.compiled import compiled_local_attention, compiled_sharded_attention
from flexcp.ops.dropout import traced_seed
from flexcp.ops.packed_masks import PackedLengths, Window, packed_mask_handle
from flexcp.ops.sharded import tell_ranks_on_error
from flexcp.plan import Plan


@overridable
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    plan: Plan | None = None,
    *,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    mask: str | None = None,
    score_mod: ScoreFunction | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    dropout_p: float = 0,
    dropout_seed: Seed | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention within each of several sequences that are packed one after the other.

    No length has to be a multiple of anything, and another packing compiles nothing new. The
    packing is worked out once for a tensor of cumulative lengths: pass the same one to all layers.

    Args:
        q: [T, H, D]; over a plan the rows of `plan.positions()`, as `plan.shard(q, 0)` gives them.
        k: [T, G, D]; H must be a multiple of G.
        v: [T, G, Dv].
        cu_seqlens: Integers [sequences + 1]: where each sequence starts, and where the last ends.
            Over a plan they are those of the whole pack, and the plan has to be made for them.
        plan: What `make_plan` returned for `masks.document(cu_seqlens=cu_seqlens)`, with
            `& masks.causal()` or `& masks.sliding_window(...)` where these are asked for. None
            computes on this device alone.
        cu_seqlens_k: The same for the keys, if they are packed otherwise than the queries; on one
            device only. The last query of a sequence is then level with its last key.
        causal: Whether a query sees no later keys.
        window_size: How many keys a query sees to the left and to the right; -1 is all.
        mask: The name of the mask, if the plan was made for several.
        score_mod: A function of (score, b, h, q_idx, kv_idx), which sees positions in the pack.
        scale: Factor on the scores; 1 / sqrt(D) by default.
        sinks: [H] logits that join each row's denominator.
        return_lse: Whether to return lse [H, T] as well; gradients flow through it.
        kernel: One of `flexcp.kernels.KERNELS` by name; the best for the tensors by default.
        dropout_p: Share of the weights that are dropped, in [0, 1).
        dropout_seed: Which are dropped is a function of it and of positions in the pack; from
            torch's default generator if it is None.

    >>> q, k, v = (torch.randn(5, 2, 8) for _ in range(3))
    >>> out = varlen_attention(q, k, v, torch.tensor([0, 2, 5]), causal=True)
    >>> torch.allclose(out[[0, 2]], v[[0, 2]])
    True
    """
    check_flags(causal=causal, return_lse=return_lse)
    if plan is not None:
        require("plan", plan, Plan, "pass what flexcp.make_plan returned")
    elif mask is not None:
        raise FlexCPError("no name of a mask without a plan", quote(mask), "leave mask out")
    window = Window.of(window_size, causal)
    lengths = _lengths(cu_seqlens, cu_seqlens_k)
    return packed_attention(
        q, k, v, lengths, window, plan,
        mask=mask, score_mod=score_mod, scale=scale, sinks=sinks, return_lse=return_lse,
        kernel=kernel, dropout_p=dropout_p, dropout_seed=dropout_seed,
    )  # fmt: skip


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: PackedLengths,
    window: Window,
    plan: Plan | None,
    *,
    mask: str | None = None,
    score_mod: ScoreFunction | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    dropout_p: float = 0,
    dropout_seed: Seed | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`varlen_attention`, once it is known what is packed where."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.is_nested or x.dim() != 3:
            raise FlexCPError(
                f"{name} of shape [tokens, heads, head dim]",
                shape_text(x),
                "pack the sequences one after the other, without a batch dimension",
            )
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if plan is not None and lengths.cu_seqlens_k is not None:
        raise FlexCPError(
            "keys packed as the queries over a plan",
            "cu_seqlens_k",
            "leave it out; over ranks, every token is a query and a key",
        )
    if torch.compiler.is_compiling():
        if score_mod is not None:
            raise FlexCPError(
                "no score_mod for packed sequences inside torch.compile",
                "one",
                "make the mask or the plan outside, with masks.document(cu_seqlens=...), and call "
                "flex_attention or attention",
            )
        found: Any = _compiled(
            q, k, v, lengths, window, plan, mask, scale, sinks, kernel, dropout_p, dropout_seed
        )
    elif plan is not None:
        with tell_ranks_on_error(plan):
            _require_planned(plan, plan.mask_name(mask), lengths, window)
        found = attention(
            q, k, v, plan, mask=mask, score_mod=score_mod, scale=scale, sinks=sinks,
            return_lse=True, kernel=kernel, dropout_p=dropout_p, dropout_seed=dropout_seed,
        )  # fmt: skip
    else:
        found = flex_attention(
            q, k, v, score_mod, lengths.mask(q.shape[2], k.shape[2], window), scale,
            enable_gqa=True, return_lse=True, sinks=sinks,
            kernel_options=None if kernel is None else {"kernel": kernel},
            dropout_p=dropout_p, dropout_seed=dropout_seed,
        )  # fmt: skip
    out, lse = found[0].squeeze(0).transpose(0, 1), found[1].squeeze(0)
    return (out, lse) if return_lse else out


def _compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: PackedLengths,
    window: Window,
    plan: Plan | None,
    mask: str | None,
    scale: float | None,
    sinks: Tensor | None,
    kernel: str | None,
    dropout_p: float,
    dropout_seed: Seed | None,
) -> tuple[Tensor, Tensor]:
    """As part of a compiled graph, which reads the cumulative lengths when it runs."""
    q, k, v = autocast(q, k, v)
    check_tensors(q, k, v, True)
    if sinks is not None:
        check_sinks(sinks, q)
    factor = as_scale(scale)
    p, given = as_dropout_p(dropout_p), as_dropout_seed(dropout_seed)
    seed = traced_seed(given) if p > 0 else None
    if plan is not None:
        name = plan.mask_name(mask)
        handle = _planned_handle(
            lengths.cu_seqlens, plan.graph_handle, name, window.left, window.right
        )
        gradients = needs_gradients(q, k, v, sinks)
        return compiled_sharded_attention(
            q, k, v, plan, name, factor, sinks, gradients, kernel, p, seed, 0, handle=handle
        )
    handle = packed_mask_handle(
        lengths.cu_seqlens, lengths.cu_seqlens_k, lengths.used_k, q.shape[2], k.shape[2],
        window.left, window.right, lengths.allows_padding,
    )  # fmt: skip
    factor = q.shape[-1] ** -0.5 if factor is None else factor
    out, lse, _ = compiled_local_attention(q, k, v, handle, factor, sinks, False, kernel, p, seed)
    return out, lse


@torch.library.custom_op("flexcp::planned_pack", mutates_args=())
def _planned_handle(
    cu_seqlens: Tensor, handle: Tensor, mask: str, left: int | None, right: int | None
) -> Tensor:
    """The handle of a plan that was found, when the graph runs, to be for this packing."""
    plan = owner_of(handle, keep=True)
    assert isinstance(plan, Plan)
    with tell_ranks_on_error(plan):
        _require_planned(plan, mask, PackedLengths(cu_seqlens), Window(left, right))
    return constant_handle(plan)


@_planned_handle.register_fake
def _(
    cu_seqlens: Tensor,  # noqa: ARG001
    handle: Tensor,
    mask: str,  # noqa: ARG001
    left: int | None,  # noqa: ARG001
    right: int | None,  # noqa: ARG001
) -> Tensor:
    return torch.empty_like(handle)


def _lengths(
    cu_seqlens: Tensor | Sequence[int], cu_seqlens_k: Tensor | Sequence[int] | None
) -> PackedLengths:
    is_another = cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens
    k_ends = _as_integers(cu_seqlens_k) if cu_seqlens_k is not None and is_another else None
    return PackedLengths(_as_integers(cu_seqlens), k_ends)


def _as_integers(given: Tensor | Sequence[int]) -> Tensor:
    if isinstance(given, Tensor):
        return given
    try:
        return torch.as_tensor(given, device="cpu")
    except Exception:  # torch's own, or of an object's own
        raise FlexCPError(
            "cu_seqlens as integers [sequences + 1]",
            told(given),
            "pass where each sequence starts, and then where the last one ends",
        ) from None


def _require_planned(plan: Plan, name: str, lengths: PackedLengths, window: Window) -> None:
    """Raises unless the plan is for this packing: it decides which pairs attend."""
    planned, length = plan.grids[name].mask, plan.layout.seq_len
    asked = lengths.mask(length, length, window)
    if asked != planned and window.mask(length) & lengths.mask(length, length, Window()) != planned:
        raise FlexCPError(
            f"a plan for the mask {asked.name!r} of these cu_seqlens",
            f"one for {planned.name!r}, or for other lengths",
            f"make_plan({_code_of(window, length)}, ...) with the same cu_seqlens",
        )


def _code_of(window: Window, length: int) -> str:
    """The mask as a user writes it."""
    own = "masks.document(cu_seqlens=cu_seqlens)"
    name = window.mask(length).name
    if name == "full":
        return own
    return f"{own} & masks.{name if '(' in name else name + '()'}"
