"""The Triton kernels beside the oracle, on tensors with NaN behind every row and every column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flexcp
from flexcp import Mask
from flexcp.kernels import Partial, merge
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.reference import dense_attention, dense_mask
from flexcp.kernels.score import ScoreFunction, examine
from flexcp.kernels.shapes import shapes_of
from flexcp.kernels.triton.kernel import TritonKernel
from flexcp.kernels.triton.tuning import Tuning, parse_tile
from flexcp.testing.tolerance import relative_error, tolerance

SMALL = Tuning(parse_tile("32x32 w4 s1"), parse_tile("32x64 w4 s1"), parse_tile("64x32 w4 s1"))
APART = Tuning(
    parse_tile("16x64 w4 s1 tma"), parse_tile("64x16 w4 s1 tma"), parse_tile("32x32 w4 s1 tma"),
    parse_tile("16x32 w4 s1 tma"),
)  # fmt: skip
"""Descriptors, tiles narrower than a word, and gradients of keys and values in two launches."""


@dataclass(frozen=True)
class Sizes:
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    q_len: int = 70
    kv_len: int = 75
    dim: int = 16
    value_dim: int = 16


def surrounded(x: Tensor) -> Tensor:
    """The same numbers inside of a larger tensor of NaN."""
    b, h, length, d = x.shape
    large = torch.full((b, h + 1, length + 64, d + 8), torch.nan, dtype=x.dtype)
    large[:, :h, :length, :d] = x
    return large[:, :h, :length, :d]


def errors(
    mask: Mask,
    sizes: Sizes,
    *,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.3,
    tuning: Tuning = SMALL,
    directions: Sequence[str] = ("forward", "merged", "backward"),
    dropout: Dropout | None = None,
    score_mod: ScoreFunction | None = None,
) -> dict[str, float]:
    """How far each result is from the oracle's in float64, in units of what is allowed.

    Tensors that `score_mod` captures and that need a gradient are compared too.
    """
    s = sizes
    q, k, v = (
        torch.randn(s.batch, heads, length, dim, dtype=torch.float64).to(dtype)
        for heads, length, dim in (
            (s.heads, s.q_len, s.dim), (s.kv_heads, s.kv_len, s.dim),
            (s.kv_heads, s.kv_len, s.value_dim),
        )
    )  # fmt: skip
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    rows, keys = torch.arange(s.q_len), torch.arange(s.kv_len)
    allowed = dense_mask(mask.mask_mod, rows, keys, batch=s.batch, heads=s.heads)
    expected = dense_attention(
        *exact, allowed=allowed, scale=scale, dropout=dropout, score_mod=score_mod
    )
    mod = None if score_mod is None else examine(score_mod, torch.float32, q.device)
    captured = () if mod is None else mod.captured
    grid = flexcp.build_block_grid(mask, s.q_len, s.kv_len, batch=s.batch, heads=s.heads)
    compiled = CompiledShapes(shapes_of(grid))
    kernel = TritonKernel(tuning)
    options: dict[str, Any] = {"scale": scale, "dropout": dropout, "score_mod": mod}
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    if "forward" in directions:
        found = kernel.forward(*map(surrounded, (q, k, v)), compiled, **options)
        pairs |= {"out": (found.out, expected.out), "lse": (found.lse, expected.lse)}
    if "merged" in directions:
        pairs |= _merged(kernel, (q, k, v), compiled, options, expected.out, expected.lse)
    if "backward" in directions:
        grad_out = torch.randn(expected.out.shape).to(dtype)
        grad_lse = torch.randn(expected.lse.shape).masked_fill(expected.lse == -torch.inf, 0.0)
        finite = expected.lse.masked_fill(expected.lse == -torch.inf, 0.0)
        total = (expected.out * grad_out.double()).sum() + (finite * grad_lse.double()).sum()
        wanted = torch.autograd.grad(total, [*exact, *captured])
        before = torch.randn(q.shape)
        out, lse = expected.out.detach().to(dtype), expected.lse.detach().float()
        back = kernel.backward(
            *map(surrounded, (grad_out, q, k, v, out)), lse, compiled, **options,
            grad_lse=grad_lse, grad_q=before.clone(),
        )  # fmt: skip
        pairs |= {
            "dq": (back.q - before, wanted[0]),
            "dk": (back.k, wanted[1]),
            "dv": (back.v, wanted[2]),
        }
        pairs |= {
            f"captured {i}": pair
            for i, pair in enumerate(zip(back.captured, wanted[3:], strict=True))
        }
    return {name: relative_error(*pair) / tolerance(dtype) for name, pair in pairs.items()}


def _merged(
    kernel: TritonKernel,
    given: tuple[Tensor, ...],
    compiled: CompiledShapes,
    options: Mapping[str, Any],
    out: Tensor,
    lse: Tensor,
) -> Mapping[str, tuple[Tensor, Tensor]]:
    """The result merged with an earlier one, of which some rows have seen nothing."""
    former = Partial(torch.randn(out.shape), 3 * torch.randn(lse.shape))
    former.lse[..., ::5] = -torch.inf
    former.out[..., ::5, :] = 0.0
    wanted = merge(former.out.double(), former.lse.double(), out.detach(), lse.detach())
    room = surrounded(former.out)
    kernel.forward(*given, compiled, **options, former=Partial(room, former.lse))
    beyond = room._base
    assert beyond is not None
    written = int(beyond.isfinite().sum())
    assert written == room.numel(), "something was written beyond the rows or the head dim"
    return {"merged out": (room, wanted[0]), "merged lse": (former.lse, wanted[1])}


def assert_exact(found: Mapping[str, float]) -> None:
    assert {name: x for name, x in found.items() if not x <= 1.0} == {}
