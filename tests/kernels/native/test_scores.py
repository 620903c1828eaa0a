"""Score functions in the C++ kernel: attention beside the oracle, and what is compiled when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import flexcp
from flexcp import FlexCPError, Mask, masks, testing
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.interface import full_shapes
from flexcp.kernels.native import build, scores
from flexcp.kernels.native.build import built
from flexcp.kernels.native.kernel import NativeKernel
from flexcp.kernels.native.library import load
from flexcp.kernels.native.scores import TILE, CompiledScore, compiled_score
from flexcp.kernels.reference import dense_attention, dense_mask
from flexcp.kernels.refusals import FEWEST_SCORES
from flexcp.kernels.registry import choose, explain
from flexcp.kernels.score import ScoreMod, examine
from flexcp.kernels.shapes import shapes_of
from flexcp.testing.tolerance import assert_close
from kernels.cases import MASKS
from kernels.native.test_score_source import on_a_tile
from kernels.score_cases import ARITHMETIC

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
CPU = torch.device("cpu")
NATIVE = {"kernel": "native"}
Function = Callable[..., Tensor]


TABLE = torch.randn(4, 1000, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
SLOPES = torch.rand(8, generator=torch.Generator().manual_seed(4))[::2]
STARTS = torch.arange(500) // 90


def mixed(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """ALiBi, a cap, documents by -inf with a square, and biases by distance, by head."""
    alibi, capped = s - SLOPES[h] * (q - k).abs() * (b + 0.5), 2.0 * torch.tanh(s / 2.0)
    alone = (STARTS[q] == STARTS[k]) & (STARTS[q] != 1)
    squared = torch.where(alone, s + 0.3 * s * s, -torch.inf)
    biased = s + TABLE[h, q - k].to(s.dtype)
    return torch.where(
        h == 0, alibi, torch.where(h == 1, capped, torch.where(h == 2, squared, biased))
    )


def inputs(q_len: int, kv_len: int, batch: int = 2) -> list[Tensor]:
    sizes = ((4, q_len, 24), (2, kv_len, 24), (2, kv_len, 9), (4, q_len, 9))
    return [torch.randn(batch, *size) for size in sizes]


def expected(
    tensors: Sequence[Tensor], mask: Mask, function: Function, dropout: Dropout | None = None
) -> list[Tensor]:
    q, k, v = (x.detach().double().requires_grad_() for x in tensors[:3])
    at = (torch.arange(q.shape[2]), torch.arange(k.shape[2]))
    allowed = dense_mask(mask.mask_mod, *at, batch=q.shape[0], heads=4)
    found = dense_attention(
        q, k, v, allowed=allowed, score_mod=function, scale=0.3, dropout=dropout
    )
    grads = torch.autograd.grad(found.out, (q, k, v), tensors[3].double())
    return [found.out, found.lse, *grads]


def computed(
    kernel: NativeKernel, tensors: Sequence[Tensor], mask: Mask, function: Function,
    dropout: Dropout | None = None,
) -> list[Tensor]:  # fmt: skip
    q, k, v, grad = tensors
    mod = examine(function, torch.float32, CPU)
    grid = flexcp.build_block_grid(mask, q.shape[2], k.shape[2], batch=q.shape[0], heads=4)
    compiled = CompiledShapes(shapes_of(grid))
    given = {"scale": 0.3, "score_mod": mod, "dropout": dropout}
    found = kernel.forward(q, k, v, compiled, **given)
    back = kernel.backward(grad, q, k, v, found.out, found.lse, compiled, **given)
    return [found.out, found.lse, back.q, back.k, back.v]


@pytest.mark.parametrize("name", ["causal", "documents", "noise", "by head", "fully masked rows"])
def test_attention_and_its_gradients_are_the_oracles(native: NativeKernel, name: str) -> None:
    given, mask = inputs(333, 411), MASKS[name]()
    found = computed(native, given, mask, mixed)
    for actual, wanted in zip(found, expected(given, mask, mixed), strict=True):
        assert_close(actual, wanted, dtype=torch.float32, factor=2)
    for first, second in zip(found, computed(native, given, mask, mixed), strict=True):
        assert torch.equal(first, second)


def test_dropout_is_after_the_score_function(native: NativeKernel) -> None:
    given, mask, dropout = inputs(200, 200), masks.causal(), Dropout(0.3, 5)
    found = computed(native, given, mask, mixed, dropout)
    for actual, wanted in zip(found, expected(given, mask, mixed, dropout), strict=True):
        assert_close(actual, wanted, dtype=torch.float32, factor=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_half_types_are_float32(native: NativeKernel, dtype: torch.dtype) -> None:
    if dtype not in native.library.dtypes:
        pytest.skip("the compiler does not know it")
    given = [x.to(dtype) for x in inputs(130, 130)]
    found = computed(native, given, masks.causal(), mixed)
    for actual, wanted in zip(found, expected(given, masks.causal(), mixed), strict=True):
        assert_close(actual, wanted, dtype=torch.float32, factor=4)


@pytest.mark.parametrize("width", [4, 16])
def test_vectors_of_every_width_give_the_same_scores(native: NativeKernel, width: int) -> None:
    flags = (f"-DFLEXCP_WIDTH={width}",)
    other = NativeKernel(load(built(extra=flags), flags))
    given, mask = inputs(200, 130), MASKS["documents"]()
    pairs = zip(*(computed(kernel, given, mask, mixed) for kernel in (other, native)), strict=True)
    for actual, wanted in pairs:
        assert_close(actual, wanted, factor=2)


@pytest.mark.parametrize("schedule", ["exchange", "ring", "allgather"])
def test_ranks_see_global_positions(schedule: str) -> None:
    mask, tensors = masks.causal() & masks.document(lengths=[301, 40, 109]), inputs(450, 450, 1)

    def rank(mesh: object) -> list[Tensor]:
        plan = flexcp.make_plan(
            mask, 450, mesh, schedule=schedule, num_heads=4, num_kv_heads=2, head_dim=24,
            dtype=torch.float32,
        )  # fmt: skip
        q, k, v, grad = (plan.shard(t, 2).clone().requires_grad_() for t in tensors)
        out, lse = flexcp.attention(
            q, k, v, plan, score_mod=mixed, scale=0.3, return_lse=True, kernel="native"
        )
        grads = torch.autograd.grad(out, (q, k, v), grad)
        return [plan.unshard(t.detach(), 2) for t in (out, lse, *grads)]

    wanted = expected(tensors, mask, mixed)
    for found in testing.simulate(rank, 3):
        for actual, want in zip(found, wanted, strict=True):
            assert_close(actual, want, dtype=torch.float32, factor=2)


def wild(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Not finite where the query is before the key, and neither is its derivative."""
    return s + torch.log((q - k).float()) + s / (q - k + 1) ** 0.5


