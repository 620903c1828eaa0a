"""Dropout of attention weights: which are dropped is a function of where they are, and a seed.

Each weight has a 32-bit number, made of nothing but the seed and the global batch element, query
head, query and key; it is dropped if that is below the threshold. So the same weights are dropped
for any layout, schedule, kernel and number of ranks, and the backward pass computes the numbers
again. Rows and keys are hashed well, once each, to odd numbers; a pair of them takes three
products. The second is a quadratic permutation, as in the cipher RC6, by which patterns of rows
don't add up to that of another; the third keeps a row from repeating the pattern of another:

    x = row * key;  x *= 2 * x + 1;  x *= second;  kept if x >= threshold

All are 32-bit two's complement integers, whose products wrap around: PyTorch's int32 and Triton's.
Strips compute just that, in place, in three passes over memory (`numbers_of`); `kept` spells it out
in 64 bits, for the oracle and for compilers, to which an overflow would be undefined.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_clear = torch.ops.aten.threshold_backward.grad_input
_LOW = 0xFFFFFFFF
_ROW, _SECOND, _KEY = 0x1E3779B9, 0x7F4A7C15, 0x42B2AE35
"""What tells the three hashes of a seed apart."""
_FIRST_FACTOR, _SECOND_FACTOR = 0x7FEB352D, 0x846CA68B - (1 << 32)
"""Of a mixing function with little bias (`lowbias32`); below 2**31, so that nothing overflows."""


@dataclass(frozen=True, eq=False)
class Dropout:
    """The dropout of one call, for batch elements and heads that are counted from given ones."""

    p: float
    """The share that is dropped, in [0, 1)."""
    seed: int | Tensor
    """64 bits; an int64 tensor of one element where a compiler is to see no number."""
    first_batch: int = 0
    """The global number of the tensors' first batch element."""
    first_head: int = 0
    """The global number of the tensors' first query head."""
    positions: tuple[Tensor, Tensor] | None = None
    """int64 [L] or [B, L] Global positions of queries and keys; None for those of the shapes."""

    @property
    def factor(self) -> float:
        """What kept weights are multiplied with."""
        return 1.0 / (1.0 - self.p)

    @property
    def threshold(self) -> int:
        """The least number that is kept, as a signed 32-bit integer.

        >>> Dropout(0.5, 0).threshold
        0
        """
        return min(round(self.p * 2.0**32), _LOW) - (1 << 31)

    def of_element(self, b: int | None) -> Dropout:
        """That of tensors which hold one batch element; None for all."""
        return self if b is None else replace(self, first_batch=self.first_batch + b)

    def rows(self, b: Tensor, h: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """Both hashes of rows in int32: of b, h and q, broadcast; b and h count from 0."""
        b, h = b + self.first_batch, h + self.first_head
        found = (
            _signed(_mixed(_mixed(_mixed(self._start(which, q.device) ^ b) ^ h) ^ q) | 1)
            for which in (_ROW, _SECOND)
        )
        row, second = (x.to(torch.int32) for x in found)
        return row, second

    def keys(self, kv: Tensor) -> Tensor:
        """The hashes of keys in int32, in the shape of `kv`."""
        return _signed(_mixed(self._start(_KEY, kv.device) ^ kv) | 1).to(torch.int32)

    def _start(self, which: int, device: torch.device) -> Tensor:
        """int64 [1] The state of a hash after the seed."""
        seed = self.seed
        if not isinstance(seed, Tensor):
            seed = torch.full((1,), seed, dtype=torch.int64, device=device)
        return _mixed(_mixed((seed.to(device) & _LOW) ^ which) ^ (seed.to(device) >> 32 & _LOW))

    def kept(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Whether weights are kept, for indices that broadcast against each other.

        >>> i = torch.arange(512)
        >>> zero = torch.zeros(1, dtype=torch.int64)
        >>> round(Dropout(0.25, 7).kept(zero, zero, i[:, None], i).double().mean().item(), 2)
        0.75
        """
        row, second = (x.to(torch.int64) for x in self.rows(b, h, q))
        x = _signed(row * self.keys(kv).to(torch.int64))
        x = _signed(x + 2 * _signed(x * x))
        x = _signed(x * second)
        return x >= self.threshold

    def kept_of(self, batch: int, heads: int, q_at: Tensor, kv_at: Tensor) -> Tensor:
        """Whether each weight of whole tensors is kept, [batch, heads, Lq, Lkv].

        `q_at` and `kv_at` are global positions, [L] or [B, L].
        """
        q_at, kv_at = (x.view(-1, 1, x.shape[-1]) for x in self.positions or (q_at, kv_at))
        b = torch.arange(batch, device=q_at.device).view(-1, 1, 1, 1)
        h = torch.arange(heads, device=q_at.device).view(1, -1, 1, 1)
        return self.kept(b, h, q_at[..., None], kv_at[..., None, :])


def numbers_of(row: Tensor, second: Tensor, key: Tensor, out: Tensor) -> Tensor:
    """The weights' numbers, in `out`; all are int32, and the hashes broadcast to it."""
    torch.mul(row, key, out=out)
    return out.addcmul_(out, out, value=2).mul_(second)


def droppable(weights: Tensor) -> Tensor:
    """Weights as `drop_` takes them: those of float32 as integers of the same bits."""
    return weights.view(torch.int32) if weights.dtype == torch.float32 else weights


def drop_(weights: Tensor, numbers: Tensor, threshold: int) -> Tensor:
    """Sets weights, as `droppable` gives them, to 0 where their number is below the threshold."""
    if weights.dtype != torch.int32:
        return weights.mul_(numbers >= threshold)
    if threshold > torch.iinfo(torch.int32).min:
        # ReLU's gradient, of integers: the one pass that compares a tensor and clears another.
        _clear(weights, numbers, threshold - 1, grad_input=weights)
    return weights


def _mixed(x: Tensor) -> Tensor:
    """A 32-bit number that depends on all bits of another, one to one; both in [0, 2**32)."""
    x = x ^ (x >> 16)
    x = (x * _FIRST_FACTOR) & _LOW
    x = x ^ (x >> 15)
    x = (x * _SECOND_FACTOR) & _LOW
    return x ^ (x >> 16)


def _signed(x: Tensor) -> Tensor:
    """The low 32 bits as a signed number."""
    return ((x + (1 << 31)) & _LOW) - (1 << 31)
