"""The C++ kernel against the oracle in float64: every mask, type and part of the contract."""

from itertools import cycle

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import flexcp
from flexcp import FlexCPError, Mask, masks, testing
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.interface import causal_shapes, full_shapes
from flexcp.kernels.native.kernel import NativeKernel
from flexcp.kernels.native.library import TILE
from flexcp.kernels.reference import dense_attention
from flexcp.kernels.shapes import shapes_of
from flexcp.testing.tolerance import assert_close
from kernels.cases import MASKS, loss, problem, wide

FLOAT64 = torch.float64


@pytest.mark.parametrize(("name", "sizes"), [*zip(MASKS, cycle([(8, 8), (40, 24), (33, 5)]))])
def test_results_and_gradients_are_the_oracles(
    native: NativeKernel, name: str, sizes: tuple[int, int]
) -> None:
    mask, (dim, value_dim) = MASKS[name](), sizes
    p = problem(q_len=333, kv_len=411, dim=dim, value_dim=value_dim, dtype=torch.float32)
    exact = problem(q_len=333, kv_len=411, dim=dim, value_dim=value_dim)
    for own, other in zip(exact.inputs, p.inputs, strict=True):
        own.data.copy_(other.data)
    grid = flexcp.build_block_grid(mask, 333, 411, batch=2, heads=4)
    compiled = CompiledShapes(shapes_of(grid))
    expected = exact.expected(mask, scale=0.3)
    grads = torch.autograd.grad(loss(expected.out, expected.lse), exact.inputs, retain_graph=True)
    grad_out, grad_lse = torch.autograd.grad(
        loss(expected.out, expected.lse), (expected.out, expected.lse)
    )
    q, k, v = (x.detach() for x in p.inputs)
    found = native.forward(q, k, v, compiled, scale=0.3, max_scores=True)
    back = native.backward(
        grad_out.float(), q, k, v, found.out, found.lse, compiled, scale=0.3,
        grad_lse=grad_lse.float(),
    )  # fmt: skip
    assert_close(found.out, expected.out, dtype=torch.float32, what="out")
    assert_close(found.lse, expected.lse, dtype=torch.float32, what="lse")
    assert found.max_scores is not None
    assert_close(found.max_scores, expected.max_scores, dtype=torch.float32, what="largest")
    for what, actual, wanted in zip("qkv", (back.q, back.k, back.v), grads, strict=True):
        assert_close(actual, wanted, dtype=torch.float32, what=f"d{what}", factor=2)


@pytest.mark.parametrize(("heads", "kv_heads", "rows", "keys"), [
    (0, 2, 64, 64), (0, 0, 64, 64), (4, 2, 0, 64), (4, 2, 64, 0)
])  # fmt: skip
def test_nothing_is_computed_of_nothing(
    native: NativeKernel, heads: int, kv_heads: int, rows: int, keys: int
) -> None:
    q = torch.randn(1, heads, rows, 8)
    k, v = torch.randn(2, 1, kv_heads, keys, 8)
    compiled = CompiledShapes(full_shapes(rows, keys))
    found = native.forward(q, k, v, compiled, scale=1.0)
    assert not found.out.any()
    back = native.backward(
        torch.ones_like(found.out), q, k, v, found.out, found.lse, compiled, scale=1.0
    )
    for x, of in ((back.q, q), (back.k, k), (back.v, v)):
        assert x.shape == of.shape
        assert not x.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["causal", "window", "documents", "full"])
def test_half_types_are_computed_in_float32(
    native: NativeKernel, name: str, dtype: torch.dtype
) -> None:
    if dtype not in native.library.dtypes:
        pytest.skip(f"the compiler does not know {dtype}")
    mask = MASKS[name]()
    p = problem(batch=1, heads=4, kv_heads=2, q_len=500, dim=16, dtype=dtype)
    exact = wide(*p.inputs)
    allowed = flexcp.kernels.interface.allowed_pairs(shapes_of(flexcp.build_block_grid(mask, 500)))
    expected = dense_attention(*exact, allowed=allowed[None, None])
    grad_out = torch.randn_like(expected.out).to(dtype)
    grads = torch.autograd.grad(expected.out, exact, grad_out.to(FLOAT64))
    compiled = CompiledShapes(shapes_of(flexcp.build_block_grid(mask, 500)))
    q, k, v = (x.detach() for x in p.inputs)
    found = native.forward(q, k, v, compiled, scale=0.25)
    back = native.backward(grad_out, q, k, v, found.out, found.lse, compiled, scale=0.25)
    assert_close(found.out, expected.out, dtype=torch.float32, what="out")
    for what, actual, wanted in zip("qkv", (back.q, back.k, back.v), grads, strict=True):
        assert_close(actual, wanted, dtype=torch.float32, what=f"d{what}", factor=2)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 40.0])
