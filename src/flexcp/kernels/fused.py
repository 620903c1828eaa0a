"""PyTorch's fused attention ops, on full rectangles, behind one signature.

Each entry takes q [B, H, L, D], k and v [B, G, L, D] and returns the partial result, or the
gradients for a given *global* out and lse. What differs between the ops (the layout of lse, its
padding, whether key heads may be shared) stays in here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

aten = torch.ops.aten

Forward = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
MaskedForward = Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]
]


@dataclass(frozen=True)
class FusedOp:
    """One fused attention op and what it can do."""

    name: str
    device: str
    dtypes: frozenset[torch.dtype]
    largest_head_dim: int | None
    forward: Forward
    """(q, k, v, scale) -> out in the type of q, lse [B, H, L] in float32 (float64 for float64)."""
    backward: Backward
    """(grad_out, q, k, v, out, lse, scale) -> dq, dk, dv in the type of q."""
    causal_forward: Forward | None = None
    """`forward` on a square whose i-th row sees the first i + 1 keys."""
    causal_backward: Backward | None = None
    """`backward` on such a square."""
    masked_forward: MaskedForward | None = None
    """(q, k, v, bias, scale): `forward` with a bias [Lq, Lkv] on the scores, of the type of q; for
    bands, as batches of a few rows, where that is faster than strips."""
    multiplies: Callable[[torch.dtype], bool] = lambda _: True
    """Whether the processor has matrix products of a type that are as fast as those of float32;
    tensors of other types are computed with in float32."""
    causal_rows: Callable[[torch.dtype], int | None] = lambda _: None
    """Rows from which a triangle of a type is faster by the op's causal mode than by rectangles and
    strips; None if it is not. Where there is nothing else to compute, that mode is used anyway. It
    follows from the type and the kind of processor, not from a measurement, so that the same run
    gives the same bits."""

    def mode(self, causal: bool) -> Forward:
        """`forward`, or the op's own causal mode."""
        if not causal:
            return self.forward
        assert self.causal_forward is not None
        return self.causal_forward

    def backward_mode(self, causal: bool) -> Backward:
        """`backward`, or that of the op's own causal mode."""
        if not causal:
            return self.backward
        assert self.causal_backward is not None
        return self.causal_backward

    def refuses(self, q: Tensor, v: Tensor) -> str | None:
        """Why these tensors can't be given to the op; None if they can."""
        if q.device.type != self.device:
            return f"{self.name} runs on {self.device}, not on {q.device.type}"
        if q.dtype not in self.dtypes:
            return f"{self.name} does not take {q.dtype}"
        if q.shape[-1] != v.shape[-1]:
            return f"{self.name} needs values of the head dim {q.shape[-1]}, not {v.shape[-1]}"
        if self.largest_head_dim is not None and q.shape[-1] > self.largest_head_dim:
            return f"{self.name} takes head dims up to {self.largest_head_dim}"
        return None


def as_rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors as the CPU op reads them: a row's elements one after the other, whatever it says."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *as_rows(q, k, v), 0.0, False, scale=scale
    )
    return out, lse


def _cpu_causal_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *as_rows(q, k, v), 0.0, True, scale=scale
    )
    return out, lse


def _cpu_masked_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *as_rows(q, k, v), 0.0, False, attn_mask=bias, scale=scale
    )
    return out, lse


def _cpu_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *as_rows(grad_out, q, k, v, out), lse, 0.0, False, scale=scale
    )
    return dq, dk, dv


def _cpu_causal_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *as_rows(grad_out, q, k, v, out), lse, 0.0, True, scale=scale
    )
    return dq, dk, dv


_PRODUCTS_OF_X86 = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}
"""What a processor needs one of to multiply matrices of a type, by torch's names."""


