"""Planes: the batch elements and heads between which a mask can differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexcp.masks.graph import MaskGraph
from flexcp.packing import reduce_packed


@dataclass(frozen=True, eq=False)
class Planes:
    """The (b, h) pairs for which a mask may differ; all others repeat one of these."""

    b: Tensor
    """int64 [P] Batch element of each plane."""
    h: Tensor
    """int64 [P] Head of each plane."""
    of: Tensor
    """int64 [batch, heads] The plane of each batch element and head."""

    @classmethod
    def of_mask(cls, graph: MaskGraph, batch: int, heads: int) -> Planes:
        """As few planes as the mask's dependence on b and h allows."""
        some_b = batch if "b" in graph.reads else 1
        some_h = heads if "h" in graph.reads else 1
        own = cls.each(some_b, some_h)
        return cls(own.b, own.h, own.of.expand(batch, heads))

    @classmethod
    def each(cls, batch: int, heads: int) -> Planes:
        """One for every batch element and head."""
        every = torch.arange(batch * heads)
        return cls(every // heads, every % heads, every.view(batch, heads))

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_packed(self)

    def __len__(self) -> int:
        return self.b.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return self.b.nbytes + self.h.nbytes + self.of.nbytes
