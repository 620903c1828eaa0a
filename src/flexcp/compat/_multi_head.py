"""torch's multi_head_attention_forward around an attention function of the caller's choice."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from flexcp.errors import FlexCPError


def multi_head_attention_forward(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = False,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """As `torch.nn.functional.multi_head_attention_forward` without weights.

    torch's function modes see that function as one call, and not what it calls.

    `attend` is called as `F.scaled_dot_product_attention`, with [B, H, L, D] tensors. Query, key
    and value are [L, B, E], or [L, E]; they and the rest are as in torch.

    >>> import torch
    >>> mha = torch.nn.MultiheadAttention(8, 2)
    >>> x = torch.randn(5, 3, 8)
    >>> out, _ = multi_head_attention_forward(
    ...     functional.scaled_dot_product_attention, x, x, x, 8, 2, mha.in_proj_weight,
    ...     mha.in_proj_bias, None, None, False, 0.0, mha.out_proj.weight, mha.out_proj.bias)
    >>> torch.allclose(out, mha(x, x, x)[0], atol=1e-6)
    True
    """
    del need_weights, average_attn_weights
    added = {
        "bias_k": bias_k,
        "bias_v": bias_v,
        "add_zero_attn": add_zero_attn or None,
        "static_k": static_k,
        "static_v": static_v,
    }
    given = [name for name, x in added.items() if x is not None]
    if given:
        raise FlexCPError(
            "multi-head attention whose keys and values are those of the sequence alone",
            f"{', '.join(given)}",
            "leave it out: a key that belongs to no token belongs to no rank",
        )
    if embed_dim_to_check != query.shape[-1]:
        raise FlexCPError(
            f"an embedding dimension of {embed_dim_to_check}", f"{query.shape[-1]}", "check query"
        )
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    # The hint stands for the mask, as in torch, which can use it in the same case only.
    is_causal = is_causal and key_padding_mask is None
    mask = None if is_causal else attn_mask if attn_mask is not None else key_padding_mask
    if use_separate_proj_weight:
        weights = [q_proj_weight, k_proj_weight, v_proj_weight]
    else:
        weights = [None] * 3 if in_proj_weight is None else list(in_proj_weight.chunk(3))
    biases = [None] * 3 if in_proj_bias is None else list(in_proj_bias.chunk(3))

    def heads(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None, "torch's module has either one or three of them"
        rows = functional.linear(x, weight, bias)
        rows = rows if rows.dim() == 3 else rows.unsqueeze(1)
        split: Tensor = rows.unflatten(-1, (num_heads, -1))
        return split.permute(1, 2, 0, 3)

    q, k, v = (heads(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    out = attend(q, k, v, mask, dropout_p if training else 0.0, is_causal)
    out = functional.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    return out if query.dim() == 3 else out.squeeze(1), None
