"""torch.nn.attention.varlen under its own names: on CPU too, with a backward pass, over ranks.

Rows that see no key give 0 with an lse of -inf. `num_splits` and the longest lengths are taken
without a use for them: results don't depend on what else is in a pack.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexcp.errors import FlexCPError, check_flags, require, told, whole_number
from flexcp.ops.packed_masks import PackedLengths, Window
from flexcp.ops.varlen import packed_attention
from flexcp.plan import Plan

__all__ = ["AuxRequest", "varlen_attn", "varlen_attn_out"]


class AuxRequest(NamedTuple):
    """What to return besides the output."""

    lse: bool = False


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,  # noqa: ARG001
    plan: Plan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within sequences that are packed one after the other, as torch's `varlen_attn`.

    Args:
        query: [Tq, H, D]; over a plan this rank's rows.
        key: [Tk, G, D], or pages [pages, page size, G, D] with a block_table.
        value: As the key.
        cu_seq_q: Integers [N + 1]: where each sequence starts among the queries, and where the last
            ends. Tokens after that are padding: they see nothing.
        cu_seq_k: The same for keys. None with a block_table, or as the queries.
        max_q: The longest number of queries; of no meaning here.
        max_k: The longest number of keys; of no meaning here.
        return_aux: `AuxRequest(lse=True)` returns lse [H, Tq] as well.
        scale: Factor on the scores; 1 / sqrt(D) by default.
        window_size: Keys that a query sees to the left and right of it; -1 is all: (-1, 0) is
            causal. The last query of a sequence is level with its last key.
        enable_gqa: Whether G may be less than H.
        seqused_k: Integers [N]: how many keys of each sequence count. Without gradients only.
        block_table: Integers [N, pages of a sequence]: which pages hold a sequence's keys; needs
            seqused_k. Without gradients only.
        num_splits: Of no meaning here.
        plan: Beyond torch: what `flexcp.make_plan` returned for this packing, to run over ranks.

    >>> q, k, v = (torch.randn(5, 2, 8) for _ in range(3))
    >>> ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> out = varlen_attn(q, k, v, ends, ends, 3, 3, window_size=(-1, 0))
    >>> torch.allclose(out[[0, 2]], v[[0, 2]])
    True
    """
    _check_types(query, key, value, enable_gqa, cu_seq_q, cu_seq_k, max_q, max_k)
    if return_aux is not None and not isinstance(getattr(return_aux, "lse", None), bool):
        # As torch, by what it says and not by its class: torch has one of this name as well.
        raise FlexCPError("return_aux of type AuxRequest", told(return_aux), "pass AuxRequest()")
    if plan is not None:
        require("plan", plan, Plan, "pass what flexcp.make_plan returned")
    _check_heads(query, key, enable_gqa, paged=block_table is not None)
    _check_inference(query, key, value, seqused_k=seqused_k, block_table=block_table)
    if plan is not None and (seqused_k is not None or block_table is not None):
        raise FlexCPError(
            "whole sequences over a plan",
            "seqused_k" if block_table is None else "block_table",
            "leave it out, or attend on one device",
        )
    if block_table is not None:
        if seqused_k is None:
            raise FlexCPError(
                "seqused_k with a block_table", "None", "pass how many keys of each sequence count"
            )
        key, value, cu_seq_k = _from_pages(key, value, block_table, seqused_k)
        seqused_k = None
    lengths = PackedLengths(
        cu_seq_q, None if cu_seq_k is cu_seq_q else cu_seq_k, seqused_k, allows_padding=plan is None
    )
    if plan is not None and lengths.cu_seqlens_k is not None:
        _require_equal(lengths.cu_seqlens, lengths.cu_seqlens_k)
        lengths = PackedLengths(cu_seq_q)
    return packed_attention(
        query, key, value, lengths, Window.of(window_size, is_causal=False), plan,
        scale=scale, return_lse=return_aux is not None and return_aux.lse,
    )  # fmt: skip


