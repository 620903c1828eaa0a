"""score_mods inside torch.compile: one graph for many lengths, masks and captured numbers."""

from collections.abc import Iterator

import pytest
import torch
from kernels.cases import loss, problem
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flexcp import masks
from flexcp.ops import flex_attention, traced_scores
from flexcp.testing.tolerance import assert_close


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_another_length_or_mask_compiles_once_more_and_then_never_again() -> None:
    table = torch.randn(400, dtype=torch.float64, requires_grad=True)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + table[q - kv + 200] * (h + 1)

    def model(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: masks.Mask):  # type: ignore[no-untyped-def]
        return flex_attention(
            q, k, v, score_mod, mask, enable_gqa=True, return_lse=True, sinks=sinks
        )

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length, window in ((60, 7), (71, 7), (72, 90), (133, 20), (90, 31)):
        mask = masks.sliding_window(window) & masks.document(torch.arange(length) // 50)
        p = problem(q_len=length, sinks=True)
        p.captured = [table]
        arguments = (p.q, p.k, p.v, p.sinks, mask)
        results = [loss(*run(*arguments)) for run in (model, compiled)]
        wanted, found = (torch.autograd.grad(x, [*p.inputs, table]) for x in results)
        assert_close(results[1], results[0])
        for actual, expected in zip(found, wanted, strict=True):
            assert_close(actual, expected)
    assert counter.frame_count == 2


@pytest.fixture(params=["kept", "recomputed"])
def recomputed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are kept for the backward pass, or so many that they are computed again."""
    if request.param == "recomputed":
        monkeypatch.setattr(traced_scores, "MOST_KEPT_SCORES", 100)


@pytest.mark.usefixtures("recomputed")
def test_a_captured_int_and_a_tensor_without_dimensions_may_change_within_a_graph() -> None:
    table = torch.randn(3, 40, dtype=torch.float64, requires_grad=True)

    def model(q: Tensor, k: Tensor, v: Tensor, number: int, which: Tensor) -> Tensor:
        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return torch.where(q - kv < number, s * number, s) + table[which, q] + table[which][kv]

        return flex_attention(q, k, v, score_mod, enable_gqa=True)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for number, row in ((3, 0), (5, 2), (9, 1)):
        p = problem(q_len=40)
        arguments = (p.q, p.k, p.v, number, torch.tensor(row))
        results = [run(*arguments) for run in (model, compiled)]
        wanted, found = (torch.autograd.grad(loss(x), [*p.inputs, table]) for x in results)
        assert_close(results[1], results[0])
        for actual, expected in zip(found, wanted, strict=True):
            assert_close(actual, expected)
    assert counter.frame_count == 2
