"""Masks, grids and attention, as users call them."""

from __future__ import annotations

from dataclasses import replace

import torch

import flexcp
from flexcp import BlockGrid, Mask, masks
from flexcp.compat import flex_attention as flex
from flexcp.compat.varlen import varlen_attn
from tests.junk.calls import Call, call
from tests.junk.samples import (
    BLOCK_MASK,
    CAUSAL,
    GRID,
    HALF,
    OPTIONS,
    PACKED,
    SCALE,
    TOKENS,
    Q,
    X,
    on_ranks,
    rows,
)
from tests.junk.values import (
    a,
    absent,
    either,
    flag,
    function,
    integers,
    listed,
    mapping,
    masklike,
    nothing,
    number,
    one_of,
    shaped,
    text,
    whole,
)

ENDS = torch.tensor([0, 3, 8], dtype=torch.int32)


def as_torch(function: object, **arguments: object) -> Call:
    """A call of a function that stands for one of torch's."""
    return replace(call(function, **arguments), raises_as_torch=True)  # type: ignore[arg-type]


def is_4d(x: object) -> bool:
    """Whether something is a tensor of floats with four dimensions."""
    is_one = isinstance(x, torch.Tensor) and x.is_floating_point() and not x.is_nested
    return is_one and x.dim() == 4


def mask_calls() -> dict[str, Call]:
    """Masks and grids."""
    size = (3, whole(1))
    lengths = either(listed(whole(0)), listed(listed(whole(0))), integers(1, 2, low=0))
    return {
        "sliding_window": call(masks.sliding_window, left=(3, whole(0)), right=(0, whole(0))),
        "prefix_lm": call(masks.prefix_lm, length=(3, either(whole(0), integers(0, 1)))),
        "document": call(
            masks.document,
            ids=(
                torch.tensor([0, 0, 1]),
                either(integers(1, 2), listed(whole()), listed(listed(whole()))),
            ),
        ),
        "document by lengths": call(masks.document, lengths=([1, 2], lengths)),
        "document by ends": call(
            masks.document, cu_seqlens=([0, 2], either(listed(whole(0)), integers(1)))
        ),
        "ids_from_lengths": call(masks.ids_from_lengths, lengths=([1, 2], lengths)),
        "chunked": call(masks.chunked, size=size),
        "block_causal": call(masks.block_causal, size=size),
        "global_tokens": call(masks.global_tokens, count=(3, whole(0))),
        "shared_prefix": call(
            masks.shared_prefix,
            prefix=(3, whole(0)),
            lengths=([1, 2], either(listed(whole(0)), integers(1, low=0))),
        ),
        "Mask": call(
            flexcp.Mask, mask_mod=(lambda b, h, q, kv: q >= kv, function), name=("x", text)
        ),
        "as_mask": call(masks.as_mask, mask=(CAUSAL, either(a(Mask), function))),
        "Mask.shifted": call(CAUSAL.shifted, q_start=(1, whole()), kv_start=(1, whole())),
        "&": call(lambda other: CAUSAL & other, (CAUSAL, either(a(Mask), function))),
        "|": call(lambda other: CAUSAL | other, (CAUSAL, either(a(Mask), function))),
        "mask_mod": call(lambda mask: masks.as_mask(mask).mask_mod, (CAUSAL, function)),
        "build_block_grid": call(
            flexcp.build_block_grid,
            mask=(CAUSAL, either(a(Mask), function)),
            q_len=(8, TOKENS),
            kv_len=(8, either(absent, TOKENS)),
            block_size=(4, either(whole(1), listed(whole(1)))),
            batch=(1, whole(1)),
            heads=(1, whole(1)),
        ),
        "BlockGrid.kind": call(
            GRID.kind, b=(0, whole()), h=(0, whole()), i=(0, whole()), j=(0, whole())
        ),
        "BlockGrid.window": call(
            GRID.window,
            rows=(range(2), either(absent, a(range))),
            cols=(range(2), either(absent, a(range))),
        ),
        "BlockGrid.to_block_mask": call(
            GRID.to_block_mask,
            device=("cpu", either(a(torch.device), one_of("cpu", "meta"))),
            separate_full_blocks=(True, flag),
        ),
        "BlockGrid.from_block_mask": call(
            BlockGrid.from_block_mask, block_mask=(BLOCK_MASK, nothing)
        ),
    }


def attention_calls() -> dict[str, Call]:
    """Attention on one device and on ranks."""
    packed = (PACKED, shaped(8, 2, 4))
    ends = either(listed(whole(0)), integers(1))
    one_device = {k: v for k, v in OPTIONS.items() if k != "kernel"}
    return {
        "flex_attention": call(
            flexcp.flex_attention,
            query=(X, rows),
            key=Q,
            value=Q,
            block_mask=(CAUSAL, either(absent, masklike)),
            enable_gqa=(False, flag),
            kernel_options=(None, either(absent, mapping)),
            return_aux=(None, absent),
            **one_device,
        ),
        "varlen_attention": call(
            flexcp.varlen_attention,
            q=packed,
            k=packed,
            v=packed,
            cu_seqlens=([0, 3, 8], ends),
            plan=(None, absent),
            cu_seqlens_k=(None, either(absent, ends)),
            causal=(False, flag),
            window_size=((-1, -1), listed(whole())),
            mask=(None, absent),
            **OPTIONS,
        ),
        "attention": call(
            on_ranks(lambda plan, **given: flexcp.attention(plan=plan, **given)),
            q=(HALF, shaped(1, 2, 4, 4)),
            k=(HALF, shaped(1, 2, 4, 4)),
            v=(HALF, shaped(1, 2, 4, 4)),
            mask=(None, either(absent, one_of(""))),
            **OPTIONS,
        ),
        "kernels.explain": call(
            flexcp.kernels.explain,
            q=(X, is_4d),
            v=(X, is_4d),
            score_mod=(None, either(absent, function)),
            max_scores=(False, flag),
            is_one_rectangle=(False, flag),
            kernel=(None, absent),
            dropout_p=(0.0, number(0, 1 - 1e-9)),
            mask_kind=(None, either(absent, one_of("causal", "full"))),
        ),
        "compat.varlen_attn": as_torch(
            varlen_attn,
            query=packed,
            key=packed,
            value=packed,
            cu_seq_q=(ENDS, nothing),
            cu_seq_k=(ENDS, either(absent, nothing)),
            max_q=(5, whole(0)),
            max_k=(5, whole(0)),
            scale=SCALE,
            window_size=((-1, -1), listed(whole())),
            enable_gqa=(False, flag),
            return_aux=(None, absent),
            plan=(None, absent),
        ),
        "compat.flex_attention": as_torch(
            flex.flex_attention,
            query=Q,
            key=Q,
            value=Q,
            score_mod=(None, either(absent, function)),
            block_mask=(BLOCK_MASK, absent),
            scale=SCALE,
            enable_gqa=(False, flag),
            return_lse=(False, flag),
            kernel_options=(None, either(absent, mapping)),
            return_aux=(None, absent),
        ),
        "create_block_mask": as_torch(
            flex.create_block_mask,
            mask_mod=(CAUSAL, either(a(Mask), function)),
            B=(1, either(absent, whole(1))),
            H=(1, either(absent, whole(1))),
            Q_LEN=(8, TOKENS),
            KV_LEN=(8, TOKENS),
            device=("cpu", either(absent, a(torch.device), one_of("cpu", "meta"), whole(0))),
            BLOCK_SIZE=(4, either(whole(1), listed(whole(1)))),
            _compile=(False, flag),
            separate_full_blocks=(True, flag),
        ),
    }
