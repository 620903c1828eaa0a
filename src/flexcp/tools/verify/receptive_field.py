"""Receptive fields: who may see whom through several layers, by the mask alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flexcp.errors import FlexCPError
from flexcp.grid import BlockKind, build_block_grid
from flexcp.masks import Mask, MaskMod

_MOST_TOKENS = 4096
"""Beyond this, a dense mask of all pairs is no longer small."""


@dataclass(frozen=True, eq=False)
class ReceptiveField:
    """Pairs that may attend directly, and what follows through several layers.

    >>> from flexcp import masks
    >>> field = ReceptiveField.of(masks.sliding_window(1), 5, layers=2)
    >>> field.from_place(1).int()
    tensor([0, 1, 1, 1, 0], dtype=torch.int32)
    >>> field.component(0).int()
    tensor([1, 1, 1, 1, 1], dtype=torch.int32)
    """

    allowed: Tensor
    """bool [B, S, S] Whether a query may see a key in some head and some layer."""
    layers: int
    """How often attention is applied."""

    @classmethod
    def of(
        cls,
        mask: Mask | MaskMod | Mapping[str, Mask | MaskMod],
        seq_len: int,
        *,
        batch: int = 1,
        heads: int = 1,
        layers: int = 1,
    ) -> ReceptiveField:
        """From a mask, or from those of all layers by name; any of them may let a token through."""
        if seq_len > _MOST_TOKENS:
            raise FlexCPError(
                f"at most {_MOST_TOKENS} tokens to verify with",
                f"{seq_len}",
                "verify a short sequence with the same structure: mistakes don't depend on length",
            )
        masks = mask.values() if isinstance(mask, Mapping) else [mask]
        allowed = torch.zeros(batch, seq_len, seq_len, dtype=torch.bool)
        for one in masks:
            grid = build_block_grid(one, seq_len, block_size=1, batch=batch, heads=heads)
            allowed |= (grid.to_dense() != BlockKind.EMPTY).any(1)
        return cls(allowed, layers)

    @cached_property
    def documents(self) -> Tensor:
        """int64 [B * S] Equal for tokens that are connected in any way: the documents."""
        batch, seq_len, _ = self.allowed.shape
        both = self.allowed | self.allowed.transpose(1, 2) | torch.eye(seq_len, dtype=torch.bool)
        label = torch.arange(seq_len).expand(batch, seq_len)
        while True:
            # each takes the lowest label among its neighbours, then that one's own label
            lowest = torch.where(both, label[:, None, :], seq_len).amin(2)
            lowest = lowest.gather(1, lowest)
            if torch.equal(lowest, label):
                return (label + torch.arange(batch)[:, None] * seq_len).flatten()
            label = lowest

    def component(self, place: int) -> Tensor:
        """Bool [B * S] The tokens of the same document."""
        return self.documents == self.documents[place]

    def directly_from(self, place: int) -> Tensor:
        """Bool [B * S]: who may see the token at a place in some layer."""
        batch, seq_len, _ = self.allowed.shape
        b, s = divmod(place, seq_len)
        found = torch.zeros(batch, seq_len, dtype=torch.bool)
        found[b] = self.allowed[b, :, s]
        return found.flatten()

    def from_place(self, place: int) -> Tensor:
        """Bool [B * S] What may change when the token at a place does: b * S + s."""
        batch, seq_len, _ = self.allowed.shape
        b, s = divmod(place, seq_len)
        found = torch.zeros(batch, seq_len, dtype=torch.bool)
        found[b, s] = True
        for _ in range(self.layers):
            more = found[b] | (self.allowed[b] & found[b]).any(1)
            if torch.equal(more, found[b]):
                break
            found[b] = more
        return found.flatten()
