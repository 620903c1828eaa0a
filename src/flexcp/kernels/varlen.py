"""The variable-length kernel: PyTorch's FlashAttention op, where a few calls of it do.

Plain causal masks, documents and windows are what FlashAttention 2, 3 and 4 are written for; torch
dispatches to whichever is registered. All other masks go to another kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.interface import Kernel, Partial, PartialGradients
from flexcp.kernels.merge import accumulation_dtype, merge_into
from flexcp.kernels.score import ScoreMod
from flexcp.kernels.varlen_calls import EVERYTHING, VarlenCall
from flexcp.torch_names import current_flash_attention_impl

VarlenForward = Callable[[Tensor, Tensor, Tensor, VarlenCall, float], tuple[Tensor, Tensor]]
VarlenBackward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, VarlenCall, float],
    tuple[Tensor, Tensor, Tensor],
]


@dataclass(frozen=True)
class VarlenOps:
    """A variable-length attention op and its gradient, on packed tensors [tokens, heads, dim]."""

    name: str
    device: str
    dtypes: frozenset[torch.dtype]
    forward: VarlenForward
    """(q, k, v, call, scale) -> out in the type of q, lse [H, rows] in float32."""
    backward: VarlenBackward
    """(grad_out, q, k, v, out, lse, call, scale) -> dq, dk, dv, for the *global* out and lse."""

    def refuses(self, q: Tensor, v: Tensor) -> str | None:
        """Why these tensors can't be given to the op; None if they can."""
        if q.device.type != self.device:
            return f"{self.name} runs on {self.device}, not on {q.device.type}"
        if q.dtype not in self.dtypes:
            return f"{self.name} does not take {q.dtype}"
        if q.shape[-1] != v.shape[-1]:
            return f"{self.name} needs values of the head dim {q.shape[-1]}, not {v.shape[-1]}"
        if q.shape[-1] > 256 or q.shape[-1] % 8:
            return f"{self.name} takes head dims that are multiples of 8, up to 256"
        if self.device == "cuda":
            return _cuda_refuses(self.name, q)
        return None


@dataclass(frozen=True)
class VarlenKernel:
    """The op behind the kernel contract, and the kernel for what it can't express."""

    ops: VarlenOps
    otherwise: Kernel | None
    """None makes such a call an error."""

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
        calls = self._calls(q, compiled)
        needs_other = score_mod is not None or max_scores or dropout is not None or scale <= 0
        if calls is None or needs_other:
            return self._other().forward(
                q, k, v, compiled, scale=scale, score_mod=score_mod, max_scores=max_scores,
                former=former, dropout=dropout,
            )  # fmt: skip
        dtype = accumulation_dtype(q.dtype)
        packed = [_packed(x) for x in (q, k, v)]
        if len(calls) == 1 and calls[0].is_whole(packed[0].shape[0], packed[1].shape[0]):
            part, part_lse = self.ops.forward(packed[0], packed[1], packed[2], calls[0], scale)
            return _merged(former, _result(part, part_lse, q.shape[0], dtype))
        out = q.new_zeros((q.shape[0] * q.shape[2], q.shape[1], v.shape[3]), dtype=dtype)
        lse = q.new_full((q.shape[1], out.shape[0]), -torch.inf, dtype=dtype)
        written = 0
        for call in calls:
            rows, keys = call.rows, call.keys
            part, part_lse = self.ops.forward(
                _part(packed[0], rows), _part(packed[1], keys), _part(packed[2], keys), call, scale
            )
            if call.idle_rows is not None:
                part.index_fill_(0, call.idle_rows, 0)
                part_lse.index_fill_(1, call.idle_rows, -torch.inf)
            own, own_lse = _part(out, rows).transpose(0, 1), _part(lse, rows, dim=1)
            if rows.start >= written:
                own.copy_(part.transpose(0, 1))
                own_lse.copy_(part_lse)
            else:
                merge_into(own, own_lse, part.transpose(0, 1).to(dtype), part_lse.to(dtype))
            written = max(written, rows.stop)
        return _merged(former, _result(out, lse, q.shape[0], dtype))

    def delta(self, grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor | None:  # noqa: ARG002
        """Nothing: the op works it out itself."""
        return None

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
        calls = self._calls(q, compiled)
        needs_other = score_mod is not None or grad_lse is not None or dropout is not None
        if scale <= 0 or calls is None or needs_other:
            return self._other().backward(
                grad_out, q, k, v, out, lse, compiled, scale=scale, score_mod=score_mod,
                grad_lse=grad_lse, delta=delta, grad_q=grad_q, grad_kv=grad_kv, dropout=dropout,
            )  # fmt: skip
        dtype = accumulation_dtype(q.dtype)
        if any(call.idle_rows is not None for call in calls):
            # exp(score - inf) is 0: rows that see nothing anywhere get zero gradients.
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        tensors = [_packed(x) for x in (grad_out.to(q.dtype), q, k, v, out.to(q.dtype))]
        g, q_, k_, v_, out_ = tensors
        lse_ = lse.to(dtype).transpose(0, 1).reshape(q.shape[1], -1).contiguous()
        whole = len(calls) == 1 and calls[0].is_whole(q_.shape[0], k_.shape[0])
        if whole:
            dq, dk, dv = self.ops.backward(g, q_, k_, v_, out_, lse_, calls[0], scale)
        else:
            dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q_, k_, v_))
        for call in () if whole else calls:
            rows, keys = call.rows, call.keys
            parts = self.ops.backward(
                _part(g, rows), _part(q_, rows), _part(k_, keys), _part(v_, keys),
                _part(out_, rows), _part(lse_, rows, dim=1).contiguous(), call, scale,
            )  # fmt: skip
            for total, part, idle in zip(
                (_part(dq, rows), _part(dk, keys), _part(dv, keys)),
                parts,
                (call.idle_rows, call.idle_keys, call.idle_keys),
                strict=True,
            ):
                total.add_(part if idle is None else part.index_fill_(0, idle, 0))
        batch = q.shape[0]
        own_q, own_k, own_v = (_unpacked(x, batch) for x in (dq, dk, dv))
        if grad_kv is not None:
            own_k, own_v = grad_kv[0].copy_(own_k), grad_kv[1].copy_(own_v)
        own_q = own_q.to(dtype) if grad_q is None else grad_q.add_(own_q)
        return PartialGradients(own_q, own_k.to(dtype), own_v.to(dtype))

    def _calls(self, q: Tensor, compiled: CompiledShapes) -> tuple[VarlenCall, ...] | None:
        calls = compiled.varlen_calls(q.shape[0], q.device)
        # Sequences of one row are another kernel, which takes as many of them as there are rows.
        return None if calls is None or any(c.longest_q == 1 for c in calls) else calls

    def _other(self) -> Kernel:
        if self.otherwise is None:
            raise FlexCPError(
                "a mask of a few causal, document or window stretches, the same for all heads, "
                "with a positive scale, no score_mod, dropout, largest scores or a gradient of lse",
                "kernel 'varlen' for another",
                "leave the kernel out",
            )
        return self.otherwise


