"""Launching: from tensors and tile lists to a kernel's arguments and its grid."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import copysign
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.kernels.tiles import TileLists
from flexcp.kernels.triton.available import interprets
from flexcp.kernels.triton.tuning import TileConfig

if TYPE_CHECKING:
    from flexcp.kernels.compiled_shapes import CompiledShapes
    from flexcp.kernels.dropout import Dropout

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
        given = (*self.arguments.values(), *self.arguments.get("given", ()))
        tensors = [x for x in given if isinstance(x, Tensor)]
        if self.programs == 0 or any(map(has_no_numbers, tensors)):
            return
        if self.programs > _MOST_PROGRAMS:
            raise FlexCPError(
                f"at most {_MOST_PROGRAMS} programs of the kernel {self.kernel!r}",
                f"{self.programs}",
                "call with fewer batch elements or heads at a time",
            )
        with _on_device(tensors[0].device):
            function[(self.programs,)](**self.arguments, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """How the kernel is compiled; fusion is said since Triton's default for it changes."""
        return {
            "num_warps": self.config.warps,
            "num_stages": self.config.stages,
            "enable_fp_fusion": True,
        }


def has_no_numbers(x: Tensor) -> bool:
    """Whether a tensor is but a shape, as in a FakeTensorMode."""
    return x.is_meta or type(x).__name__ == "FakeTensor"


def _on_device(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def readable(x: Tensor, rows: int) -> Tensor:
    """The tensor as kernels can read it: elements of a row side by side, a tile within 31 bits."""
    if x.stride(-1) in (0, 1) and x.shape[-1] == 1:
        return x
    fits = x.stride(-1) == 1 and x.stride(-2) * rows < 2**31
    return x if fits else x.contiguous()


def assert_in_rows(*tensors: Tensor) -> None:
    """Kernels write to rows whose elements are side by side; nobody else makes others."""
    for x in tensors:
        assert x.stride(-1) == 1 or x.shape[-1] <= 1, f"strides {x.stride()} of {tuple(x.shape)}"


def unit_of(*tensors: Tensor) -> int:
    """Elements in which strides are given: 16 bytes if all tensors are aligned to that, else 1."""
    unit = _ALIGNMENT // tensors[0].element_size()
    for x in tensors:
        if not has_no_numbers(x) and x.data_ptr() % _ALIGNMENT:
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


def scale_arguments(scale: float, *, scored: bool) -> dict[str, float]:
    """The scale: its sign, folded into q or k, and what is left, for exponentials of base 2.

    A score function scales by itself.
    """
    if scored:
        return {"sign": 1.0, "score_scale": _LOG2_E}
    if scale == 0.0:  # then q is 0, and masked scores stay -inf
        return {"sign": 0.0, "score_scale": _LOG2_E}
    return {"sign": copysign(1.0, scale), "score_scale": abs(scale) * _LOG2_E}


def dropout_arguments(
    dropout: Dropout | None, compiled: CompiledShapes, lists: TileLists, device: torch.device
) -> dict[str, Any]:
    """Which weights are dropped: by the seed, and the global positions of queries and keys."""
    if dropout is None:  # any pointer will do: it is not read
        return {
            "q_at": lists.plane_of, "kv_at": lists.plane_of, "q_at_batch": 0, "kv_at_batch": 0,
            "seed": 0, "first_batch": 0, "first_head": 0, "threshold": 0, "factor": 1.0,
            "DROPOUT": False,
        }  # fmt: skip
    seed = dropout.seed
    found: dict[str, Any] = {
        "seed": 0 if isinstance(seed, Tensor) and has_no_numbers(seed) else int(seed),
        "first_batch": dropout.first_batch,
        "first_head": dropout.first_head, "threshold": dropout.threshold,
        "factor": dropout.factor, "DROPOUT": True,
    }  # fmt: skip
    given = dropout.positions or tuple(compiled.positions(name, device) for name in ("q", "kv"))
    for name, x in zip(("q_at", "kv_at"), given, strict=True):
        positions = x.to(device).contiguous()
        found[name] = positions
        found[f"{name}_batch"] = positions.stride(0) if positions.dim() > 1 else 0
    return found


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


def described(
    arguments: Mapping[str, Any], names: Sequence[str], rows: int, unit: int, config: TileConfig
) -> dict[str, Any]:
    """Descriptors in place of the tensors whose tiles are listed, where they are asked for.

    Tensors that are not aligned to 16 bytes, empty, or expanded have none, and are read by address.
    """
    tensors = [arguments[name] for name in names]
    if not config.tma or unit == 1 or any(map(_has_no_descriptor, tensors)):
        return {"TMA": False}
    descriptor = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    found: dict[str, Any] = {"TMA": True}
    for name, x in zip(names, tensors, strict=True):
        block = [1, 1, rows, padded(x.shape[3])]
        found[name] = descriptor(x, list(x.shape), _descriptor_strides(x, unit), block)
    return found


def _has_no_descriptor(x: Tensor) -> bool:
    expanded = any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True))
    return has_no_numbers(x) or x.numel() == 0 or expanded


def _descriptor_strides(x: Tensor, unit: int) -> list[int]:
    """Strides; those of dimensions of 1 mean nothing, and are made to look aligned."""
    return [unit if n == 1 else s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)] + [1]


def widens(dtype: torch.dtype) -> bool:
    """Whether operands of products are widened, as Triton's interpreter needs it."""
    return dtype != torch.float32 and interprets()