@lru_cache(maxsize=8)
def _cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of this type here, and the processor itself does.

    Without AVX-512, PyTorch's own loops do: the op's gradients take eight times as long as those
    of float32 then, and its results up to half as long again. With AVX-512 but no products of the
    type, oneDNN says yes and converts: gradients take 2.2 times as long as those of float32.
    """
    if dtype not in _HALF:
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    has: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    if has.get("architecture") == "x86_64" and not any(map(has.get, _PRODUCTS_OF_X86[dtype])):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


@lru_cache(maxsize=8)
def _cpu_causal_rows(dtype: torch.dtype) -> int | None:
    """For half types, which strips have to convert, and where vectors are of 512 bits.

    With vectors of 256 bits, rectangles and strips take as long forward and 0.93 of its time
    backward (documents at 8K): it computes 128 keys too many for every row. That is also why short
    triangles are left to strips.
    """
    return 1024 if dtype in _HALF or "AVX512" in torch.backends.cpu.get_cpu_capability() else None


def _cuda_flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, scale=scale)
    return out, lse


def _cuda_flash_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    no_lengths = q.new_empty(0, dtype=torch.int32)
    no_seed = q.new_empty(0, dtype=torch.int64)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse.contiguous(), no_lengths, no_lengths, q.shape[2], k.shape[2],
        0.0, False, no_seed, no_seed, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _cuda_efficient_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    k, v = _repeated(q, k), _repeated(q, v)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, False, scale=scale
    )
    return out, lse.narrow(2, 0, q.shape[2])


def _cuda_efficient_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    heads = k.shape[1]
    # The op reads lse in rows of 32.
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    no_seed = q.new_empty((), dtype=torch.int64)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_out, q, _repeated(q, k), _repeated(q, v), None, out, padded, no_seed, no_seed, 0.0,
        [True, True, True, False], False, scale=scale,
    )  # fmt: skip
    return dq, _summed(dk, heads), _summed(dv, heads)


def _cuda_cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, _repeated(q, k), _repeated(q, v), None, True, 0.0, False, False, scale=scale
    )
    return out, lse.view(q.shape[:3])


def _cuda_cudnn_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    heads = k.shape[1]
    no_lengths = q.new_empty(0, dtype=torch.int32)
    no_seed = q.new_empty((), dtype=torch.int64)
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        grad_out, q, _repeated(q, k), _repeated(q, v), out, lse.unsqueeze(-1).contiguous(),
        no_seed, no_seed, None, no_lengths, no_lengths, q.shape[2], k.shape[2], 0.0, False,
        scale=scale,
    )  # fmt: skip
    return dq, _summed(dk, heads), _summed(dv, heads)


def _repeated(q: Tensor, x: Tensor) -> Tensor:
    """Key heads repeated for ops that can't share them."""
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _summed(grad: Tensor, heads: int) -> Tensor:
    """The gradients of repeated key heads, added up."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


_HALF = frozenset({torch.float16, torch.bfloat16})
_SINGLE = _HALF | {torch.float32}

CPU_FLASH = FusedOp(
    "CPU flash",
    "cpu",
    _SINGLE | {torch.float64},
    None,
    _cpu_forward,
    _cpu_backward,
    _cpu_causal_forward,
    _cpu_causal_backward,
    _cpu_masked_forward,
    _cpu_multiplies,
    _cpu_causal_rows,
)
CUDA_FLASH = FusedOp("CUDA flash", "cuda", _HALF, 256, _cuda_flash_forward, _cuda_flash_backward)
CUDA_EFFICIENT = FusedOp(
    "CUDA efficient", "cuda", _SINGLE, None, _cuda_efficient_forward, _cuda_efficient_backward
)
CUDA_CUDNN = FusedOp("CUDA cuDNN", "cuda", _HALF, 128, _cuda_cudnn_forward, _cuda_cudnn_backward)
FUSED_OPS = (CPU_FLASH, CUDA_FLASH, CUDA_CUDNN, CUDA_EFFICIENT)
"""In order of preference."""
