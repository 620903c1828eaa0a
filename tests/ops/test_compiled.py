"""Inside torch.compile(fullgraph=True), checkpoints, autocast and torch.func."""

from collections.abc import Iterator

import pytest
import torch
from kernels.cases import Problem, documents, loss, problem
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp import FlexCPError, masks
from flexcp.graph_handles import owner_of
from flexcp.ops import flex_attention
from flexcp.testing.tolerance import assert_close


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: object, sinks: Tensor | None = None):  # type: ignore[no-untyped-def]
    out, lse = flex_attention(
        q * 1.5, k, v, block_mask=mask, enable_gqa=True, return_lse=True, sinks=sinks
    )  # type: ignore[arg-type]
    return out.sin(), lse


def _model(q: Tensor, k: Tensor, v: Tensor, mask: object, sinks: Tensor | None = None) -> Tensor:
    return loss(*_attend(q, k, v, mask, sinks))


def _same(p: Problem, *results: Tensor) -> None:
    gradients = [torch.autograd.grad(result, p.inputs) for result in results]
    for other in gradients[1:]:
        for found, wanted in zip(other, gradients[0], strict=True):
            assert_close(found, wanted)


@pytest.mark.parametrize("kind", ["Mask", "BlockGrid", "BlockMask", "function", "none"])
def test_every_kind_of_mask_compiles_into_one_graph(kind: str) -> None:
    def causal(b, h, q, kv):  # type: ignore[no-untyped-def]
        return q >= kv

    grid = flexcp.build_block_grid(masks.causal(), 90)
    mask = {
        "Mask": masks.causal(),
        "BlockGrid": grid,
        "BlockMask": grid.to_block_mask(),
        "function": causal,
        "none": None,
    }[kind]
    p = problem(q_len=90, sinks=True)
    compiled = torch.compile(_model, backend="aot_eager", fullgraph=True)
    _same(p, _model(p.q, p.k, p.v, mask, p.sinks), compiled(p.q, p.k, p.v, mask, p.sinks))


@pytest.mark.parametrize("kind", ["BlockMask", "function"])
def test_layers_share_a_graph_with_several_masks_that_have_no_handles(kind: str) -> None:
    def causal(b, h, q, kv):  # type: ignore[no-untyped-def]
        return q >= kv

    def near(b, h, q, kv):  # type: ignore[no-untyped-def]
        return (q - kv).abs() < 9

    def model(q: Tensor, k: Tensor, v: Tensor, first: object, second: object) -> Tensor:
        for mask in (first, second, first):
            q = q + flex_attention(q, k, v, block_mask=mask, enable_gqa=True)  # type: ignore[arg-type]
        return loss(q)

    given = (causal, near)
    if kind == "BlockMask":
        given = tuple(flexcp.build_block_grid(mask, 50).to_block_mask() for mask in given)
    p = problem(q_len=50)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    _same(p, model(p.q, p.k, p.v, *given), compiled(p.q, p.k, p.v, *given))


def test_the_default_backend_runs_forward_and_backward() -> None:
    p = problem(q_len=90)
    compiled = torch.compile(_model, fullgraph=True)
    _same(p, _model(p.q, p.k, p.v, masks.causal()), compiled(p.q, p.k, p.v, masks.causal()))