def varlen_attn_out(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`varlen_attn` into a tensor that is given; without gradients, as torch's."""
    with torch.no_grad():
        found, lse = varlen_attn(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
            return_aux=AuxRequest(lse=True), scale=scale, window_size=window_size,
            enable_gqa=enable_gqa, seqused_k=seqused_k, block_table=block_table,
            num_splits=num_splits,
        )  # fmt: skip
        if out.shape != found.shape or out.dtype != found.dtype:
            raise FlexCPError(
                f"out of shape {tuple(found.shape)} and dtype {found.dtype}",
                f"{tuple(out.shape)} and {out.dtype}",
                "make it with torch.empty_like(query)",
            )
        out.copy_(found)
    return (out, lse) if return_aux is not None and return_aux.lse else out


def _check_types(
    query: object, key: object, value: object, enable_gqa: object, cu_seq_q: object,
    cu_seq_k: object, max_q: object, max_k: object,
) -> None:  # fmt: skip
    """Raises where torch would fail on the first attribute that it looks for."""
    for name, x in (("query", query), ("key", key), ("value", value), ("cu_seq_q", cu_seq_q)):
        require(name, x, Tensor, "pass a torch.Tensor")
    if cu_seq_k is not None:
        require("cu_seq_k", cu_seq_k, Tensor, "pass a torch.Tensor, or None with a block_table")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if isinstance(x, Tensor) and (x.is_nested or x.dim() < 3):
            got = "a nested tensor" if x.is_nested else f"shape {tuple(x.shape)}"
            raise FlexCPError(f"{name} of shape [tokens, heads, head dim]", got, "pack sequences")
    if torch.compiler.is_compiling():
        return  # where numbers may be symbols
    check_flags(enable_gqa=enable_gqa)
    for name, size in (("max_q", max_q), ("max_k", max_k)):
        whole_number(name, size, at_least=0, fix="pass the length of the longest sequence")


def _check_heads(query: Tensor, key: Tensor, enable_gqa: bool, *, paged: bool) -> None:
    """Torch's own words."""
    heads, kv_heads = query.size(1), key.size(2 if paged else 1)
    if not enable_gqa and heads != kv_heads:
        raise ValueError(
            f"Expect query and key/value to have the same number of heads but got Hq={heads} and "
            f"Hkv={kv_heads}. Try setting enable_gqa=True for GQA."
        )
    if enable_gqa and heads % kv_heads != 0:
        raise ValueError(
            f"Expect number of query heads to be a multiple of kv heads for GQA but got Hq={heads} "
            f"and Hkv={kv_heads}."
        )


def _check_inference(*tensors: Tensor, **inference_only: Tensor | None) -> None:
    """Torch's own words."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        for name, given in inference_only.items():
            if given is not None:
                raise RuntimeError(f"{name} is an inference-only parameter.")


def _from_pages(
    key: Tensor, value: Tensor, block_table: Tensor, used: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values packed one after the other, and where each sequence starts."""
    size = key.shape[1]
    counts = used.to("cpu", torch.int64)
    most = block_table.shape[1] * size
    if bool((counts > most).any()) or bool((counts < 0).any()):
        raise FlexCPError(
            f"seqused_k of at most {most}, what the pages of a sequence hold",
            str(int(counts.max())),
            "give the sequence more pages",
        )
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    sequence = torch.arange(counts.numel()).repeat_interleave(counts)
    place = torch.arange(int(ends[-1])) - ends[sequence]
    pages = block_table.to("cpu", torch.int64)[sequence, place // size]
    if pages.numel() and not 0 <= int(pages.min()) <= int(pages.max()) < key.shape[0]:
        raise FlexCPError(
            f"pages from 0 to {key.shape[0] - 1} in block_table",
            f"{int(pages.min())} to {int(pages.max())}",
            "fill the table as far as seqused_k needs it",
        )
    rows = (pages * size + place % size).to(key.device)
    return key.flatten(0, 1)[rows], value.flatten(0, 1)[rows], ends


def _require_equal(cu_seq_q: Tensor, cu_seq_k: Tensor) -> None:
    if not torch.equal(cu_seq_q, cu_seq_k):
        raise FlexCPError(
            "keys packed as the queries over a plan",
            "other numbers in cu_seq_k",
            "over ranks, every token is a query and a key",
        )