def tame(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The same where the query is after the key."""
    apart = (q - k).clamp(min=1)
    return s + torch.log(apart.float()) + s / (apart + 1) ** 0.5


def test_what_is_not_finite_at_forbidden_pairs_stays_there(native: NativeKernel) -> None:
    mask, given = Mask(lambda b, h, q, kv: q > kv), inputs(150, 150)
    found = computed(native, given, mask, wild)
    assert all(bool(x.isfinite().all()) for x in (found[0], *found[2:]))
    for actual, wanted in zip(found, expected(given, mask, tame), strict=True):
        assert_close(actual, wanted, dtype=torch.float32, factor=2)
    open_to_all = computed(native, given, masks.full(), wild)
    assert open_to_all[0].isnan().any()


def test_rows_that_a_function_leaves_nothing_give_nothing(native: NativeKernel) -> None:
    given = inputs(150, 150)
    out, lse, dq, *_ = computed(native, given, masks.causal(), mixed)
    rows = STARTS[:150] == 1  # `mixed` makes all of them -inf, for the third head
    assert (lse[:, 2, rows] == -torch.inf).all()
    assert (out[:, 2, rows] == 0).all()
    assert (dq[:, 2, rows] == 0).all()
    assert lse[:, 2, ~rows].isfinite().all()


def test_an_index_outside_of_its_tensor_makes_the_score_nan(native: NativeKernel) -> None:
    short, empty = torch.randn(100), torch.randn(0, 4)
    mask, given = masks.causal(), inputs(150, 150)
    out, *_ = computed(native, given, mask, lambda s, b, h, q, k: s + short[q])
    assert out[:, :, 100:].isnan().all()
    assert out[:, :, :100].isfinite().all()
    out, *_ = computed(native, given, mask, lambda s, b, h, q, k: s + short[q - k])
    assert out[:, :, 100:].isnan().all()
    assert out[:, :, :100].isfinite().all()
    found = on_a_tile(
        examine_on_empty(empty), 0, torch.randn(TILE, TILE), torch.randn(TILE, TILE),
        torch.arange(TILE), torch.arange(TILE),
    )  # fmt: skip
    assert found[0].isnan().all()


def examine_on_empty(empty: Tensor) -> ScoreMod:
    """A function that was looked at while its tensor had elements."""
    table = torch.randn(2, 4)
    mod = examine(lambda s, b, h, q, k: s + table[q, h], torch.float32, CPU)
    table.set_(empty)
    return mod


def test_positions_that_take_more_bits_are_refused(native: NativeKernel) -> None:
    far = replace(full_shapes(40, 40), q_positions=torch.arange(40) + 2**30)
    x, mod = torch.randn(1, 1, 40, 8), examine(mixed, torch.float32, CPU)
    with pytest.raises(FlexCPError, match=r"positions below 1,073,740,800.*ask for .*'scored'"):
        native.forward(x, x, x, CompiledShapes(far), scale=1.0, score_mod=mod)


def test_the_largest_scores_are_those_that_are_used() -> None:
    q, k, v, _ = inputs(130, 130)

    def run(kernel: str) -> object:
        return flexcp.flex_attention(
            q, k, v, score_mod=mixed, enable_gqa=True, kernel_options={"kernel": kernel},
            return_aux=AuxRequest(lse=True, max_scores=True),
        )[1]  # fmt: skip

    found, right = run("native"), run("scored")
    assert_close(found.max_scores, right.max_scores)
    assert_close(found.lse, right.lse)


def test_numbers_and_tensors_are_no_part_of_what_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def code(cap: float, window: int, size: int) -> object:
        table = torch.randn(size)
        mod = examine(
            lambda s, b, h, q, k: torch.where(q - k < window, cap * s, s + table[k]),
            torch.float32, CPU,
        )  # fmt: skip
        return compiled_score(mod, ())

    first = code(20.0, 77, 10)
    monkeypatch.setattr(scores, "built", None)
    assert code(-3.5, 2000, 999) is first


def test_a_damaged_file_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mod = examine(lambda s, b, h, q, k: s * 2.5 + 0.125, torch.float32, CPU)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    scores._loaded.cache_clear()
    source = scores._source(mod)
    assert not isinstance(source, str)
    key = build._key(build.compiler(), build._OF_SCORES, source.text)
    damaged = tmp_path / "flexcp" / "native" / f"score-{key}.so"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"damaged")
    assert isinstance(compiled_score(mod, ()), CompiledScore)
    scores._loaded.cache_clear()


def test_what_cant_be_compiled_is_said() -> None:
    mod = examine(lambda s, b, h, q, k: s * 3.25, torch.float32, CPU)
    assert "could not be compiled: " in str(compiled_score(mod, ("-include", "not there")))


def test_indices_that_wrap_around_count_from_the_end_as_torchs_do() -> None:
    x, buckets = torch.randn(3, 1, 2, 130, 8), torch.randn(64)

    def hashed(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + buckets[(((q - k * 3).abs() * 0x1E3779B97F4A7C15) >> 30) >> 28]

    found, wanted = (
        flexcp.flex_attention(*x, score_mod=hashed, kernel_options={"kernel": kernel})
        for kernel in ("native", "reference")
    )
    assert_close(found, wanted, factor=2)


def test_the_least_whole_number_stays_outside_of_a_tensor() -> None:
    """It is what -inf becomes as a whole number, and its own negative."""
    x, table, factors = torch.randn(3, 1, 2, 130, 8), torch.randn(64), torch.ones(130)
    factors[5] = torch.inf

    def by_score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        part = (-s * s * factors[q]).long()
        return s + table[torch.where(h == 0, part.abs(), -part.clamp(max=0)).clamp(max=31)]

    out = flexcp.flex_attention(*x, score_mod=by_score, kernel_options=NATIVE)
    assert out[:, :, 5].isnan().all()
    assert out[:, :, 6:].isfinite().all()


@pytest.mark.parametrize(
    ("what", "function"),
    [
        ("the operation 'i0'", lambda s, b, h, q, k: torch.special.i0(s)),
        ("by what may be 0", ARITHMETIC["a divisor that is not known"]),
        ("'index', which does not act on each", lambda s, b, h, q, k: s + TABLE[h, :3].sum()),
    ],
)
def test_what_is_not_known_is_named_and_strips_do_it(what: str, function: Function) -> None:
    x = torch.randn(1, 2, 64, 8)
    with pytest.raises(FlexCPError, match=what):
        flexcp.flex_attention(x, x, x, score_mod=function, kernel_options=NATIVE)
    large = torch.empty(1, 4, 2048, 8).expand(1, 4, 2048, 8)
    assert what in explain(large, large, score_mod=function)
    assert choose(large, large, score_mod=function).kernel == "scored"


def test_small_calls_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 4, 200, 16)
    large = torch.empty(1, 4, 2048, 16)
    assert choose(large, large, score_mod=mixed).kernel == "native"
    assert "written out in C++" in explain(large, large, score_mod=mixed)
    few = choose(large, large, score_mod=mixed, scores=lambda: FEWEST_SCORES - 1)
    assert few.kernel == "scored"
    assert "16,777,216 scores are worth compiling" in str(few)
    monkeypatch.setattr(scores, "built", None)
    assert choose(x, x, score_mod=lambda s, b, h, q, k: s.cos() * 2).kernel == "scored"
    out = flexcp.flex_attention(x, x, x, score_mod=lambda s, b, h, q, k: s.cos() * 2)
    assert out.shape == x.shape
