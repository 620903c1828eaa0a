"""Gradients of what score functions capture, in the C++ kernel, beside the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp import masks, testing
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.interface import causal_shapes
from flexcp.kernels.native import build, scores
from flexcp.kernels.native.kernel import NativeKernel
from flexcp.kernels.reference import dense_attention, dense_mask
from flexcp.kernels.score import examine
from flexcp.testing.tolerance import assert_close
from kernels.native.test_score_source import by_head
from kernels.native.test_scores import CPU, NATIVE, Function, inputs
from kernels.score_cases import LONGEST, LOOKUPS

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")


@pytest.mark.parametrize("order", ["in order", "anywhere"])
def test_what_is_read_gets_its_gradient_however_it_is_looked_up(
    native: NativeKernel, order: str
) -> None:
    """Once for a head, a row, a column, a distance or a pair; twice; and through what is made."""
    function = by_head([one for one, _ in LOOKUPS.values()])
    heads, at = len(LOOKUPS), torch.arange(LONGEST)
    if order == "anywhere":
        at = torch.randperm(LONGEST)
    q, k, v, grad = (torch.randn(2, heads, LONGEST, 8) for _ in range(4))
    mod = examine(function, torch.float32, CPU)
    shapes = replace(causal_shapes(LONGEST), q_positions=at, kv_positions=at)
    compiled, given = CompiledShapes(shapes), {"scale": 0.3, "score_mod": mod}
    found = native.forward(q, k, v, compiled, **given)
    back = native.backward(grad, q, k, v, found.out, found.lse, compiled, **given)
    again = native.backward(grad, q, k, v, found.out, found.lse, compiled, **given)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    allowed = torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril()
    right = dense_attention(
        *wide, allowed=allowed, score_mod=function, scale=0.3, q_positions=at, kv_positions=at
    )
    wanted = torch.autograd.grad(right.out, (*wide, *mod.captured), grad.double())
    actual = (back.q, back.k, back.v, *back.captured)
    for x, y in zip(actual, wanted, strict=True):
        dtype = x.dtype if x.dtype.itemsize == 2 else torch.float32
        assert_close(x, y, dtype=dtype, factor=2)
    for x, y in zip(back.captured, again.captured, strict=True):
        assert torch.equal(x, y)


def learned_bias(table: Tensor) -> Function:
    return lambda s, b, h, q, k: s * 0.5 + table[h, q - k].to(s.dtype)


def test_ranks_add_up_the_gradients_of_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And they may be summed up on strips, where tables would take too much memory."""
    mask, tensors = masks.causal() & masks.document(lengths=[201, 139]), inputs(340, 340, 1)
    values = torch.randn(4, 340)

    def rank(mesh: object) -> list[Tensor]:
        plan = flexcp.make_plan(
            mask, 340, mesh, num_heads=4, num_kv_heads=2, head_dim=24, dtype=torch.float32
        )
        q, k, v, grad = (plan.shard(t, 2).clone().requires_grad_() for t in tensors)
        table = values.clone().requires_grad_()
        out = flexcp.attention(
            q, k, v, plan, score_mod=learned_bias(table), scale=0.3, kernel="native"
        )
        dq, of_table = torch.autograd.grad(out, (q, table), grad)
        return [plan.unshard(dq, 2), of_table]

    q, k, v = (x.double().requires_grad_() for x in tensors[:3])
    table, at = values.clone().requires_grad_(), torch.arange(340)
    allowed = dense_mask(mask.mask_mod, at, at, batch=1, heads=4)
    right = dense_attention(q, k, v, allowed=allowed, score_mod=learned_bias(table), scale=0.3)
    wanted = torch.autograd.grad(right.out, (q, table), tensors[3].double())
    for most in (scores._MOST_SUMS, 0):
        monkeypatch.setattr(scores, "_MOST_SUMS", most)
        results = testing.simulate(rank, 3)
        for found in results:
            assert_close(found[0], wanted[0], dtype=torch.float32, factor=2)
        assert_close(sum(x for _, x in results), wanted[1], dtype=torch.float32, factor=2)


def test_a_checkpoint_is_no_part_of_a_function() -> None:
    """It keeps what is saved for the backward pass by hooks, which act on tensors."""
    x, slopes = torch.randn(1, 2, 130, 8), torch.rand(130, requires_grad=True)

    def attend(x: Tensor, slopes: Tensor) -> Tensor:
        def function(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return s + torch.tanh(slopes[q]) * slopes[k]

        return flexcp.flex_attention(x, x, x, score_mod=function, kernel_options=NATIVE)

    (wanted,) = torch.autograd.grad((attend(x, slopes) * x).sum(), slopes)
    out = checkpoint(attend, x, slopes, use_reentrant=False)
    (found,) = torch.autograd.grad((out * x).sum(), slopes)
    assert torch.equal(found, wanted)


def captured_gradient(function_of: Callable[[Tensor], Function], kernel: str) -> Tensor:
    random = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 2, 130, 8, generator=random) for _ in range(3))
    w = torch.rand(130, generator=random).requires_grad_()
    out, lse = flexcp.flex_attention(
        q, k, v, score_mod=function_of(w), return_lse=True, kernel_options={"kernel": kernel}
    )
    (found,) = torch.autograd.grad((out * v).sum() + lse.sum(), w)
    return found


def beside_its_double(w: Tensor) -> Function:
    twice = 2 * w
    return lambda s, b, h, q, k: s + (twice + w)[k] + w[q] * twice[k]


def beside_what_its_double_makes(w: Tensor) -> Function:
    capped = (2 * w).tanh()
    return lambda s, b, h, q, k: s * w[k] + capped[k] * capped.exp()[q]


@pytest.mark.parametrize(
    "function_of",
    [
        beside_its_double,
        beside_what_its_double_makes,
        lambda w: lambda s, b, h, q, k: w.tanh().sum(),
    ],
)
@pytest.mark.parametrize("kernel", ["native", "scored"])
def test_what_is_made_of_a_captured_tensor_counts_once(
    function_of: Callable[[Tensor], Function], kernel: str
) -> None:
    """Made outside of the function and captured too, or made in it and returned."""
    wanted = captured_gradient(function_of, "reference")
    assert_close(captured_gradient(function_of, kernel), wanted, dtype=torch.float32, factor=10)
