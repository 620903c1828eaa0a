"""The attention half of torch.nn.attention.flex_attention: same names, same errors, on any device.

torch checks its arguments before anything else; so does this, with torch's error classes for the
same mistakes. Gradients on CPU, which torch refuses, simply work.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    noop_mask,
)

from flexcp.errors import FlexCPError, check_flags, require
from flexcp.kernels.score import ScoreFunction
from flexcp.masks import Mask
from flexcp.ops.api import flex_attention as _attention
from flexcp.ops.api import is_kernel_option
from flexcp.ops.arguments import FLOATS, overridable
from flexcp.ops.mask_cache import in_graph

__all__ = ["AuxOutput", "AuxRequest", "FlexKernelOptions", "flex_attention"]


class BlockMaskLengthError(ValueError, RuntimeError):
    """A BlockMask of another length than the tensors.

    torch up to 2.13 raises a ValueError here, and a RuntimeError from 2.14 on: code that catches
    either goes on working.
    """


_BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")
_ANY_LENGTH = 1 << 30


@overridable
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Torch's `flex_attention`, with gradients on every device and at SDPA's speed on CPU.

    Args:
        query: [B, Hq, L, E].
        key: [B, Hkv, S, E]; computed with in the query's type.
        value: [B, Hkv, S, Ev]; computed with in the query's type.
        score_mod: a function of (score, b, h, q_idx, kv_idx).
        block_mask: which blocks to compute, and a mask_mod for the partial ones.
        scale: factor on the scores; 1 / sqrt(E) by default.
        enable_gqa: whether query heads may share key heads.
        return_lse: whether to return the logarithm of the denominators as well.
        kernel_options: tuning options of torch's GPU kernels; like torch, without effect on CPU,
            and unknown ones without effect anywhere.
        return_aux: which auxiliary outputs to return.

    >>> import torch
    >>> q = torch.randn(1, 2, 8, 4, requires_grad=True)
    >>> flex_attention(q, q, q).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 2, 8, 4])
    """
    _check_types(query, key, value, block_mask, kernel_options)
    check_flags(enable_gqa=enable_gqa, return_lse=return_lse)
    _check_tensors(query, key, value, enable_gqa)
    if block_mask is not None:
        _check_block_mask(block_mask, query, key)
    elif query.size(0) != key.size(0):
        raise ValueError(
            "Expect query and key/value to have the same batch size, or non-none block_mask, "
            f"but got block_mask=None, Bq={query.size(0)}, and Bkv={key.size(0)}."
        )
    if return_lse and return_aux is not None:
        raise ValueError(
            "Cannot specify both return_lse and return_aux. "
            "return_lse is deprecated, please use return_aux=AuxRequest(lse=True) instead."
        )
    if return_lse and not torch.compiler.is_compiling():  # a warning would break the graph
        warnings.warn(
            "return_lse is deprecated; please use return_aux=AuxRequest(lse=True) instead.",
            FutureWarning,
            stacklevel=3,
        )
    _check_options(kernel_options)
    # As torch: keys and values may have another type, and options that nobody knows do nothing.
    key, value = (x if x.dtype == query.dtype else x.to(query.dtype) for x in (key, value))
    known = {name: x for name, x in (kernel_options or {}).items() if is_kernel_option(name)}
    mask: BlockMask | Mask | None = block_mask
    if block_mask is not None and _stands_for_everything(block_mask):
        mask = _of_any_length(block_mask)
    found = _attention(
        query,
        key,
        value,
        score_mod,
        mask,
        scale,
        enable_gqa,
        return_lse,
        known or None,
        return_aux=return_aux,
    )
    if isinstance(found, Tensor):
        return _laid_out_as(query, found)
    out, rest = found
    return _laid_out_as(query, out), rest  # type: ignore[return-value]


def _of_any_length(block_mask: BlockMask) -> BlockMask | Mask | None:
    """The mask of a BlockMask that is one block of any length."""
    if block_mask.mask_mod is noop_mask:
        return None
    if torch.compiler.is_compiling():
        return in_graph(block_mask)
    return Mask(block_mask.mask_mod)


def _laid_out_as(query: Tensor, out: Tensor) -> Tensor:
    """The output with dimensions in the query's order in memory, but for the last, as torch's.

    >>> _laid_out_as(torch.ones(1, 4, 3, 2).transpose(1, 2), torch.ones(1, 3, 4, 2)).stride()
    (24, 2, 6, 1)
    """
    strides = query.stride()
    if strides[0] >= strides[1] >= strides[2]:
        return out
    order = [0]
    for dim in (1, 2):
        place = 0
        while place < len(order) and strides[order[place]] >= strides[dim]:
            place += 1
        order.insert(place, dim)
    order.append(3)
    # Not `contiguous`, which leaves the strides of dimensions of size 1 as they are.
    laid_out = out.permute(order).clone(memory_format=torch.contiguous_format)
    return laid_out.permute([order.index(dim) for dim in range(4)])


