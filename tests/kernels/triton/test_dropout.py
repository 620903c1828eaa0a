"""Dropout in the Triton kernels: the bits of the oracle, on one device and over ranks."""

import pytest
import torch
from torch import Tensor

import flexcp
from flexcp import masks
from flexcp.kernels.dropout import Dropout
from flexcp.testing import simulate
from flexcp.testing.tolerance import assert_close
from kernels.cases import MASKS
from kernels.triton.comparison import APART, SMALL, Sizes, assert_exact, errors


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
