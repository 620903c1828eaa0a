"""Score functions written out in Triton: value and gradients of each score, as torch's autograd.

Generated functions are called on one tile, with positions that are neither sorted nor consecutive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.interface import full_shapes
from flexcp.kernels.score import examine
from flexcp.kernels.triton.captured_sums import add_in_order
from flexcp.kernels.triton.emit import emitted
from flexcp.kernels.triton.scoring import ScoreArguments
from flexcp.testing.tolerance import assert_close

N, LONGEST, HEADS = 16, 60, 4
Q_AT = torch.randint(0, LONGEST, (N,), generator=torch.Generator().manual_seed(1))
K_AT = torch.randint(0, LONGEST, (N,), generator=torch.Generator().manual_seed(2))
FIRST_BATCH, FIRST_HEAD, BATCH, HEAD = 1, 2, 1, 1
SCALE = -0.25
CPU = torch.device("cpu")
COMPILED = CompiledShapes(replace(full_shapes(N, N), q_positions=Q_AT, kv_positions=K_AT))


@triton.jit
def evaluate(
    s, g, value, slope, given, BATCH: tl.constexpr, HEAD: tl.constexpr, N: tl.constexpr,
    SCORE: tl.constexpr, PULL_BACK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    q, k = tl.load(given[0] + i).to(tl.int32)[:, None], tl.load(given[1] + i).to(tl.int32)[None, :]
    b, h = tl.full([], BATCH, tl.int64), tl.full([], HEAD, tl.int64)
    score = tl.load(s + at)
    tl.store(value + at, SCORE(score, b, h, q, k, given))
    tl.store(slope + at, PULL_BACK(tl.load(g + at), score, b, h, q, k, given))


@triton.jit
def evaluate_lookup(
    s, g, pulled, element, given, BATCH: tl.constexpr, HEAD: tl.constexpr, N: tl.constexpr,
    PULL: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    q, k = tl.load(given[0] + i).to(tl.int32)[:, None], tl.load(given[1] + i).to(tl.int32)[None, :]
    b, h = tl.full([], BATCH, tl.int64), tl.full([], HEAD, tl.int64)
    tl.store(pulled + at, PULL(tl.load(g + at), tl.load(s + at), b, h, q, k, given))
    tl.store(element + at, ELEMENT(b, h, q, k, given) + tl.zeros([N, N], tl.int64))


def compare(function: Callable[..., Tensor], captured: tuple[Tensor, ...] = ()) -> None:
    """Value, derivative and gradients of captured tensors, beside autograd in float64."""
    products, g = torch.randn(N, N) * 8, torch.randn(N, N)
    mod = examine(function, torch.float32, CPU)
    mod = replace(mod, first_batch=FIRST_BATCH, first_head=FIRST_HEAD)
    score = ScoreArguments.of(mod, COMPILED, CPU, SCALE)
    assert score is not None
    value, slope = torch.empty(N, N), torch.empty(N, N)
    functions = score.functions
    numbers = (score.given, BATCH, HEAD, N)
    evaluate[(1,)](products, g, value, slope, *numbers, functions["score"], functions["pull_back"])
    exact = (products.double() * SCALE).requires_grad_()
    b, h = torch.tensor(BATCH + FIRST_BATCH), torch.tensor(HEAD + FIRST_HEAD)
    wanted = mod.function(exact, b.view(1, 1), h.view(1, 1), Q_AT[:, None], K_AT)
    wanted = wanted.to(torch.float64).expand(N, N)
    if not wanted.requires_grad:
        wanted = wanted + 0.0 * exact.detach().requires_grad_()
    inputs = (exact, *mod.captured)
    grads = torch.autograd.grad(wanted, inputs, g.double(), allow_unused=True)
    assert_close(value, wanted, dtype=torch.float32, what="value")
    first = torch.zeros_like(exact) if grads[0] is None else grads[0]
    assert_close(slope, first, dtype=torch.float32, what="slope", factor=2.0)
    assert {id(x) for x in mod.captured} == {id(x) for x in captured}
    totals = {}
    for lookup in score.emitted.lookups:
        table = score.emitted.operands[lookup.operand]
        pulled, element = torch.empty(N, N), torch.empty(N, N, dtype=torch.int64)
        evaluate_lookup[(1,)](
            products, g, pulled, element, *numbers,
            functions[f"pull_{lookup.number}"], functions[f"element_{lookup.number}"],
        )  # fmt: skip
        total = totals.setdefault(lookup.operand, torch.zeros(table.numel() + 1))
        add_in_order(total, pulled.flatten(), element.flatten())
    operands = [score.emitted.operands[i] for i in totals]
    shaped = [
        t[:-1].view(x.shape).to(x.dtype) for t, x in zip(totals.values(), operands, strict=True)
    ]
    if operands:
        found = torch.autograd.grad(operands, mod.captured, shaped, allow_unused=True)
        for x, y in zip(found, grads[1:], strict=True):
            assert x is not None
            assert y is not None
            assert_close(x, y, dtype=torch.float32, what="captured", factor=2.0)


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
        + torch.fmod(q - k, 3) + (q - k).sign() + ((q - k) >> 1) + (q & 5) + (-q) // (k + 1)
    ),
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


@pytest.mark.parametrize("name", ARITHMETIC)
def test_what_a_function_does_to_a_score(name: str) -> None:
    compare(ARITHMETIC[name])


@pytest.mark.parametrize("name", LOOKUPS)
def test_what_a_function_reads_and_its_gradient(name: str) -> None:
    compare(*LOOKUPS[name])


def _both(of: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Callable[..., Any]]:
    return lambda x, y: lambda *given: of(x(*given), y(*given))


def _each(of: Callable[[Any], Any]) -> Callable[[Any], Callable[..., Any]]:
    return lambda x: lambda *given: of(x(*given))


LEAVES = st.sampled_from(
    [
        lambda s, b, h, q, k: s, lambda s, b, h, q, k: (q - k) * 0.01,
        lambda s, b, h, q, k: SLOPES[h].to(s.dtype), lambda s, b, h, q, k: SCALAR.to(s.dtype),
        lambda s, b, h, q, k: RELATIVE[h, q - k + LONGEST - 1].to(s.dtype),
    ]
)  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda make, x, y: make(x, y),
        st.sampled_from([*map(_both, (torch.add, torch.sub, torch.mul, torch.maximum))]),
        inner, inner,
    ) | st.builds(
        lambda make, x: make(x),
        st.sampled_from([*map(_each, (torch.tanh, torch.sigmoid, torch.sin, torch.neg))]), inner,
    ),
    max_leaves=6,
)  # fmt: skip


@drawn(TREES)
@settings(max_examples=5, deadline=None)
def test_any_expression_is_differentiated_as_torch_does(tree: Callable[..., Tensor]) -> None:
    def function(s: Tensor, *at: Tensor) -> Tensor:
        return s + tree(s, *at)

    compare(function, examine(function, torch.float32, CPU).captured)


def test_an_index_outside_of_its_tensor_makes_the_score_nan() -> None:
    table = torch.arange(LONGEST // 2)
    mod = examine(lambda s, b, h, q, k: s + table[q], torch.float32, CPU)
    score = ScoreArguments.of(mod, COMPILED, CPU, SCALE)
    assert score is not None
    s, value = torch.randn(N, N), torch.empty(N, N)
    names = ("score", "pull_back")
    evaluate[(1,)](
        s, s, value, torch.empty(N, N), score.given, 0, 0, N, *(score.functions[n] for n in names)
    )
    inside = Q_AT < LONGEST // 2
    assert inside.any()
    assert value[~inside].isnan().all()
    assert torch.equal(value[inside], s[inside] * SCALE + table[Q_AT[inside]][:, None])


class Rounded(torch.autograd.Function):
    """A step with a derivative of its own, which its operations don't tell."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(_: Any, g: Tensor) -> Tensor:
        return g


