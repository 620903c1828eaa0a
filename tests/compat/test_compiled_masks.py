"""Masks that are made by, or inside of, a compiled function."""

from collections.abc import Iterator

import pytest
import torch
from kernels.cases import loss
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flexcp.compat.flex_attention import create_block_mask, flex_attention
from flexcp.kernels.reference import dense_attention
from flexcp.testing.tolerance import assert_close


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _documents(length: int, step: int):  # type: ignore[no-untyped-def]
    ids = torch.arange(length) // step
    return lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)


def _tensors(length: int) -> list[Tensor]:
    return [torch.randn(2, 2, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def test_create_block_mask_compiles_into_one_graph_and_gives_the_same_mask() -> None:
    compiled = torch.compile(create_block_mask, backend="aot_eager", fullgraph=True)
    mask = _documents(90, 40)
    arguments = (mask, 2, None, 90, 90, "cpu", 32)
    found, wanted = compiled(*arguments), create_block_mask(*arguments)
    assert (found.shape, found.BLOCK_SIZE) == (wanted.shape, wanted.BLOCK_SIZE)
    assert torch.equal(found.to_dense(), wanted.to_dense())
    q, k, v = _tensors(90)
    assert torch.equal(
        flex_attention(q, k, v, block_mask=found), flex_attention(q, k, v, block_mask=wanted)
    )


def test_masks_made_inside_a_model_of_tensors_of_the_graph_run_in_one_graph() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (ids[q] == ids[kv]) & (q >= kv)

        mask = create_block_mask(mask_mod, None, None, q.shape[2], q.shape[2], device="cpu")
        return flex_attention(q * 1.5, k, v, block_mask=mask)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for step in (40, 17):
        q, k, v = _tensors(90)
        ids = torch.arange(90) // step
        allowed = ((ids[:, None] == ids) & torch.ones(90, 90, dtype=torch.bool).tril())[None, None]
        wanted = dense_attention(q * 1.5, k, v, allowed=allowed).out
        found = compiled(q, k, v, ids)
        grads = [torch.autograd.grad(loss(x), (q, k, v)) for x in (found, wanted)]
        assert_close(found, wanted)
        for actual, expected in zip(*grads, strict=True):
            assert_close(actual, expected)
    assert counter.frame_count == 1
