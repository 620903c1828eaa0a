"""The same run gives the same bits, with several threads and torch's algorithms as users have them.

Elsewhere tests ask torch for deterministic algorithms, which would hide sums in no fixed order. On
a CPU those are sums of float32 into few places, of more than 32768 terms by several threads.
"""

from __future__ import annotations

import pytest
import torch

import flexcp
from flexcp import masks, testing

LENGTH, HEADS, DIM = 1021, 2, 16
RUNS, THREADS = 2, 4
MASK = masks.causal() & masks.document(lengths=[600, 421])
_DRAW = torch.Generator().manual_seed(0)
FULL = [torch.randn(1, HEADS, LENGTH, DIM, generator=_DRAW) for _ in range(3)]
WEIGHT = torch.randn(1, HEADS, LENGTH, DIM, generator=_DRAW)
TABLE = torch.randn(32, generator=_DRAW)  # so few that threads meet in every place
SINKS = torch.randn(HEADS, generator=_DRAW)


@pytest.fixture(autouse=True)
def several_threads_and_no_promises():
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(False)  # the test-wide fixture restores it
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(threads)


def attend(q, k, v, plan, table, sinks):
    def score_mod(score, b, h, q_idx, kv_idx):
        strides = (q_idx - kv_idx) // (h + 1)
        return score + table[strides.clamp(0, 31)]

    return flexcp.attention(q, k, v, plan, score_mod=score_mod, sinks=sinks, return_lse=True)


def results_of(plan, function):
    """What one rank computes: out, lse and all gradients."""
    assert torch.get_num_threads() == THREADS
    local = [plan.shard(x, 2).requires_grad_() for x in FULL]
    learned = [x.clone().requires_grad_() for x in (TABLE, SINKS)]
    out, lse = function(*local, plan, *learned)
    total = (out * plan.shard(WEIGHT, 2)).sum() + lse.sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(total, [*local, *learned])]


def assert_same_bits(runs):
    """`runs` are several runs' results of every rank."""
    for other in runs[1:]:
        for rank, rank_again in zip(runs[0], other, strict=True):
            for x, again in zip(rank, rank_again, strict=True):
                assert torch.equal(x, again)


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("exchange", 3), ("ring", 3), ("allgather", 3), ("ulysses", 2), ("hybrid", (2, 2))],
)
def test_every_schedule_gives_the_same_bits_again(schedule, ranks):
    def rank(mesh):
        plan = flexcp.make_plan(
            MASK, LENGTH, mesh, schedule=schedule, num_heads=HEADS, head_dim=DIM,
            dtype=torch.float32,
        )  # fmt: skip
        assert not torch.are_deterministic_algorithms_enabled()
        return results_of(plan, attend)

    assert_same_bits([testing.simulate(rank, ranks) for _ in range(RUNS)])


def test_compiled_attention_gives_the_same_bits_again():
    torch._dynamo.reset()

    def rank(mesh):
        torch.set_num_threads(THREADS)
        plan = flexcp.make_plan(
            MASK, LENGTH, mesh, schedule="exchange", num_heads=HEADS, head_dim=DIM,
            dtype=torch.float32,
        )  # fmt: skip
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        runs = [results_of(plan, compiled) for _ in range(RUNS)]
        # What the score function looks up is summed in the caller's graph, as torch pleases.
        *others, _, of_sinks = zip(*runs, strict=True)
        return list(zip(*others, of_sinks, strict=True))

    # Ranks of one process would share graphs: a second plan has one that is for any.
    by_rank = testing.spawn(rank, 2)
    torch._dynamo.reset()
    assert_same_bits(list(zip(*by_rank, strict=True)))
