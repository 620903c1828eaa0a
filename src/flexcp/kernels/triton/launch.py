"""Launching: from tensors and tile lists to a kernel's arguments and its grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import copysign
from typing import Any

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.kernels.triton.available import interprets
from flexcp.kernels.triton.tiles import TileLists
from flexcp.kernels.triton.tuning import TileConfig

_LOG2_E = 1.4426950408889634
_ALIGNMENT = 16
"""Bytes that one load moves at most; addresses that are multiples of it are read fastest."""
_MOST_PROGRAMS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch of a kernel."""

    kernel: str
    """The function's name: "forward", "prep", "dq" or "dkdv"."""
    programs: int
    arguments: Mapping[str, Any]
    """What the function's parameters are given, constants included."""
    config: TileConfig

    def run(self, function: Any) -> None:
        """Runs the kernel, unless there is nothing to do or the tensors have no numbers."""
        tensors = [x for x in self.arguments.values() if isinstance(x, Tensor)]
        if self.programs == 0 or any(type(x) is not Tensor for x in tensors):
            return
        if self.programs > _MOST_PROGRAMS:
            raise FlexCPError(
                f"at most {_MOST_PROGRAMS} programs of the kernel {self.kernel!r}",
                f"{self.programs}",
                "call with fewer batch elements or heads at a time",
            )
        with _on_device(tensors[0].device):
            function[(self.programs,)](
                **self.arguments,
                num_warps=self.config.warps,
                num_stages=self.config.stages,
                enable_fp_fusion=True,
            )


def _on_device(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def readable(x: Tensor, rows: int) -> Tensor:
    """The tensor as kernels can read it: elements of a row side by side, a tile within 31 bits."""
    if x.stride(-1) in (0, 1) and x.shape[-1] == 1:
        return x
    fits = x.stride(-1) == 1 and x.stride(-2) * rows < 2**31
    return x if fits else x.contiguous()


def unit_of(*tensors: Tensor) -> int:
    """Elements in which strides are given: 16 bytes if all tensors are aligned to that, else 1."""
    unit = _ALIGNMENT // tensors[0].element_size()
    for x in tensors:
        if type(x) is Tensor and x.data_ptr() % _ALIGNMENT:
            return 1
        if any(step % unit for step in _steps(x)):
            return 1
    return unit


def strides(name: str, x: Tensor, unit: int) -> dict[str, int]:
    """The strides of batch, head and row, in units, under the kernel's names for them."""
    batch, head, row = (step // unit for step in _steps(x))
    return {f"{name}_batch": batch, f"{name}_head": head, f"{name}_row": row}


def row_strides(name: str, x: Tensor) -> dict[str, int]:
    """The strides of batch and head of one number per row."""
    batch, head = (0 if n == 1 else s for n, s in zip(x.shape[:2], x.stride()[:2], strict=True))
    return {f"{name}_batch": batch, f"{name}_head": head}


def _steps(x: Tensor) -> Sequence[int]:
    return [0 if n == 1 else s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]


def mask_arguments(lists: TileLists) -> dict[str, Any]:
    """The mask, as kernels get it."""
    plane_of = lists.plane_of
    return {
        "plane_of": plane_of,
        "order": lists.order,
        "full_start": lists.full_start,
        "full_tile": lists.full_tile,
        "partial_start": lists.partial_start,
        "partial_tile": lists.partial_tile,
        "partial_pattern": lists.partial_pattern,
        "patterns": lists.patterns,
        "plane_batch": plane_of.stride(0) if plane_of.shape[0] > 1 else 0,
        "plane_head": plane_of.stride(1) if plane_of.shape[1] > 1 else 0,
        "tiles": lists.lines,
    }


def score_arguments(scale: float) -> dict[str, float]:
    """The scale: its sign, folded into q or k, and what is left, for exponentials of base 2."""
    if scale == 0.0:  # then q is 0, and masked scores stay -inf
        return {"sign": 0.0, "score_scale": _LOG2_E}
    return {"sign": copysign(1.0, scale), "score_scale": abs(scale) * _LOG2_E}


def dim_constants(head_dim: int, value_dim: int) -> dict[str, int]:
    """Head dims, and the powers of two that they are padded to."""
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "D": padded(head_dim),
        "DV": padded(value_dim),
    }


def padded(dim: int) -> int:
    """The power of two, at least 16, that a head dim is padded to.

    >>> padded(80), padded(3)
    (128, 16)
    """
    return max(16, 1 << (dim - 1).bit_length())


def widens(dtype: torch.dtype) -> bool:
    """Whether operands of products are widened, as Triton's interpreter needs it."""
    return dtype != torch.float32 and interprets()
