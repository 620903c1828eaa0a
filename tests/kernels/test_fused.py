"""The fused ops: the CPU op on numbers, the CUDA ops on shapes, types and signatures."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flexcp
from flexcp import masks
from flexcp.kernels import flash
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.flex import flex_forward
from flexcp.kernels.fused import CPU_FLASH, CUDA_CUDNN, CUDA_EFFICIENT, CUDA_FLASH, FusedOp
from flexcp.kernels.interface import Plane, Shapes, Slab, allowed_pairs, causal_shapes
from flexcp.kernels.reference import dense_attention
from flexcp.testing.tolerance import assert_close
from kernels.cases import Problem, loss, problem


@pytest.mark.parametrize("dim", [1, 3, 17, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_cpu_op_is_exact_on_rectangles_of_any_head_dim(dim: int, dtype: torch.dtype) -> None:
    p = problem(batch=1, heads=4, kv_heads=2, q_len=70, kv_len=130, dim=dim, dtype=dtype)
    wide = Problem(*(x.detach().double().requires_grad_() for x in p.inputs))
    expected = wide.expected(None, scale=0.1)
    q, k, v = (x.detach() for x in p.inputs)
    out, lse = CPU_FLASH.forward(q, k, v, 0.1)
    assert_close(out, expected.out)
    assert_close(lse, expected.lse)
    grad_out = torch.autograd.grad(loss(expected.out), expected.out)[0].to(dtype)
    grads = torch.autograd.grad(expected.out, wide.inputs, grad_out.double())
    for found, wanted in zip(
        CPU_FLASH.backward(grad_out, q, k, v, out, lse, 0.1), grads, strict=True
    ):
        assert_close(found, wanted)


@pytest.mark.parametrize("op", [CUDA_FLASH, CUDA_EFFICIENT, CUDA_CUDNN], ids=lambda op: op.name)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_cuda_ops_take_and_return_what_the_contract_says(op: FusedOp, kv_heads: int) -> None:
    with FakeTensorMode():
        q = torch.empty(2, 4, 100, 64, dtype=torch.bfloat16, device="cuda")
        k, v = (
            torch.empty(2, kv_heads, 300, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)
        )
        assert op.refuses(q, v) is None
        out, lse = op.forward(q, k, v, 0.125)
        assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.bfloat16, "cuda")
        assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
        for x, grad in zip((q, k, v), op.backward(out, q, k, v, out, lse, 0.125), strict=True):
            assert (grad.shape, grad.dtype, grad.device.type) == (x.shape, x.dtype, "cuda")


@pytest.mark.parametrize(
    ("has", "multiplies"),
    [
        ({"architecture": "x86_64", "avx512_f": True, "avx512_bf16": False}, False),
        ({"architecture": "x86_64", "avx512_f": True, "avx512_bf16": True}, True),
        ({"architecture": "x86_64", "amx_bf16": True}, True),
        ({"architecture": "aarch64"}, True),
    ],
    ids=["AVX-512 alone", "AVX-512 with products", "AMX", "another kind, as oneDNN says"],
)
def test_a_processor_multiplies_a_type_only_by_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, has: dict[str, object], multiplies: bool
) -> None:
    """Without them oneDNN says that it does, but converts, slower than to float32 beforehand."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert CPU_FLASH.multiplies.__wrapped__(torch.bfloat16) == multiplies  # type: ignore[attr-defined]


@pytest.mark.parametrize("has_products", [True, False])
def test_a_type_without_products_is_computed_with_in_float32(has_products: bool) -> None:
    seen = set()

    def backward(*given):  # type: ignore[no-untyped-def]
        seen.update(x.dtype for x in given[:5])
        return CPU_FLASH.backward_mode(causal=True)(*given)

    op = replace(
        CPU_FLASH,
        causal_backward=backward,
        multiplies=lambda _: has_products,
        causal_rows=lambda _: 1024,
    )
    compiled = CompiledShapes(causal_shapes(2048))
    p = problem(batch=1, heads=2, kv_heads=1, q_len=2048, dim=8, dtype=torch.bfloat16)
    q, k, v = (x.detach() for x in p.inputs)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    dense = dense_attention(*wide, allowed=torch.ones(2048, 2048, dtype=torch.bool).tril())
    found = flash.forward(q, k, v, compiled, scale=8**-0.5, fused=op)
    back = flash.backward(q, q, k, v, found.out, found.lse, compiled, scale=8**-0.5, fused=op)
    assert seen == {torch.bfloat16 if has_products else torch.float32}
    for actual, wanted in zip(
        (back.q, back.k, back.v), torch.autograd.grad(dense.out, wide, q.double()), strict=True
    ):
        assert_close(actual, wanted, dtype=torch.bfloat16, factor=2)