def _check_types(
    query: object, key: object, value: object, block_mask: object, kernel_options: object
) -> None:
    """Raises where torch would fail on the first attribute that it looks for."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        require(name, x, Tensor, "pass a torch.Tensor")
        # Keys and values of 8 bits are computed with in the query's type.
        if isinstance(x, Tensor) and not (
            x.dtype in FLOATS or (name != "query" and x.dtype.is_floating_point)
        ):
            raise FlexCPError(
                f"{name} of a floating-point dtype", f"{x.dtype}", "convert it: .to(torch.float32)"
            )
    if block_mask is not None:
        fix = "make one with create_block_mask; a mask_mod by itself is none"
        require("block_mask", block_mask, BlockMask, fix)
    if kernel_options is not None:
        require("kernel_options", kernel_options, Mapping, "pass a dict of options")


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    if query.is_nested or key.is_nested or value.is_nested:
        raise NotImplementedError(
            "flex_attention does not support NestedTensor inputs. "
            "Convert inputs to dense tensors before calling flex_attention."
        )
    if query.device != key.device or query.device != value.device:
        raise ValueError(
            "Expected query, key, and value to have the same device type, but got query.device: "
            f"{query.device}, key.device: {key.device}, and value.device: {value.device} instead."
        )
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        raise ValueError(
            "Expected query, key, and value to all be at least 2 dimensional, but got "
            f"query.dim: {query.dim()}, key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )
    if query.size(-1) != key.size(-1):
        raise ValueError(
            "Expect query and key/value to have the same embedding dimension "
            f"but got E={query.size(-1)} and E={key.size(-1)}."
        )
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise NotImplementedError("NYI: query, key, and value must be 4D tensors")
    q_heads, kv_heads = query.size(1), key.size(1)
    if not enable_gqa and q_heads != kv_heads:
        raise ValueError(
            "Expect query and key/value to have the same number of heads "
            f"but got Hq={q_heads} and Hkv={kv_heads}. Try setting enable_gqa=True for GQA."
        )
    if enable_gqa and q_heads % kv_heads:
        raise ValueError(
            "Expect number of query heads to be a multiple of kv heads for GQA "
            f"but got Hq={q_heads} and Hkv={kv_heads}."
        )


def _check_block_mask(block_mask: BlockMask, query: Tensor, key: Tensor) -> None:
    if query.size(0) != key.size(0) and block_mask.kv_num_blocks.size(0) != query.size(0):
        raise ValueError(
            "Expect query and key/value to have the same batch size, "
            "or block_mask and query to have the same batch size, "
            f"but got Bq={query.size(0)}, Bkv={key.size(0)}, "
            f"B_block_mask={block_mask.kv_num_blocks.size(0)}."
        )
    if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise RuntimeError("Cannot use mask_mod from a sliced BlockMask")
    if not _stands_for_everything(block_mask):
        _check_lengths(block_mask, query, key)
    if query.device != block_mask.kv_num_blocks.device:
        raise RuntimeError(
            "Expect q/k/v and block_mask to be on the same device "
            f"but got {query.device} and {block_mask.kv_num_blocks.device}."
        )


def _stands_for_everything(block_mask: BlockMask) -> bool:
    """Whether it is one block of any length, as torch makes for "no mask"."""
    return tuple(block_mask.BLOCK_SIZE) == (_ANY_LENGTH, _ANY_LENGTH)


def _check_lengths(block_mask: BlockMask, query: Tensor, key: Tensor) -> None:
    q_len, kv_len = (int(n) for n in block_mask.shape[-2:])
    if (query.size(-2), key.size(-2)) == (q_len, kv_len):
        return
    sizes = (
        f"block_mask.shape={block_mask.shape} but got q_len={query.size(-2)} and "
        f"kv_len={key.size(-2)}"
    )
    if query.size(-2) > q_len or key.size(-2) > kv_len:
        fix = (
            "was created for a smaller length than you're using it for, you likely need to create "
            "a new block mask."
        )
    else:
        fix = (
            "was created for a larger length than you're using it for, you can either 1. create a "
            "new block mask with the correct length, or 2. 'adjust' the existing block mask to the "
            "correct length by calling block_mask._adjust(q_len, kv_len). This essentially 'crops' "
            "the block mask to the upper left corner, which does not work for all mask_mods!"
        )
    if torch.__version__ >= "2.14":  # whose words begin with what is wrong
        raise BlockMaskLengthError(f"block_mask {fix} It has {sizes}.")
    raise BlockMaskLengthError(f"block_mask was created for {sizes}. As the block mask {fix}")


def _check_options(options: Any) -> None:
    if options is None or "BACKEND" not in options:
        return
    if options.get("FORCE_USE_FLEX_ATTENTION", False):
        raise RuntimeError(
            "BACKEND cannot be combined with legacy FORCE_USE_FLEX_ATTENTION. BACKEND supersedes "
            "the legacy knob; please drop FORCE_USE_FLEX_ATTENTION and only specify the desired "
            "BACKEND."
        )
    if options["BACKEND"] not in _BACKENDS:
        raise ValueError(
            f"Invalid BACKEND value '{options['BACKEND']}'. Must be one of {_BACKENDS}"
        )
