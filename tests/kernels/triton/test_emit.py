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
from kernels.score_cases import (
    ARITHMETIC,
    IDS,
    LONGEST,
    LOOKUPS,
    PAIRS,
    RELATIVE,
    SCALAR,
    SLOPES,
    SMALL_IDS,
)

N = 16
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