@pytest.mark.parametrize("by_mode", [True, False])
@pytest.mark.parametrize("size", [0.1, 1.5, 30.0])
def test_triangles_are_exact_by_mode_or_cut_whether_scores_are_small_or_large(
    by_mode: bool, size: float
) -> None:
    """Small ones are added up, with what rectangles found; others merged, to the base 2 or e."""
    op = CPU_FLASH if by_mode else replace(CPU_FLASH, causal_forward=None, causal_backward=None)
    compiled = CompiledShapes(causal_shapes(1700))
    p = problem(batch=1, heads=2, kv_heads=1, q_len=1700, dim=8, dtype=torch.float32)
    q, k, v = (x.detach() * scale for x, scale in zip(p.inputs, (size, size, 1), strict=True))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    dense = dense_attention(*wide, allowed=torch.ones(1700, 1700, dtype=torch.bool).tril())
    found = flash.forward(q, k, v, compiled, scale=8**-0.5, fused=op)
    back = flash.backward(v.repeat(1, 2, 1, 1), q, k, v, found.out, found.lse, compiled,
                          scale=8**-0.5, fused=op)  # fmt: skip
    assert_close(found.out, dense.out, dtype=torch.float32, factor=max(1.0, size))
    assert_close(found.lse, dense.lse, dtype=torch.float32)
    grads = torch.autograd.grad(dense.out, wide, v.double().repeat(1, 2, 1, 1))
    for actual, wanted in zip((back.q, back.k, back.v), grads, strict=True):
        assert_close(actual, wanted, dtype=torch.float32, factor=max(1.0, size) ** 2)


@pytest.mark.parametrize("size", [1.0, 60.0])
@pytest.mark.parametrize("rows", [(0, 1024), (1024, 2048)], ids=["the same rows", "other rows"])
def test_strips_are_exact_beside_rectangles_whose_scores_are_larger(
    rows: tuple[int, int], size: float
) -> None:
    """Where both are in a row, its sums have to hold the scores of both."""
    slabs = (Slab(0, 1024, 1024, 1025, 0, 1), Slab(*rows, 0, 1024))
    shapes = Shapes(2048, 2048, ((0,),), (Plane(slabs),))
    p = problem(batch=1, heads=2, kv_heads=2, q_len=2048, dim=8, dtype=torch.float32)
    q, k, v = (x.detach() for x in p.inputs)
    k[:, :, :1024] *= size
    op = replace(CPU_FLASH, causal_forward=None, causal_backward=None)
    found = flash.forward(q, k, v, CompiledShapes(shapes), scale=8**-0.5, fused=op)
    wide = (x.double() for x in (q, k, v))
    dense = dense_attention(*wide, allowed=allowed_pairs(shapes), scale=8**-0.5)
    assert_close(found.out, dense.out, dtype=torch.float32, what="out", factor=size)
    assert_close(found.lse, dense.lse, dtype=torch.float32, what="lse")


BANDS = {
    "all rows and keys": (Slab(0, 256, 0, 300, 1, 1),),
    "rows left over, and a rectangle": (Slab(5, 300, 0, 90, 1, 1), Slab(5, 300, 400, 500)),
    "narrow": (Slab(0, 300, 10, 75, 1, 1),),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BANDS)
