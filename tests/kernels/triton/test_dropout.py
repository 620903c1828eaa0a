"""Dropout in the Triton kernels: the bits of the oracle, on one device and over ranks."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flexcp
from flexcp import masks
from flexcp.kernels import choose
from flexcp.kernels.compiled_shapes import CompiledShapes
from flexcp.kernels.dropout import Dropout
from flexcp.kernels.interface import causal_shapes, full_shapes
from flexcp.kernels.triton.kernel import TritonKernel
from flexcp.kernels.triton.launch import Launch
from flexcp.kernels.triton.tuning import INTERPRETER
from flexcp.testing import simulate
from flexcp.testing.tolerance import assert_close
from kernels.cases import MASKS
from kernels.triton.comparison import APART, SMALL, Sizes, assert_exact, errors
from kernels.triton.test_launches import Operations


def test_exactly_the_weights_that_their_positions_name_are_dropped() -> None:
    length, dropout = 70, Dropout(0.3, -12345678901234567, first_batch=2, first_head=1)
    at = torch.arange(length) * 1_000_003 % 999_983
    shapes = replace(full_shapes(length, length), q_positions=at, kv_positions=at.flip(0))
    q = torch.zeros(1, 2, length, 16)  # all weights of a row are alike
    v = torch.eye(length).expand(1, 2, length, length)
    compiled = CompiledShapes(shapes)
    found = TritonKernel(SMALL).forward(q, q, v, compiled, scale=1.0, dropout=dropout)
    assert torch.equal(found.out != 0, dropout.kept_of(1, 2, at, at.flip(0)))


def test_dropout_asks_torch_for_nothing_but_the_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launch, "run", lambda launch, function: None)
    x, compiled = torch.zeros(1, 2, 64, 16), CompiledShapes(causal_shapes(64))
    kernel, options = TritonKernel(INTERPRETER), {"scale": 1.0, "dropout": Dropout(0.5, 3)}
    former = kernel.forward(x, x, x, compiled, **options)
    delta = kernel.delta(x, x, None)
    given = (x, x, x, x, x, former.lse, compiled)
    first = kernel.backward(*given, delta=delta, **options)
    found = {"grad_q": first.q, "grad_kv": (first.k, first.v)}
    with Operations() as operations:
        kernel.forward(x, x, x, compiled, former=former, **options)
        kernel.backward(*given, delta=delta, **found, **options)
    assert operations.counts == {}


def test_a_gpu_gets_them_for_dropout_without_a_mask_too() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 4, 64, 64, dtype=torch.bfloat16, device="cuda")
        for is_one_rectangle in (False, True):
            choice = choose(q, q, dropout=True, is_one_rectangle=is_one_rectangle)
            assert (choice.kernel, choice.varlen) == ("triton", None)


@pytest.mark.parametrize(("name", "tuning"), [("noise", SMALL), ("causal", APART)])
def test_the_oracles_weights_are_dropped(name: str, tuning) -> None:
    at = tuple(torch.randint(0, 10**6, (2, n)) for n in (45, 50))
    for dropout in (Dropout(0.3, 5, 2, 7), Dropout(0.6, -(1 << 60), positions=at)):
        sizes = Sizes(batch=2, heads=2, kv_heads=1, q_len=45, kv_len=50)
        assert_exact(errors(MASKS[name](), sizes, tuning=tuning, dropout=dropout))


@pytest.mark.parametrize("schedule", ["exchange", "ulysses"])
def test_ranks_drop_the_same_weights_with_any_kernel(schedule: str) -> None:
    q = torch.randn(1, 2, 40, 16)
    k, v = (torch.randn(1, 2, 40, 16) for _ in range(2))
    mask, options = masks.causal(), {"dropout_p": 0.5, "dropout_seed": 3}
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = flexcp.flex_attention(
        *exact, block_mask=mask, kernel_options={"kernel": "reference"}, **options
    )
    gradients = torch.autograd.grad(wanted.square().sum(), exact)

    def rank(mesh: object) -> list[Tensor]:
        plan = flexcp.make_plan(
            mask, 40, mesh, num_heads=2, head_dim=16, block_size=8, schedule=schedule
        )
        own = [plan.shard(x, 2).requires_grad_() for x in (q, k, v)]
        out = flexcp.attention(*own, plan, kernel="triton", **options)
        found = [out, *torch.autograd.grad(out.square().sum(), own)]
        return [plan.unshard(x, 2) for x in found]

    for found in simulate(rank, 2):
        for x, y in zip(found, [wanted, *gradients], strict=True):
            assert_close(x, y, dtype=torch.float32)