def test_scales_may_be_negative_zero_or_large(scale: float) -> None:
    q, k, v = (torch.randn(1, 2, 150, 8, requires_grad=True) for _ in range(3))
    options = {"kernel": "native"}
    out = flexcp.flex_attention(
        q, k, v, block_mask=masks.causal(), scale=scale, kernel_options=options
    )
    exact = wide(q, k, v)
    right = dense_attention(
        *exact, allowed=torch.ones(1, 1, 150, 150, dtype=torch.bool).tril(), scale=scale
    ).out
    factor = max(1.0, abs(scale)) * 4
    assert_close(out, right, dtype=torch.float32, factor=factor)
    grad = torch.randn_like(out)
    found, wanted = (
        torch.autograd.grad(x, of, grad.to(x.dtype)) for x, of in ((out, (q, k, v)), (right, exact))
    )
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, dtype=torch.float32, factor=factor)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_dropout_drops_what_the_oracle_drops(native: NativeKernel, kv_heads: int) -> None:
    dropout = Dropout(0.3, 1234, first_batch=2, first_head=5)
    mask = MASKS["documents"]()
    q, k, v = (torch.randn(2, h, 300, 8) for h in (4, kv_heads, kv_heads))
    exact = wide(q, k, v)
    grid = flexcp.build_block_grid(mask, 300)
    shapes = shapes_of(grid)
    expected = dense_attention(
        *exact, allowed=flexcp.kernels.interface.allowed_pairs(shapes)[None, None], dropout=dropout
    )
    grad_out = torch.randn(expected.out.shape)
    grads = torch.autograd.grad(expected.out, exact, grad_out.to(FLOAT64))
    compiled = CompiledShapes(shapes)
    found = native.forward(q, k, v, compiled, scale=8**-0.5, dropout=dropout)
    back = native.backward(
        grad_out, q, k, v, found.out, found.lse, compiled, scale=8**-0.5, dropout=dropout
    )
    assert_close(found.out, expected.out, dtype=torch.float32)
    assert_close(found.lse, expected.lse, dtype=torch.float32)
    for actual, wanted in zip((back.q, back.k, back.v), grads, strict=True):
        assert_close(actual, wanted, dtype=torch.float32, factor=2)


