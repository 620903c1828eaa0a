"""Integer tensors in few bytes: what tables of runs and document ids travel between processes as.

A DataLoader's worker hands tensors over in shared memory, with a file descriptor for each; a plan
has dozens, most of them short, and one, the document ids, as long as the sequence. Packed, they are
plain bytes within the pickle: the differences of neighbours, in as narrow a type as they need,
compressed.
"""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

_NARROW = (torch.int8, torch.int16, torch.int32, torch.int64)
_PACKED_TYPES = (*_NARROW, torch.uint8, torch.bool)


def tensor_bytes(x: Tensor) -> bytes:
    """The memory of a tensor's elements, in order.

    >>> tensor_bytes(torch.tensor([1, 2], dtype=torch.uint8))
    b'\\x01\\x02'
    """
    x = x.detach().cpu().contiguous()
    return ctypes.string_at(x.data_ptr(), x.numel() * x.element_size()) if x.numel() else b""


@dataclass(frozen=True)
class PackedTensor:
    """A tensor of integers on the CPU, as bytes.

    >>> ids = torch.arange(1000).repeat_interleave(1000)
    >>> packed = PackedTensor.of(ids)
    >>> len(packed.content) < 10_000, torch.equal(packed.tensor(), ids)
    (True, True)
    """

    dtype: torch.dtype
    """Of the tensor."""
    shape: tuple[int, ...]
    """Of the tensor."""
    width: torch.dtype
    """Of the differences of neighbours."""
    content: bytes
    """The differences, compressed."""

    @classmethod
    def of(cls, x: Tensor) -> PackedTensor:
        """From an integer or bool tensor on the CPU."""
        flat = x.detach().reshape(-1).to(torch.int64)
        steps = torch.diff(flat, prepend=flat.new_zeros(1))  # wraps, and wraps back
        least, most = (int(v) for v in steps.aminmax()) if x.numel() else (0, 0)
        width = next(
            w for w in _NARROW if torch.iinfo(w).min <= least <= most <= torch.iinfo(w).max
        )
        content = zlib.compress(tensor_bytes(steps.to(width)), level=1)
        return cls(x.dtype, tuple(x.shape), width, content)

    def tensor(self) -> Tensor:
        """The tensor again."""
        raw = bytearray(zlib.decompress(self.content))
        if not raw:
            return torch.empty(self.shape, dtype=self.dtype)
        steps = torch.frombuffer(raw, dtype=self.width)
        return steps.to(torch.int64).cumsum(0).to(self.dtype).view(self.shape)


def reduce_packed(value: Any) -> tuple[Any, ...]:
    """What `__reduce__` of a dataclass returns for its integer tensors to travel in few bytes."""
    return _unpacked, (
        type(value),
        [_packed(getattr(value, f.name)) for f in fields(value) if f.init],
    )


def _packed(value: Any) -> Any:
    packs = (
        isinstance(value, Tensor) and value.device.type == "cpu" and value.dtype in _PACKED_TYPES
    )
    return PackedTensor.of(value) if packs else value


def _unpacked(kind: type, values: list[Any]) -> Any:
    return kind(*(v.tensor() if isinstance(v, PackedTensor) else v for v in values))
