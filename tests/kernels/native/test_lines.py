"""Lines of tiles and rounds in the C++ kernel: what is packed, merged, summed up and left alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import flexcp
from flexcp import Mask, masks
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.interface import Partial, causal_shapes
from flexcp.kernels.native.kernel import NativeKernel
from flexcp.kernels.reference import DenseResult, dense_attention
from flexcp.kernels.shapes import shapes_of
from flexcp.testing.tolerance import assert_close
from kernels.cases import wide

FLOAT64 = torch.float64


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("lies", ["side by side", "by token", "half"])
@pytest.mark.parametrize("documents", ["short", "one long", "nothing else"])
def test_key_tiles_are_packed_by_each_thread_or_for_all(
    native: NativeKernel, documents: str, lies: str, threads: int
) -> None:
    """Short documents: by each thread; in a long one, a line has more tiles than it has places."""
    lengths = {
        "short": [90, 1, 200, 37] * 8,
        "one long": [60, 2400, *[60] * 60],
        "nothing else": [60, 1900],
    }[documents]
    length, dim = sum(lengths), 32
    random = torch.Generator().manual_seed(4)
    made = [torch.randn(1, length, h, dim, generator=random) for h in (2, 1, 1)]
    inputs = [x.transpose(1, 2) for x in made]
    if lies == "side by side":
        inputs = [x.contiguous() for x in inputs]
    if lies == "half":
        inputs = [x.contiguous().to(torch.bfloat16) for x in inputs]
    for x in inputs:  # what is not finite in the first document stays there
        x[..., 1, :] = torch.nan
    grad_out = torch.randn(1, 2, length, dim, generator=random).to(inputs[0].dtype)
    mask = masks.causal() & masks.document(lengths=lengths)
    compiled = CompiledShapes(shapes_of(flexcp.build_block_grid(mask, length)))
    with on_threads(threads):
        found = native.forward(*inputs, compiled, scale=0.2)
        back = native.backward(grad_out, *inputs, found.out, found.lse, compiled, scale=0.2)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    for begin, end in pairwise(ends):
        rows = slice(begin, end)
        exact = wide(*(x[:, :, rows] for x in inputs))
        allowed = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
        expected = dense_attention(*exact, allowed=allowed[None, None], scale=0.2)
        grads = torch.autograd.grad(expected.out, exact, grad_out[:, :, rows].to(FLOAT64))
        assert_close(found.out[:, :, rows], expected.out, dtype=torch.float32, what="out")
        for actual, wanted in zip((back.q, back.k, back.v), grads, strict=True):
            assert_close(actual[:, :, rows], wanted, dtype=torch.float32, factor=2)


def whole(length: int, seed: int = 0) -> tuple[list[Tensor], DenseResult, list[Tensor], Tensor]:
    """Inputs in float32, the oracle's causal result and gradients, and the result's gradient."""
    random = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(1, h, length, 12, generator=random) for h in (4, 2, 2)]
    exact = wide(*inputs)
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    expected = dense_attention(*exact, allowed=allowed[None, None], scale=0.4)
    grad_out = torch.randn(expected.out.shape, generator=random)
    grads = torch.autograd.grad(expected.out, exact, grad_out.to(FLOAT64))
    return inputs, expected, list(grads), grad_out


def test_rounds_are_merged_and_added_up_in_place(native: NativeKernel) -> None:
    length, cut = 500, 230
    (q, k, v), expected, grads, grad_out = whole(length)
    grid = flexcp.build_block_grid(masks.causal(), length)
    parts = [
        (CompiledShapes(shapes_of(grid, kv_positions=at)), k[:, :, at], v[:, :, at])
        for at in (torch.arange(cut), torch.arange(cut, length))
    ]
    result: Partial | None = None
    for compiled, own_k, own_v in parts:
        former = result
        result = native.forward(q, own_k, own_v, compiled, scale=0.4, former=former)
        assert former is None or result is former
    assert result is not None
    assert_close(result.out, expected.out, dtype=torch.float32)
    assert_close(result.lse, expected.lse, dtype=torch.float32)
    delta = native.delta(grad_out, result.out, None)
    dq = None
    both = torch.full((1, length, 2, 24), torch.nan).transpose(1, 2)  # rows that stand side by side
    for (compiled, own_k, own_v), rows in zip(
        parts, (slice(0, cut), slice(cut, length)), strict=True
    ):
        room = both[:, :, rows].split(12, -1)
        found = native.backward(
            grad_out, q, own_k, own_v, result.out, result.lse, compiled, scale=0.4, delta=delta,
            grad_q=dq, grad_kv=(room[0], room[1]),
        )  # fmt: skip
        assert dq is None or found.q is dq
        dq = found.q
    dk, dv = both.split(12, -1)
    for actual, wanted in zip((dq, dk, dv), grads, strict=True):
        assert actual is not None
        assert_close(actual, wanted, dtype=torch.float32, factor=2)


@pytest.mark.parametrize("threads", [1, 3])
def test_key_tiles_end_at_other_lines_for_every_head(native: NativeKernel, threads: int) -> None:
    """Of two heads that share keys, one sees documents, the other the first key and a window."""
    length, unseen = 1200, slice(300, 620)
    at = torch.arange(length)
    ids = at // 170
    near = at[:, None] - at < 5
    allowed = torch.stack([ids[:, None] == ids, near | (at == 0)]) & (at[:, None] >= at)
    allowed[:, :, unseen] = False

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return allowed[h, q, k]

    grid = flexcp.build_block_grid(Mask(rule), length, heads=2)
    compiled = CompiledShapes(shapes_of(grid))
    random = torch.Generator().manual_seed(7)
    inputs = [torch.randn(1, h, length, 24, generator=random) for h in (2, 1, 1)]
    grad_out = torch.randn(1, 2, length, 24, generator=random)
    exact = wide(*inputs)
    expected = dense_attention(*exact, allowed=allowed[None], scale=0.2)
    grads = torch.autograd.grad(expected.out, exact, grad_out.to(FLOAT64))
    with on_threads(threads):
        found = native.forward(*inputs, compiled, scale=0.2)
        back = native.backward(grad_out, *inputs, found.out, found.lse, compiled, scale=0.2)
    assert_close(found.out, expected.out, dtype=torch.float32, what="out")
    for actual, wanted in zip((back.q, back.k, back.v), grads, strict=True):
        assert_close(actual, wanted, dtype=torch.float32, factor=2)
    assert not back.k[:, :, unseen].any()
    assert not back.v[:, :, unseen].any()


def test_rows_that_a_round_does_not_see_stay_as_they_are(native: NativeKernel) -> None:
    (q, k, v), _, _, grad_out = whole(600)
    compiled = CompiledShapes(shapes_of(flexcp.build_block_grid(masks.causal(), 600)))
    first = native.forward(q, k, v, compiled, scale=0.4)
    back = native.backward(grad_out, q, k, v, first.out, first.lse, compiled, scale=0.4)
    late = Mask(lambda b, h, q, k: (q >= 310) & (q < 330) & (k < 50))
    compiled = CompiledShapes(shapes_of(flexcp.build_block_grid(late, 600)))
    former = Partial(first.out.clone(), first.lse.clone())
    merged = native.forward(q, k, v, compiled, scale=0.4, former=former)
    added = native.backward(
        grad_out, q, k, v, first.out, first.lse, compiled, scale=0.4, grad_q=back.q.clone()
    )
    for now, was in ((merged.out, first.out), (merged.lse[..., None], first.lse[..., None]),
                     (added.q, back.q)):  # fmt: skip
        changed = (now != was).any(-1).any(1).any(0)
        assert changed.nonzero().flatten().tolist() == [*range(310, 330)]


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_few_heads_are_shared_by_many_threads(native: NativeKernel, threads: int) -> None:
    (q, k, v), expected, grads, grad_out = whole(700)
    compiled = CompiledShapes(causal_shapes(700))
    runs = []
    with on_threads(threads):
        for _ in range(2):
            found = native.forward(q, k, v, compiled, scale=0.4)
            back = native.backward(grad_out, q, k, v, found.out, found.lse, compiled, scale=0.4)
            runs.append((found.out, found.lse, back.q, back.k, back.v))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    wanted = (expected.out, expected.lse, *grads)
    for actual, want in zip(runs[0], wanted, strict=True):
        assert_close(actual, want, dtype=torch.float32, factor=2)
