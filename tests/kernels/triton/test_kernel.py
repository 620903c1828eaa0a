"""The Triton kernels in Triton's interpreter, against the oracle in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp import Mask
from flexcp.kernels import Kernel
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.flash import FlashKernel
from flexcp.kernels.interface import causal_shapes, full_shapes
from flexcp.kernels.triton.kernel import TritonKernel
from flexcp.kernels.triton.tuning import INTERPRETER
from kernels.cases import MASKS
from kernels.triton.comparison import APART, SMALL, Sizes, assert_exact, errors


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_gives_the_oracles_results_and_gradients(name: str) -> None:
    batch = 2 if "batch" in name else 1
    sizes = Sizes(batch=batch, q_len=70, kv_len=75)
    both = ("forward", "backward")
    assert_exact(errors(MASKS[name](), sizes, tuning=INTERPRETER, directions=both))


@pytest.mark.parametrize("tuning", [SMALL, APART], ids=["by address", "by descriptor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_type_stays_within_its_tolerance(dtype: torch.dtype, tuning) -> None:
    sizes = Sizes(heads=2, kv_heads=1, q_len=40, kv_len=50, dim=24, value_dim=32)
    assert_exact(errors(MASKS["noise"](), sizes, dtype=dtype, tuning=tuning))


@given(st.data())
@settings(max_examples=5, deadline=None)
def test_any_bits_in_any_sizes_give_the_oracles_results_and_gradients(data) -> None:
    group, kv_heads = data.draw(st.sampled_from([(1, 1), (1, 2), (3, 1)]))
    length = st.integers(1, 50)
    dim = st.sampled_from([16, 20, 33])
    sizes = Sizes(
        data.draw(st.integers(1, 2)), group * kv_heads, kv_heads, data.draw(length),
        data.draw(length), data.draw(dim), data.draw(dim),
    )  # fmt: skip
    seed = data.draw(st.integers(0, 100))
    full_below = data.draw(st.sampled_from([0, 40]))
    bits = torch.rand(2, 3, 50, 50, generator=torch.Generator().manual_seed(seed)) > 0.5
    mask = Mask(lambda b, h, q, kv: bits[b, h, q, kv] | (kv < full_below))
    scale = data.draw(st.sampled_from([-0.3, 0.0, 0.25]))
    assert_exact(
        errors(mask, sizes, scale=scale, tuning=data.draw(st.sampled_from([SMALL, APART])))
    )


def test_the_largest_head_dims_are_computed() -> None:
    sizes = Sizes(heads=1, q_len=33, kv_len=40, dim=256, value_dim=130)
    assert_exact(errors(MASKS["causal"](), sizes, directions=("forward", "backward")))


def test_the_same_call_gives_the_same_bits() -> None:
    q, k, v = (torch.randn(1, 1, 70, 16) for _ in range(3))
    shapes, kernel = CompiledShapes(causal_shapes(70)), TritonKernel(SMALL)

    def run() -> list[torch.Tensor]:
        found = kernel.forward(q, k, v, shapes, scale=0.25)
        back = kernel.backward(q, q, k, v, found.out, found.lse, shapes, scale=0.25)
        return [found.out, found.lse, back.q, back.k, back.v]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_keys_and_values_are_read_as_they_lie_in_memory() -> None:
    both = torch.randn(1, 60, 2, 32).transpose(1, 2)  # rows of K and V side by side, heads inside
    q, k, v = torch.randn(1, 2, 60, 16), both[..., :16], both[..., 16:]
    shapes, kernel = CompiledShapes(full_shapes(60, 60)), TritonKernel(SMALL)
    as_they_are = kernel.forward(q, k, v, shapes, scale=0.25)
    copied = kernel.forward(q, k.contiguous(), v.contiguous(), shapes, scale=0.25)
    assert torch.equal(as_they_are.out, copied.out)
    turned = k.transpose(-1, -2).contiguous().transpose(-1, -2)  # elements of a row apart
    assert torch.equal(kernel.forward(q, turned, v, shapes, scale=0.25).out, copied.out)


@pytest.mark.parametrize("kernel", [TritonKernel(SMALL), FlashKernel(None)])
def test_gradients_of_keys_and_values_are_written_where_they_are_wanted(kernel: Kernel) -> None:
    x = torch.randn(1, 2, 20, 16)
    shapes = CompiledShapes(full_shapes(20, 20))
    found = kernel.forward(x, x, x, shapes, scale=0.25)
    given = (x, x, x, x, found.out, found.lse, shapes)
    back = kernel.backward(*given, scale=0.25)
    rows_first = torch.full((20, 1, 2, 32), torch.nan)
    room = rows_first.permute(1, 2, 0, 3).split(16, -1)
    again = kernel.backward(*given, scale=0.25, grad_kv=room)
    assert torch.equal(rows_first.permute(1, 2, 0, 3), torch.cat([back.k, back.v], -1))
    assert again.k.data_ptr() == rows_first.data_ptr()


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_tensors_without_rows_or_keys_are_fine(q_len: int, kv_len: int) -> None:
    q, k = torch.randn(1, 2, q_len, 16), torch.randn(1, 1, kv_len, 16)
    shapes, kernel = CompiledShapes(full_shapes(q_len, kv_len)), TritonKernel(SMALL)
    found = kernel.forward(q, k, k, shapes, scale=0.25)
    assert torch.equal(found.out, torch.zeros(q.shape))
    assert torch.equal(found.lse, torch.full(q.shape[:3], -torch.inf))
    back = kernel.backward(q, q, k, k, found.out, found.lse, shapes, scale=0.25)
    assert torch.equal(back.q, torch.zeros(q.shape))
    assert torch.equal(back.k, torch.zeros(k.shape))
