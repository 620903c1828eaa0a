"""The two calls of attention: on one device, and over a plan. Nothing but arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from flexcp.errors import FlexCPError, check_flags, quote, require
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.score import ScoreFunction, check_score_mod
from flexcp.ops.arguments import (
    Seed,
    as_dropout_p,
    as_dropout_seed,
    as_scale,
    autocast,
    check_return_lse,
    check_sinks,
    check_tensors,
    needs_gradients,
    overridable,
)
from flexcp.ops.autograd import differentiable
from flexcp.ops.compiled import compiled_local_attention, compiled_sharded_attention, handle_of
from flexcp.ops.dropout import drawn_seed, traced_seed
from flexcp.ops.local import local_attention
from flexcp.ops.mask_cache import MaskLike
from flexcp.ops.sharded import sharded_op, tell_ranks_on_error
from flexcp.ops.traced import traced_local_attention, traced_sharded_attention
from flexcp.ops.traced_block_masks import in_graph_attention, is_of_the_graph
from flexcp.plan import Plan


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
    dropout_p: float = 0,  # 0.0 would be a symbol under torch.compile(dynamic=True)
    dropout_seed: Seed | None = None,
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
        dropout_p: Share of weights that are dropped after softmax, in [0, 1); the others are
            divided by 1 - dropout_p, and lse is without dropout.
        dropout_seed: Says which: the same seed drops the same (batch element, head, query, key)
            with every kernel, and over ranks. An int, or a CPU tensor of one; None draws it from
            torch's default CPU generator.

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
    check_flags(enable_gqa=enable_gqa, return_lse=return_lse)
    check_tensors(query, key, value, enable_gqa)
    check_score_mod(score_mod)
    if return_aux is not None:
        require("return_aux", return_aux, AuxRequest, "pass AuxRequest(lse=True)")
    if return_lse and return_aux is not None:
        raise FlexCPError(
            "return_lse or return_aux", "both", "pass return_aux=AuxRequest(lse=True) alone"
        )
    if sinks is not None:
        check_sinks(sinks, query)
    if key.shape[0] != query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    factor = as_scale(scale)
    factor = query.shape[-1] ** -0.5 if factor is None else factor
    wants_max = return_aux is not None and return_aux.max_scores
    kernel, options = _kernel_asked_for(kernel_options)
    p, given = as_dropout_p(dropout_p), as_dropout_seed(dropout_seed)
    if not torch.compiler.is_compiling():
        dropout = None
        if p > 0:
            dropout = Dropout(p, drawn_seed() if given is None else int(given))
        out, lse, highest = local_attention(
            query, key, value, block_mask, scale=factor, score_mod=score_mod, sinks=sinks,
            max_scores=wants_max, kernel=kernel, options=options, dropout=dropout,
        )  # fmt: skip
    elif kernel in ("flex", "reference"):
        raise FlexCPError(
            "a kernel that can be part of a compiled graph",
            quote(kernel),
            "leave it out inside torch.compile, or call it outside",
        )
    elif is_of_the_graph(block_mask):
        out, lse, highest = in_graph_attention(
            query, key, value, block_mask, score_mod, factor, sinks, p,
            traced_seed(given) if p > 0 else None,
        )  # fmt: skip
    elif score_mod is None:
        out, lse, highest = compiled_local_attention(
            query, key, value, handle_of(block_mask), factor, sinks, wants_max, kernel, p,
            traced_seed(given) if p > 0 else None,
        )  # fmt: skip
    else:
        out, lse, highest = traced_local_attention(
            query, key, value, block_mask, score_mod, factor, sinks, p,
            traced_seed(given) if p > 0 else None,
        )  # fmt: skip
    if return_aux is not None:
        return out, AuxOutput(lse if return_aux.lse else None, highest if wants_max else None)
    return (out, lse) if return_lse else out


@overridable
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    mask: str | None = None,
    score_mod: ScoreFunction | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    dropout_p: float = 0,  # 0.0 would be a symbol under torch.compile(dynamic=True)
    dropout_seed: Seed | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of this rank's queries over the whole sequence, with gradients.

    Every rank calls it with its own rows, as `plan.shard` gives them. Gradients of k and v are
    complete on the rank that owns them. Gradients of `sinks` and of tensors that `score_mod`
    captures are those of what this rank computes: sum them over ranks, as for any parameter.

    Args:
        q: [B, H, L, D], the rows of `plan.positions()`.
        k: [B, G, L, D], of the same rows; H must be a multiple of G. A batch size of 1 is shared by
            all batch elements.
        v: [B, G, L, Dv], of the same rows.
        plan: What `make_plan` returned, with a mesh.
        mask: The name of the mask, if the plan was made for several.
        score_mod: A function of (score, b, h, q_idx, kv_idx), which sees global positions.
        scale: Factor on the scores; 1 / sqrt(D) by default.
        sinks: [H] logits that join each row's denominator.
        return_lse: Whether to return lse [B, H, L] as well; gradients flow through it.
        kernel: One of `flexcp.kernels.KERNELS` that returns partial results, by name; the best for
            the tensors by default.
        dropout_p: Share of weights that are dropped after softmax, in [0, 1); the others are
            divided by 1 - dropout_p, and lse is without dropout.
        dropout_seed: Says which, by global batch element, head, query and key, so that it is the
            same as in one process. All ranks pass the same, an int or a CPU tensor of one; None
            draws it from torch's default CPU generator, whose state must be the same on all ranks.

    >>> import flexcp
    >>> from flexcp.testing import simulate
    >>> def rank(mesh):
    ...     plan = flexcp.make_plan(flexcp.masks.causal(), 10, mesh, num_heads=2, head_dim=4)
    ...     x = torch.ones(1, 2, 10, 4)
    ...     out = attention(*(plan.shard(x, 2) for _ in range(3)), plan)
    ...     return plan.unshard(out, 2)
    >>> torch.allclose(simulate(rank, 3)[0], torch.ones(1, 2, 10, 4))
    True
    """
    if type(plan) is not Plan:
        require("plan", plan, Plan, "pass what flexcp.make_plan returned")
    check_return_lse(return_lse)
    out, lse = attention_of_heads(
        q, k, v, plan, mask, score_mod, scale, sinks, kernel, dropout_p, dropout_seed
    )
    return (out, lse) if return_lse else out