def test_bands_are_computed_as_a_batch_of_blocks_of_rows(name: str, dtype: torch.dtype) -> None:
    slabs = BANDS[name]
    q_len, kv_len = max(s.q1 for s in slabs), 555
    shapes = Shapes(q_len, kv_len, ((0,),), (Plane(slabs),))
    compiled = CompiledShapes(shapes)
    program = compiled.program(0, fused=True, causal_rows=1024, bands=True)
    assert any(piece.blocks > 1 for piece in program.pieces)
    p = problem(batch=2, heads=4, kv_heads=2, q_len=q_len, kv_len=kv_len, dim=8, dtype=dtype)
    q, k, v = (x.detach() for x in p.inputs)
    found = flash.forward(q, k, v, compiled, scale=8**-0.5, fused=CPU_FLASH)
    wide = (x.double() for x in (q, k, v))
    dense = dense_attention(*wide, allowed=allowed_pairs(shapes), scale=8**-0.5)
    assert_close(found.out, dense.out, dtype=dtype, what="out")
    assert_close(found.lse, dense.lse, dtype=dtype, what="lse")


def test_bands_of_keys_whose_elements_are_no_neighbours_copy_each_key_once(monkeypatch) -> None:
    copied = []
    contiguous = torch.Tensor.contiguous
    monkeypatch.setattr(
        torch.Tensor, "contiguous", lambda x: copied.append(x.numel()) or contiguous(x)
    )
    slabs = (Slab(0, 256, 0, 300, 1, 1),)
    shapes = Shapes(256, 555, ((0,),), (Plane(slabs),))
    p = problem(batch=1, heads=2, kv_heads=2, q_len=256, kv_len=555, dim=8, dtype=torch.float32)
    q, k, v = (x.detach().mT.contiguous().mT for x in p.inputs)
    copied.clear()
    found = flash.forward(q, k, v, CompiledShapes(shapes), scale=8**-0.5, fused=CPU_FLASH)
    assert copied == [q.numel(), k.numel(), v.numel()]
    wide = (x.double() for x in (q, k, v))
    dense = dense_attention(*wide, allowed=allowed_pairs(shapes), scale=8**-0.5)
    assert_close(found.out, dense.out, dtype=torch.float32, what="out")


def test_strips_run_on_any_device_that_torch_has() -> None:
    compiled = CompiledShapes(causal_shapes(700))
    q, k = (torch.empty(1, heads, 700, 64, dtype=torch.float16, device="meta") for heads in (4, 2))
    found = flash.forward(q, k, k, compiled, scale=0.125, fused=None)
    assert (found.out.shape, found.out.dtype) == (q.shape, torch.float32)
    grads = flash.backward(
        found.out.half(), q, k, k, found.out, found.lse, compiled, scale=0.125, fused=None
    )
    assert (grads.k.shape, grads.k.device.type) == (k.shape, "meta")


def test_what_an_op_cant_take_is_said() -> None:
    cpu = torch.zeros(1, 1, 4, 300)
    assert CUDA_FLASH.refuses(cpu, cpu) == "CUDA flash runs on cuda, not on cpu"
    with FakeTensorMode():
        wide = torch.empty(1, 1, 4, 300, device="cuda")
        assert CUDA_FLASH.refuses(wide, wide) == "CUDA flash does not take torch.float32"
        assert CUDA_FLASH.refuses(wide.half(), wide.half()) == (
            "CUDA flash takes head dims up to 256"
        )


def test_the_flex_kernel_hands_torch_the_mask_the_positions_and_the_sinks() -> None:
    """On torch's eager FlexAttention, which has the compiled one's signature."""
    from torch.nn.attention.flex_attention import flex_attention as eager

    def attend(*arguments, **keywords):  # type: ignore[no-untyped-def]
        out, lse = eager(*arguments[:7], return_lse=True)
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse)

    def score_mod(score, b, h, q, kv):  # type: ignore[no-untyped-def]
        return score + 0.01 * q - 0.02 * kv

    p = problem(q_len=128, kv_len=256, dtype=torch.float32, sinks=True)
    q, k, v, sinks = (x.detach() for x in p.inputs)
    grid = flexcp.build_block_grid(masks.causal(), 256).window(rows=range(1, 2))
    out, lse, _ = flex_forward(
        q, k, v, grid, scale=0.3, score_mod=score_mod, sinks=sinks, attend=attend
    )
    rows, keys = torch.arange(128, 256), torch.arange(256)
    expected = dense_attention(
        q, k, v, allowed=rows[:, None] >= keys, score_mod=score_mod, sinks=sinks, scale=0.3,
        q_positions=rows, kv_positions=keys,
    )  # fmt: skip
    assert_close(out, expected.out)
    assert_close(lse, expected.lse)
