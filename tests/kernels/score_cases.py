"""Score functions that kernels write out: every operation and kind of lookup that emitters know."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LONGEST, HEADS = 130, 4
"""Positions and heads that the captured tensors below cover."""


def learned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)
    return (values * 7).sin().to(dtype).requires_grad_()


SLOPES, PAIRS = learned(HEADS), learned(LONGEST, LONGEST)
RELATIVE, BY_KEY = learned(HEADS, 2 * LONGEST - 1), learned(LONGEST, dtype=torch.bfloat16)
SCALAR, WIDE = learned(), learned(HEADS, dtype=torch.float64)
IDS = (torch.arange(LONGEST) // 13).to(torch.int32)
STARTS = IDS.long() * 13
SMALL_IDS = IDS.to(torch.uint8)
FLAGS = torch.arange(LONGEST) % 3 == 0
EVERY_SECOND = torch.arange(2.0 * LONGEST)[::2]

F = torch.nn.functional
ARITHMETIC: dict[str, Callable[..., Tensor]] = {
    "the score": lambda s, b, h, q, k: s,
    "a constant": lambda s, b, h, q, k: torch.full_like(s, 0.5),
    "softcap": lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0),
    "ALiBi by a formula": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-(h + 1) * 2.0),
    "a batch's temperature": lambda s, b, h, q, k: s / (b + 1.5),
    "masked by the function": lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf),
    "in place": lambda s, b, h, q, k: s.clone().mul_(2).add_(q, alpha=0.5),
    "activations": lambda s, b, h, q, k: F.silu(s) + torch.sigmoid(s) * F.relu(s - 0.1),
    "bent lines": lambda s, b, h, q, k: (
        F.leaky_relu(s, 0.2) + F.hardtanh(s, -3.0, 2.0) * 0.5 + F.elu(s, 0.7)
        + torch.addcmul(s, s, q * 0.1, value=0.5) + torch.where(torch.isnan(s), 0.0, s)
    ),
    "smooth bends": lambda s, b, h, q, k: (
        F.softplus(s) + F.softplus(s, 3.0, 2.0) + F.gelu(s) + F.gelu(s * 0.5, approximate="tanh")
    ),
    "powers": lambda s, b, h, q, k: s**2 - s**3 / 9 + (s * s + 1) ** -0.5 + 1.5**s,
    "roots": lambda s, b, h, q, k: (s * s + 2).sqrt() + (s * s + 2).rsqrt().log() + s.abs(),
    "logarithms": lambda s, b, h, q, k: torch.log1p(s * s) + torch.log2(s.exp() + 1) + s.exp2(),
    "real powers": lambda s, b, h, q, k: (
        (s * s + 0.1) ** 0.7 - ((q - k).abs() * 0.1 + 0.01) ** 1.5 + torch.log10(s * s + 1)
    ),
    "waves": lambda s, b, h, q, k: torch.sin(s) * torch.cos(q * 0.1) + torch.erf(s),
    "extremes": lambda s, b, h, q, k: torch.maximum(s, -s) + torch.minimum(s, 0.1 * q) * 2,
    "bounds": lambda s, b, h, q, k: s.clamp(-1, 1.5) + s.clamp(min=0.2) * s.clamp(max=0.3),
    "bounds that move": lambda s, b, h, q, k: torch.clamp(s, (q - 30) * 0.1, s * s),
    "rounding": lambda s, b, h, q, k: s * torch.floor(q / 7) + s.detach() + (s / 0.3).trunc(),
    "whole numbers": lambda s, b, h, q, k: (
        s + (q - k) // 7 + (q - k) % 5 + torch.div(q - k, 4, rounding_mode="trunc")
        + torch.fmod(q - k, 3) + (q - k).sign() + ((q - k) >> 1) + (q & 5)
    ),
    "a divisor that is not known": lambda s, b, h, q, k: s + (-q) // (k + 1),
    "large whole numbers": lambda s, b, h, q, k: s + (q * 1_000_003 * (k + 7919)) % 1000 / 250,
    "remainders": lambda s, b, h, q, k: torch.remainder(s + (q - k) * 0.25, 3.7) + s,
    "truth values": lambda s, b, h, q, k: (
        s * ((q > k) | (h == 2)) + (~(q > 9) & (k != 4)) * 0.5 + torch.logical_xor(q > 3, k > 3)
    ),
    "filled where": lambda s, b, h, q, k: s.masked_fill((q - k).abs() > 9, -5.0),
    "rounded to half": lambda s, b, h, q, k: s + (q * 0.3).to(torch.float16).float(),
    "T5 buckets": lambda s, b, h, q, k: s + torch.where(
        (q - k).abs() < 8, (q - k).abs(),
        (8 + torch.log((q - k).abs().clamp(min=1).float() / 8) / 2.5 * 8).long().clamp(max=15),
    ),
}  # fmt: skip

LOOKUPS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "learned ALiBi": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k), (SLOPES,)),
    "a learned number": (lambda s, b, h, q, k: s * SCALAR + torch.exp(SCALAR), (SCALAR,)),
    "by query and key": (lambda s, b, h, q, k: s + PAIRS[q, k] * PAIRS[k, q], (PAIRS,)),
    "relative": (lambda s, b, h, q, k: s + RELATIVE[h, q - k + LONGEST - 1], (RELATIVE,)),
    "negative indices": (lambda s, b, h, q, k: s * RELATIVE[h, q - k], (RELATIVE,)),
    "in half precision": (lambda s, b, h, q, k: s + BY_KEY[k].to(s.dtype), (BY_KEY,)),
    "in double precision": (lambda s, b, h, q, k: (s * WIDE[h]).to(s.dtype), (WIDE,)),
    "documents": (
        lambda s, b, h, q, k: torch.where(
            IDS[q] == IDS[k], s + 0.1 * (q - STARTS[q]), -torch.inf), ()),
    "small numbers and flags": (
        lambda s, b, h, q, k: torch.where(
            (SMALL_IDS[q] == SMALL_IDS[k]) & FLAGS[k], s, s - EVERY_SECOND[q]), ()),
    "through an index": (lambda s, b, h, q, k: s * PAIRS[STARTS[k], q], (PAIRS,)),
    "made of what is captured": (
        lambda s, b, h, q, k: s * (SLOPES * 2).sigmoid()[h] + PAIRS.t()[q, k], (SLOPES, PAIRS)),
    "a learned power": (
        lambda s, b, h, q, k: s - (0.5 + (q - k).abs()) ** (SLOPES[h] * 0.5), (SLOPES,)),
    "step by step": (lambda s, b, h, q, k: s * PAIRS[q][k] + RELATIVE[h][q - k], (PAIRS, RELATIVE)),
    "through ids, step by step": (lambda s, b, h, q, k: s + PAIRS[IDS[q]][IDS[k]], (PAIRS,)),
    "in two ways": (lambda s, b, h, q, k: torch.tanh(s + SLOPES[h]) * SLOPES[h % 2], (SLOPES,)),
}  # fmt: skip