def attention_of_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    mask: str | None,
    score_mod: ScoreFunction | None,
    scale: float | None,
    sinks: Tensor | None,
    kernel: str | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed | None = None,
    *,
    first_head: int = 0,
) -> tuple[Tensor, Tensor]:
    """Out and lse of `attention`, for heads that are counted from a given one by dropout."""
    if not torch.compiler.is_compiling():
        with tell_ranks_on_error(plan):
            scale = as_scale(scale)
            q, k, v = _checked(q, k, v, sinks)
            if score_mod is not None:
                check_score_mod(score_mod)
            if mask is not None:
                require("mask", mask, str, "pass the name of one of the plan's masks")
            if kernel is not None:
                require("kernel", kernel, str, "pass a name of flexcp.kernels.KERNELS")
            p, given = as_dropout_p(dropout_p), as_dropout_seed(dropout_seed)
            op = sharded_op(
                q, k, v, plan, mask, score_mod, scale, sinks, kernel=kernel, dropout_p=p,
                first_head=first_head,
            )  # fmt: skip
        call = op.begin(None if given is None else int(given))
        out, lse, *_ = differentiable(call, q, k, v, sinks)
        return out, lse
    scale = as_scale(scale)
    q, k, v = _checked(q, k, v, sinks)
    p, given = as_dropout_p(dropout_p), as_dropout_seed(dropout_seed)
    seed = traced_seed(given) if p > 0 else None
    if score_mod is None:
        gradients = needs_gradients(q, k, v, sinks)
        return compiled_sharded_attention(
            q, k, v, plan, mask, scale, sinks, gradients, kernel, p, seed, first_head
        )
    if kernel is not None:
        raise FlexCPError(
            "no kernel by name with a score_mod inside torch.compile, which compiles its own",
            quote(kernel),
            "leave it out, or call attention outside",
        )
    return traced_sharded_attention(
        q, k, v, plan, mask, score_mod, scale, sinks, needs_gradients(k, v), p, seed, first_head
    )


def _checked(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors as they are computed with, if they fit together."""
    q, k, v = autocast(q, k, v)
    check_tensors(q, k, v, True)
    if sinks is not None:
        check_sinks(sinks, q)
    if k.shape[0] != q.shape[0]:
        k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
    return q, k, v


# Tuning options of torch's GPU kernels. torch ignores them on CPU as well.
_GPU_OPTIONS = frozenset(
    {
        "num_warps", "num_stages", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2",
        "BLOCK_N2", "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ",
        "FORCE_USE_FLEX_ATTENTION", "USE_TMA", "kpack", "matrix_instr_nonkdim", "waves_per_eu",
        "BACKEND",
    }
)  # fmt: skip


def is_kernel_option(name: str) -> bool:
    """Whether something is known among `kernel_options`.

    >>> is_kernel_option("fwd_num_warps"), is_kernel_option("speed")
    (True, False)
    """
    return isinstance(name, str) and (
        name == "kernel" or name.removeprefix("fwd_").removeprefix("bwd_") in _GPU_OPTIONS
    )


def _kernel_asked_for(given: Mapping[str, Any] | None) -> tuple[str | None, Mapping[str, Any]]:
    """The kernel's name, if one is asked for, and the tuning options."""
    if given is not None:
        require("kernel_options", given, Mapping, 'pass a dict, such as {"kernel": "flash"}')
    options = dict(given or {})
    kernel = options.pop("kernel", None)
    for name in options:
        if not is_kernel_option(name):
            raise FlexCPError(
                "kernel_options to have the key 'kernel' or options of torch's FlexKernelOptions",
                quote(name),
                "leave it out",
            )
    return kernel, options
