"""Dropout inside torch.compile(fullgraph=True): the same weights, in one graph for all seeds."""

from __future__ import annotations

import os

# Ranks are forks: they compile by themselves instead of asking a pool of the parent's.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp import masks
from flexcp.testing import simulate
from flexcp.testing.tolerance import assert_close

S = 26
MASK = masks.causal() & masks.document(lengths=[9, 3, 14])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def biased(score, b, h, q, kv):
    return score + 0.1 * (h + b) * (kv - q)


def attend(q, k, v, seed, score_mod=None):
    return flexcp.flex_attention(
        q, k, v, score_mod, MASK, enable_gqa=True, dropout_p=0.3, dropout_seed=seed
    )


def inputs():
    shapes = ((2, 4, S, 8), (2, 2, S, 8), (2, 2, S, 8))
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def with_gradients(function, tensors, *rest):
    out = function(*tensors, *rest)
    return [out, *torch.autograd.grad(out.square().sum(), tensors)]


@pytest.mark.parametrize(("score_mod", "as_tensor"), [(None, False), (None, True), (biased, True)])
def test_seeds_run_in_one_graph_and_drop_as_outside(score_mod, as_tensor):
    counter, tensors = CompileCounterWithBackend("aot_eager"), inputs()
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for seed in (5, -(2**40) - 1, 2**62):
        given = torch.tensor(seed) if as_tensor else seed
        found = with_gradients(compiled, tensors, given, score_mod)
        for mine, theirs in zip(
            found, with_gradients(attend, tensors, seed, score_mod), strict=True
        ):
            assert_close(mine, theirs)
    # dynamo takes a number for a constant until it has seen a second one
    assert counter.frame_count == (1 if as_tensor else 2)


def test_the_default_backend_drops_as_outside_and_draws_seeds():
    tensors = inputs()
    compiled = torch.compile(attend, fullgraph=True)
    found = with_gradients(compiled, tensors, torch.tensor(3))
    for mine, theirs in zip(found, with_gradients(attend, tensors, 3), strict=True):
        assert_close(mine, theirs)
    torch.manual_seed(1)
    drawn = [compiled(*tensors, None) for _ in range(2)]
    assert not torch.equal(*drawn)
    torch.manual_seed(1)
    assert torch.equal(compiled(*tensors, None), drawn[0])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_checkpoint_in_a_graph_drops_the_same_weights_again(backend):
    q, k, v = inputs()
    weight = torch.randn(q.shape, dtype=q.dtype)

    def region(q, k, v):
        return checkpoint(lambda *x: attend(*x, None) * weight, q, k, v, use_reentrant=False)

    out = torch.compile(region, fullgraph=True, backend=backend)(q, k, v).sum()
    # The sum is linear in the values, whose gradient has to be of the same weights.
    assert_close((torch.autograd.grad(out, v)[0] * v).sum(), out)


@pytest.mark.parametrize("score_mod", [None, biased])
def test_a_graph_over_ranks_drops_what_one_process_drops(score_mod):
    tensors = inputs()
    wanted = with_gradients(attend, tensors, 11, score_mod)

    def rank(mesh):
        torch._dynamo.reset()
        plan = flexcp.make_plan(
            MASK, S, mesh, block_size=4, num_heads=4, num_kv_heads=2, head_dim=8, batch=2,
            dtype=torch.float64,
        )  # fmt: skip
        own = [plan.shard(x.detach(), 2).requires_grad_() for x in tensors]

        def step(q, k, v, seed):
            return flexcp.attention(
                q, k, v, plan, score_mod=score_mod, dropout_p=0.3, dropout_seed=seed
            )

        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        found = with_gradients(compiled, own, torch.tensor(11))
        return [plan.unshard(x.detach(), 2) for x in found]

    for found in simulate(rank, 2):
        for mine, theirs in zip(found, wanted, strict=True):
            assert_close(mine, theirs)