@pytest.mark.parametrize("what", ["q", "k", "v", "grad_out"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_with_those_who_may_see_it(what: str, poison: float) -> None:
    """No pair that the mask forbids carries it on, wherever documents begin."""
    lengths, bad = [70, 45, 130, 55], 90  # in the second document
    mask = masks.causal() & masks.document(lengths=lengths)
    tensors = {name: torch.randn(1, 2, 300, 8) for name in ("q", "k", "v", "grad_out")}

    def run() -> list[Tensor]:
        q, k, v = (tensors[name].clone().requires_grad_() for name in "qkv")
        out = flexcp.flex_attention(q, k, v, block_mask=mask, kernel_options={"kernel": "native"})
        return [out, *torch.autograd.grad(out, (q, k, v), tensors["grad_out"])]

    clean = run()
    tensors[what][:, :, bad] = poison
    own = torch.zeros(300, dtype=torch.bool)
    own[70:115] = True
    spoilt = run()
    for before, after in zip(clean, spoilt, strict=True):
        assert_close(after[:, :, ~own], before[:, :, ~own], dtype=torch.float32)
    assert any(not bool(x.isfinite().all()) for x in spoilt)


def test_lengths_of_nothing_are_no_trouble(native: NativeKernel) -> None:
    for q_len, kv_len, heads in ((0, 5, 2), (5, 0, 2), (5, 5, 0)):
        q = torch.randn(1, heads, q_len, 4)
        k, v = (torch.randn(1, heads, kv_len, 4) for _ in range(2))
        compiled = CompiledShapes(flexcp.kernels.interface.full_shapes(q_len, kv_len))
        found = native.forward(q, k, v, compiled, scale=1.0)
        assert (found.out == 0).all() or kv_len
        back = native.backward(q, q, k, v, found.out, found.lse, compiled, scale=1.0)
        assert back.k.shape == k.shape
        assert (back.q == 0).all() or kv_len


def test_strided_and_expanded_tensors_are_read_as_they_are(native: NativeKernel) -> None:
    q, k, v = (torch.randn(1, h, 200, 12) for h in (4, 2, 2))
    compiled = CompiledShapes(causal_shapes(200))
    plain = native.forward(q, k, v, compiled, scale=0.4)
    every_second = torch.stack([q, q + 1], -1)[..., 0]
    in_rows = k.transpose(1, 2).contiguous().transpose(1, 2)
    found = native.forward(every_second, in_rows, v, compiled, scale=0.4)
    assert torch.equal(found.out, plain.out)
    one = k[:, :1].expand(-1, 2, -1, -1)
    assert torch.equal(
        native.forward(q, one, v, compiled, scale=0.4).out,
        native.forward(q, one.contiguous(), v, compiled, scale=0.4).out,
    )


@pytest.mark.parametrize("which", ["q", "k", "v", "grad_out"])
def test_tensors_that_are_negated_when_they_are_read_are_negated(which: str) -> None:
    lazily = torch.complex(torch.randn(1, 2, 100, 16), torch.randn(1, 2, 100, 16)).conj().imag
    assert lazily.is_neg()

    def run(x: Tensor) -> list[Tensor]:
        given = {name: torch.ones(1, 2, 100, 16).cumsum(2) / 100 for name in ("q", "k", "v")}
        given["grad_out"] = torch.ones(1, 2, 100, 16)
        given[which] = x
        q, k, v = (given[name].detach().requires_grad_() for name in "qkv")
        out = flexcp.flex_attention(q, k, v, kernel_options={"kernel": "native"})
        return [out, *torch.autograd.grad(out, (q, k, v), given["grad_out"])]

    for actual, wanted in zip(run(lazily), run(lazily.resolve_neg()), strict=True):
        assert torch.equal(actual, wanted)


def test_recorded_operators_are_those_of_another_kernel() -> None:
    x = torch.randn(1, 2, 64, 8)

    def call(q: Tensor) -> Tensor:
        return flexcp.flex_attention(q, x, x, kernel_options={"kernel": "native"})

    with pytest.raises(FlexCPError, match="operators are being recorded"):
        make_fx(call)(x)


def test_sums_over_many_tiles_keep_their_small_terms(native: NativeKernel) -> None:
    length = 50_000
    q, k = torch.zeros(1, 1, 32, 8), torch.zeros(1, 1, length, 8)
    v = torch.full((1, 1, length, 8), 0.3)
    compiled = CompiledShapes(flexcp.kernels.interface.full_shapes(32, length))
    found = native.forward(q, k, v, compiled, scale=1.0)
    assert_close(found.out, torch.full_like(found.out, 0.3).double(), dtype=torch.float32)
    turned = CompiledShapes(flexcp.kernels.interface.full_shapes(length, 32))
    back = native.backward(
        v, k, q, q, torch.zeros_like(v), torch.zeros(1, 1, length), turned, scale=1.0
    )
    assert_close(back.v, torch.full_like(q, 0.3 * length).double(), dtype=torch.float32, factor=4)


def test_keys_that_no_query_sees_are_not_even_read(native: NativeKernel) -> None:
    """Their memory is never written either: what was not packed is not multiplied."""
    length = 5 * TILE
    mask = Mask(lambda b, h, q, kv: (kv >= 2 * TILE) & (kv < 3 * TILE))
    compiled = CompiledShapes(shapes_of(flexcp.build_block_grid(mask, length)))
    q, k, v = (torch.randn(1, 1, length, 8) for _ in range(3))
    before = native.forward(q, k, v, compiled, scale=1.0)
    for x in (k, v):
        x[:, :, : 2 * TILE] = torch.nan
        x[:, :, 3 * TILE :] = torch.nan
    after = native.forward(q, k, v, compiled, scale=1.0)
    assert torch.equal(before.out, after.out)
    back = native.backward(q, q, k, v, after.out, after.lse, compiled, scale=1.0)
    assert all(bool(x.isfinite().all()) for x in (back.q, back.k, back.v))


@pytest.mark.parametrize("schedule", ["exchange", "ring", "allgather"])
def test_ranks_have_what_one_process_has(schedule: str) -> None:
    mask = masks.causal() & masks.document(lengths=[301, 40, 159])
    x = [torch.randn(1, h, 500, 16) for h in (4, 2, 2, 4)]

    def rank(mesh: object) -> list[Tensor]:
        plan = flexcp.make_plan(
            mask, 500, mesh, schedule=schedule, num_heads=4, num_kv_heads=2, head_dim=16,
            dtype=torch.float32,
        )  # fmt: skip
        q, k, v, grad = (plan.shard(t, 2).clone().requires_grad_() for t in x)
        out = flexcp.attention(q, k, v, plan, kernel="native")
        grads = torch.autograd.grad(out, (q, k, v), grad)
        return [plan.unshard(t.detach(), 2) for t in (out, *grads)]

    exact = wide(*x[:3])
    allowed = mask.mask_mod(*(torch.zeros(1, 1, 1, 1, dtype=torch.int64),) * 2,
                            torch.arange(500)[:, None], torch.arange(500))  # fmt: skip
    right = dense_attention(*exact, allowed=allowed).out
    wanted = [right, *torch.autograd.grad(right, exact, x[3].to(FLOAT64))]
    for found in testing.simulate(rank, 3):
        for actual, want in zip(found, wanted, strict=True):
            assert_close(actual, want, dtype=torch.float32, factor=2)


def test_what_it_cant_do_is_refused_by_name() -> None:
    x = torch.randn(1, 2, 64, 8)
    with pytest.raises(FlexCPError, match="it does not take torch\\.float64"):
        flexcp.flex_attention(*(x.double(),) * 3, kernel_options={"kernel": "native"})
