"""score_mods inside torch.compile: one graph for many lengths, masks and captured numbers."""

from collections.abc import Iterator

import pytest
import torch
from kernels.cases import loss, problem
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from flexcp import FlexCPError, masks
from flexcp.compat.flex_attention import create_block_mask
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


@pytest.mark.parametrize(("dynamic", "most"), [(None, 1 << 24), (True, 100)])
def test_a_bias_is_looked_up_for_pairs_that_may_attend_alone(
    dynamic: bool | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may ask for what is not in it, as in a table that is as wide as the window."""
    monkeypatch.setattr(traced_scores, "MOST_KEPT_SCORES", most)
    window, length = 20, 75
    near = torch.randn(window + 1, dtype=torch.float64, requires_grad=True)
    far = torch.randn(length, dtype=torch.float64, requires_grad=True)

    def by(near: Tensor):  # type: ignore[no-untyped-def]
        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return s * near[q - kv] + far[q - kv]

        return score_mod

    mask = masks.sliding_window(window)

    def model(q: Tensor, k: Tensor, v: Tensor, near: Tensor) -> Tensor:
        return flex_attention(q, k, v, by(near), mask, enable_gqa=True)

    p = problem(q_len=length)
    wanted = model(p.q, p.k, p.v, torch.cat([near, near.new_zeros(length)]))
    found = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)(
        p.q, p.k, p.v, near
    )
    assert_close(found, wanted)
    gradients = (torch.autograd.grad(loss(x), [*p.inputs, near, far]) for x in (found, wanted))
    for actual, expected in zip(*gradients, strict=True):
        assert_close(actual, expected)


def test_an_index_that_is_out_of_range_for_a_pair_that_may_attend_raises() -> None:
    table, mask = torch.randn(20), masks.sliding_window(20)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, lambda s, b, h, q, kv: s + table[q - kv], mask)

    q, k, v = torch.randn(3, 1, 2, 64, 8)
    with pytest.raises(IndexError, match="out of bounds"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(q, k, v)


def test_a_mask_that_is_made_inside_of_the_graph_is_refused() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, lambda s, b, h, q, kv: s * 2, masks.causal())

    q, k, v = torch.randn(3, 1, 2, 64, 8)
    with pytest.raises(RuntimeError, match="a mask that exists before the compiled function"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(q, k, v)


@pytest.mark.parametrize("strict", [False, True])
def test_a_score_mod_can_be_exported(strict: bool) -> None:
    mask = masks.causal()

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flex_attention(q, k, v, lambda s, b, h, q, kv: s * 2 + (q - kv), mask)

    q, k, v = torch.randn(3, 1, 2, 40, 8, dtype=torch.float64)
    exported = torch.export.export(Model(), (q, k, v), strict=strict)
    assert_close(exported.module()(q, k, v), Model()(q, k, v))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dropout_p": 2.0}, "dropout_p to be a number of at least 0"),
        ({"score_mod": lambda s, b, h, q, kv: q > kv}, "score_mod to return dtype torch.float32"),
    ],
)
def test_an_error_inside_of_a_graph_says_what_it_is_about(options, told) -> None:  # type: ignore[no-untyped-def]
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, **options)

    q, k, v = torch.randn(3, 1, 2, 8, 4)
    with pytest.raises(RuntimeError, match=told):
        torch.compile(model, backend="aot_eager", fullgraph=True)(q, k, v)
    with pytest.raises(FlexCPError, match=told):
        torch.compile(model, backend="aot_eager")(q, k, v)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0)])
def test_nothing_to_attend_to_or_with_in_a_mask_of_the_graph(q_len: int, kv_len: int) -> None:
    def model(q: Tensor, k: Tensor) -> Tensor:
        mask = create_block_mask(
            lambda b, h, q, kv: q >= kv, None, None, q.shape[2], k.shape[2], device="cpu"
        )
        return flex_attention(q, k, k, lambda s, b, h, q, kv: s * 2, mask)

    q = torch.randn(1, 2, q_len, 4, requires_grad=True)
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(q, torch.randn(1, 2, kv_len, 4))
    assert torch.equal(out, torch.zeros(1, 2, q_len, 4))
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0], torch.zeros_like(q))


def test_a_checkpoint_of_a_compiled_layer_runs_the_graph_that_it_ran_before() -> None:
    """Of one mask's own graph and that of all others: they keep other tensors for backward."""
    layers = [masks.causal(), masks.sliding_window(3), masks.sliding_window(9), masks.causal()]

    def layer(x: Tensor, mask: masks.Mask) -> Tensor:
        return flex_attention(x, x, x, lambda s, b, h, q, kv: s * (h + 1) / 2, mask)

    def run(layer) -> list[Tensor]:  # type: ignore[no-untyped-def]
        x = out = torch.randn(1, 2, 40, 8, dtype=torch.float64, requires_grad=True)
        for mask in layers:
            out = checkpoint(layer, out, mask, use_reentrant=False)
        return [out, *torch.autograd.grad(out.sum(), x)]

    counter = CompileCounterWithBackend("aot_eager")
    torch.manual_seed(0)
    wanted = run(layer)
    torch.manual_seed(0)
    for found, want in zip(run(torch.compile(layer, backend=counter)), wanted, strict=True):
        assert_close(found, want)
    assert counter.frame_count == 2