def _result(out: Tensor, lse: Tensor, batch: int, dtype: torch.dtype) -> Partial:
    """A packed result as the contract has it."""
    by_head = _unpacked(out, batch)
    found = torch.empty(by_head.shape, dtype=dtype, device=out.device).copy_(by_head)
    own: Tensor = lse.unflatten(1, (batch, -1))
    return Partial(found, own.transpose(0, 1).to(dtype).contiguous())


def _merged(former: Partial | None, found: Partial) -> Partial:
    if former is None:
        return found
    merge_into(former.out, former.lse, found.out, found.lse)
    return former


def _part(x: Tensor, part: slice, dim: int = 0) -> Tensor:
    return x.narrow(dim, part.start, part.stop - part.start)


_ALIGNMENT = 16
"""Bytes that FlashAttention's loads are aligned to."""


def _packed(x: Tensor) -> Tensor:
    """[B, H, L, D] as [B * L, H, D]; a view where the op can read it as it lies in memory.

    The op takes no other rows than those whose elements are next to each other, and reads 16 bytes
    at a time without asking whether they are aligned.
    """
    packed = x.transpose(1, 2).flatten(0, 1)
    steps = [
        s * x.element_size() for n, s in zip(packed.shape, packed.stride(), strict=True) if n > 1
    ]
    aligned = all(step % _ALIGNMENT == 0 for step in steps[:-1])
    if type(x) is Tensor and not x.is_meta:
        aligned &= packed.data_ptr() % _ALIGNMENT == 0
    return (
        packed
        if packed.stride(-1) == 1 and aligned
        else packed.clone(memory_format=torch.contiguous_format)
    )


def _unpacked(x: Tensor, batch: int) -> Tensor:
    """[B * L, H, D] as [B, H, L, D], a view."""
    by_element: Tensor = x.unflatten(0, (batch, -1))
    return by_element.transpose(1, 2)


_LARGEST_OF_FA4 = 128
"""Where keys and values have the same head dim."""


def _cuda_refuses(name: str, q: Tensor) -> str | None:
    """Why the GPU of a tensor can't run the op; None if it can, or if there is none to ask."""
    if torch.version.hip is not None:
        return f"{name} has not been tried on ROCm"
    if not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability(q.device)
    if capability < (8, 0):
        return f"{name} needs a GPU of compute capability 8.0 or higher"
    if current_flash_attention_impl() == "FA4" and q.shape[-1] > _LARGEST_OF_FA4:
        return f"{name}, which is FlashAttention 4 here, takes head dims up to {_LARGEST_OF_FA4}"
    if q.shape[-1] > 192 and capability not in ((8, 0), (9, 0), (10, 0)):
        return f"{name} has no backward pass for head dims above 192 on this GPU"
    return None


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, call.q_ends, call.k_ends, call.longest_q, call.longest_k, 0.0,
        _is_causal(call), False, scale=scale, window_size_left=call.left,
        window_size_right=call.right,
    )  # fmt: skip
    return out, lse


def _cuda_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: VarlenCall,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    no_seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # read by dropout alone
    unused = torch.empty(0, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad_out, q, k, v, out, lse, call.q_ends, call.k_ends, call.longest_q, call.longest_k,
        0.0, _is_causal(call), no_seed, unused, scale=scale, window_size_left=call.left,
        window_size_right=call.right,
    )  # fmt: skip
    return dq, dk, dv


def _is_causal(call: VarlenCall) -> bool:
    return (call.left, call.right) == (EVERYTHING, 0)


CUDA_VARLEN = VarlenOps(
    "FlashAttention's variable-length op",
    "cuda",
    frozenset({torch.float16, torch.bfloat16}),
    _cuda_forward,
    _cuda_backward,
)