def without_gradient(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    with torch.no_grad():
        slope = SLOPES[h]
    return s * slope


@pytest.mark.parametrize(
    ("what", "function"),
    [
        ("the operation 'i0'", lambda s, b, h, q, k: torch.special.i0(s)),
        ("the operation 'atan2'", lambda s, b, h, q, k: torch.atan2(s, s + 3)),
        ("'index', which does not act on each", lambda s, b, h, q, k: s + PAIRS[q].sum()),
        ("'bucketize', which does not act", lambda s, b, h, q, k: s + torch.bucketize(q, IDS)),
        ("numbers of type torch.uint8", lambda s, b, h, q, k: s + (SMALL_IDS[q] - SMALL_IDS[k])),
        ("the power 9.0", lambda s, b, h, q, k: s**9),
        ("the operation 'round' in torch.no_grad or", lambda s, b, h, q, k: Rounded.apply(s)),
        ("the operation 'index' in torch.no_grad or", without_gradient),
        ("looked up by a score", lambda s, b, h, q, k: s * SLOPES[s.long() % 2]),
        (
            "a change in place of what may have a second name",
            lambda s, b, h, q, k: s.detach().add_(1) + s,
        ),
    ],
)
def test_what_is_not_known_is_named(what: str, function: Callable[..., Tensor]) -> None:
    found = emitted(examine(function, torch.float32, CPU))
    assert isinstance(found, str)
    assert what in found


def test_values_and_sizes_are_no_part_of_the_source() -> None:
    def source(length: int, value: float) -> str:
        table, number = torch.full((2, length), value), torch.tensor(value)
        mod = examine(lambda s, b, h, q, k: s * number + table[h, q - k], torch.float32, CPU)
        found = emitted(mod)
        assert not isinstance(found, str)
        return found.source

    assert source(10, 1.0) == source(999, -3.5)