def test_a_new_mask_and_a_new_length_run_in_the_graph_of_the_first() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_attend, backend=counter, fullgraph=True, dynamic=True)
    for length, step in ((80, 9), (80, 31), (133, 20)):
        mask = masks.causal() & masks.document(documents(length) // step)
        p = problem(q_len=length)
        _same(p, _model(p.q, p.k, p.v, mask), loss(*compiled(p.q, p.k, p.v, mask)))
    assert counter.frame_count == 1


def test_a_mask_made_inside_the_graph_is_refused() -> None:
    def model(q: Tensor) -> Tensor:
        return flex_attention(q, q, q, block_mask=masks.causal())

    with pytest.raises(Exception, match="a mask that exists before the compiled function"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(1, 1, 9, 4))


def test_a_mask_may_be_dropped_before_the_backward_pass() -> None:
    p = problem(q_len=70)
    compiled = torch.compile(_model, backend="aot_eager", fullgraph=True)
    _same(
        p,
        _model(p.q, p.k, p.v, masks.causal()),
        compiled(p.q, p.k, p.v, masks.sliding_window(1000)),
    )


def test_a_mask_that_is_gone_is_an_error_not_another_mask() -> None:
    handle = masks.causal().graph_handle
    assert handle is not None
    with pytest.raises(FlexCPError, match="a mask that still exists"):
        owner_of(handle)


def test_a_score_mod_is_part_of_the_graph_with_what_it_captures() -> None:
    table = torch.randn(200, dtype=torch.float64, requires_grad=True)

    def model(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: flexcp.Mask) -> Tensor:
        inside = table * 0.5
        out, lse = flex_attention(
            q, k, v, lambda s, b, h, q, kv: s + inside[q - kv + 100] * (h + 1), mask,
            enable_gqa=True, return_lse=True, sinks=sinks,
        )  # fmt: skip
        return loss(out, lse)

    mask = flexcp.Mask(lambda b, h, q, kv: (q >= kv + 5) & (h + b != 2))
    p = problem(q_len=90, sinks=True)
    p.captured = [table]
    arguments = (p.q, p.k, p.v, p.sinks, mask)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    _same(p, model(*arguments), compiled(*arguments))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_give_the_same_bits(reentrant: bool) -> None:
    p = problem(q_len=150, dtype=torch.float32)
    plain = torch.autograd.grad(_model(p.q, p.k, p.v, masks.causal()), p.inputs)
    checkpoint(_model, p.q, p.k, p.v, masks.causal(), use_reentrant=reentrant).backward()
    for x, grad in zip(p.inputs, plain, strict=True):
        assert torch.equal(x.grad, grad)


def test_autocast_casts_as_for_torchs_own_attention() -> None:
    p = problem(q_len=150, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flex_attention(p.q, p.k, p.v, block_mask=masks.causal(), enable_gqa=True)
        grads = torch.autograd.grad(loss(out.float()), p.inputs)
    narrow = [x.bfloat16() for x in p.inputs]
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, flex_attention(*narrow, block_mask=masks.causal(), enable_gqa=True))
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_autocast_brings_inputs_of_different_types_together() -> None:
    q, k, v = (torch.randn(1, 2, 37, 8) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = flexcp.flex_attention(q, k, v.bfloat16(), block_mask=masks.causal())
        alike = flexcp.flex_attention(q, k, v, block_mask=masks.causal())
    assert torch.equal(mixed, alike)


def test_autocast_leaves_float64_alone() -> None:
    p = problem(q_len=50)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flex_attention(p.q, p.k, p.v, block_mask=masks.causal(), enable_gqa=True)
    assert_close(out, p.expected(masks.causal()).out)


@pytest.mark.parametrize("scored", [True, False])
def test_torch_func_differentiates_it(scored: bool) -> None:
    table = torch.randn(200, dtype=torch.float64)
    score_mod = (lambda s, b, h, q, kv: s + table[q - kv + 100]) if scored else None
    p = problem(q_len=90)

    def value(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return loss(flex_attention(q, k, v, score_mod, masks.causal(), enable_gqa=True))  # type: ignore[arg-type]

    plain = torch.autograd.grad(value(p.q, p.k, p.v), p.inputs)
    found = torch.func.grad(value, argnums=(0, 1, 2))(*(x.detach() for x in p.inputs))
    for actual, wanted in zip(found, plain, strict=True):
        assert_close(actual, wanted)


def test_inference_mode_plans_and_runs() -> None:
    p = problem(q_len=90)
    mask, table = masks.sliding_window(20), torch.randn(90, dtype=torch.float64)
    score_mod = lambda s, b, h, q, kv: torch.where((q >= kv) & (h > 0), s + table[q], s)  # noqa: E731
    expected = p.expected(mask, score_mod)
    with torch.inference_mode():
        out = flex_attention(p.q, p.k, p.v, score_mod, mask, enable_gqa=True)
    assert_close(out, expected.out)
