"""Attention over a plan inside torch.compile(fullgraph=True), on simulated and on real ranks."""

from __future__ import annotations

import os

# Ranks are forks: they compile by themselves instead of asking a pool of the parent's.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp import masks, testing
from flexcp.comm import RankError
from flexcp.comm.collectives import ordered_sum

CAUSAL = masks.causal()
SLIDING = masks.sliding_window(17)
IDS = torch.arange(101) // 23
LENGTH = 101
HEADS, KV_HEADS, BATCH = 4, 2, 2
_DRAW = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, generator=_DRAW, dtype=torch.float64)


FULL = [draw(BATCH, h, LENGTH, 8) for h in (HEADS, KV_HEADS, KV_HEADS)]
SINKS = draw(HEADS)
TABLE = draw(2 * LENGTH)
WEIGHT = draw(BATCH, HEADS, LENGTH, 8)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def plan_for(mesh, mask=CAUSAL, **how):
    return flexcp.make_plan(
        mask, LENGTH, mesh, block_size=16, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=8,
        dtype=torch.float64, batch=BATCH, **how,
    )  # fmt: skip


def results_of(function, plan, *extra, inputs=FULL):
    """What a function of sharded tensors returns, and all gradients, of this rank's rows."""
    local = [plan.shard(x, 2).requires_grad_() for x in inputs]
    leaves = [*local, *(x for x in extra if isinstance(x, torch.Tensor))]
    out = function(*local, plan, *extra)
    outputs = out if isinstance(out, tuple) else (out,)
    weight = plan.shard(WEIGHT, 2)
    total = sum((x * (weight if x.dim() == 4 else weight[..., 0])).sum() for x in outputs)
    grads = torch.autograd.grad(total, leaves)
    every_rank = partial(ordered_sum, plan.ranks.transport)
    return [*(x.detach() for x in outputs), *grads[:3], *map(every_rank, grads[3:])]


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def on_ranks(start, ranks, function, *extra, backend="aot_eager", **how):
    """Compares a function with its compiled self, on every rank."""

    def rank(mesh):
        given = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in extra]
        plan = plan_for(mesh, **how)
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        assert_same(results_of(compiled, plan, *given), results_of(function, plan, *given))
        return True

    assert all(start(rank, ranks))


def with_sinks(q, k, v, plan, sinks):
    out, lse = flexcp.attention(q * 1.5, k, v, plan, sinks=sinks, return_lse=True, scale=0.3)
    return out.sin(), lse


@pytest.mark.parametrize("schedule", ["exchange", "ring", "allgather", "ulysses"])
def test_every_schedule_is_one_op_of_the_graph(schedule):
    on_ranks(testing.simulate, 3, with_sinks, SINKS, schedule=schedule)


def test_heads_and_sequence_split_together_compile_too():
    on_ranks(testing.simulate, (2, 2), with_sinks, SINKS, schedule="hybrid")


def test_a_rank_without_heads_takes_part_in_a_compiled_graph():
    on_ranks(testing.simulate, 5, with_sinks, SINKS, schedule="ulysses")


@pytest.mark.parametrize("schedule", ["exchange", "allgather", "ulysses"])
def test_batch_elements_with_layouts_of_their_own_compile_too(schedule):
    documents = CAUSAL & masks.document(torch.stack([IDS, torch.arange(LENGTH) // 9]))
    on_ranks(testing.simulate, 3, with_sinks, SINKS, mask=documents, schedule=schedule)


def test_real_ranks_compile():
    on_ranks(testing.spawn, 2, with_sinks, SINKS)


def scored(q, k, v, plan, table, sinks):
    inside = table * 0.5

    def bias(score, b, h, q_idx, kv_idx):
        return score + inside[q_idx - kv_idx + LENGTH] * (h + 1) * (b + 1)

    return flexcp.attention(q, k, v, plan, score_mod=bias, sinks=sinks, return_lse=True)


def test_a_score_mod_and_what_it_captures_are_part_of_the_graph():
    on_ranks(testing.simulate, 3, scored, TABLE, SINKS, mask=SLIDING, schedule="ulysses")


@pytest.mark.parametrize("by_element", [False, True])
def test_a_score_mod_runs_over_all_plans_in_two_graphs(by_element):
    """The first is of its plan alone; batch elements may have layouts of their own."""

    def documents(*sizes):
        ids = [torch.arange(LENGTH) // size for size in sizes]
        return CAUSAL & masks.document(torch.stack(ids) if by_element else ids[0])

    changing = [documents(23, 9), documents(40, 11), documents(7, 50)]

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(scored, backend=counter, fullgraph=True)

    def rank(mesh):
        given = [x.clone().requires_grad_() for x in (TABLE, SINKS)]
        for mask in changing:
            plan = plan_for(mesh, mask)
            assert_same(*(results_of(x, plan, *given) for x in (compiled, scored)))
        return True

    assert all(testing.simulate(rank, 2))
    assert counter.frame_count <= 2


def test_a_score_mod_runs_over_plans_of_other_lengths_in_two_graphs():
    def capped(q, k, v, plan):
        def cap(score, *_):
            return 5 * torch.tanh(score / 5)

        return plan.unshard(flexcp.attention(q, k, v, plan, score_mod=cap), 2)

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(capped, backend=counter, fullgraph=True)

    def rank(mesh):
        for length in (LENGTH, 64, 77, 30, 90):
            plan = flexcp.make_plan(CAUSAL, length, mesh, layout="head_tail", block_size=16)
            local = [plan.shard(x[:, :, :length], 2) for x in FULL]
            found, expected = (
                f(*(x.clone().requires_grad_() for x in local), plan) for f in (compiled, capped)
            )
            assert torch.allclose(found, expected)
        return counter.frame_count

    assert testing.simulate(rank, 1)[0] <= 2


def test_a_score_mod_compiles_on_real_ranks():
    on_ranks(testing.spawn, 2, scored, TABLE, SINKS, mask=SLIDING, schedule="exchange")


class Layers(torch.nn.Module):
    """Layers of two kinds that do not depend on each other, one computed again in backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mix = torch.nn.ModuleList(torch.nn.Linear(8, 8).double() for _ in range(2))

    def forward(self, q, k, v, plan):
        def layer(x, mix, mask):
            return x + mix(flexcp.attention(x, k, v, plan, mask=mask)).tanh()

        sliding = checkpoint(layer, q, self.mix[0], "sliding", use_reentrant=False)
        return sliding * layer(q.sin(), self.mix[1], "full")


def noting_rounds(plan):
    """The labels of all rounds that the plan's transport runs from now on."""
    transport, noted = plan.ranks.transport, []
    exchange = transport.exchange

    def noting(sends, receives, *, label):
        call = label.pass_.call.what
        noted.append(f"round {label.number} of {label.what} {label.pass_.direction} of {call}")
        return exchange(sends, receives, label=label)

    vars(transport)["exchange"] = noting
    return noted


@pytest.mark.parametrize(
    ("start", "backend"),
    [(testing.simulate, "aot_eager"), (testing.spawn, "inductor")],
)
def test_layers_of_several_masks_and_checkpoints_are_one_graph_with_rounds_in_their_order(
    start, backend
):
    model = Layers()
    both = {"full": CAUSAL, "sliding": SLIDING}

    def rank(mesh):
        plan = plan_for(mesh, mask=both)
        rounds = noting_rounds(plan)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        parameters = list(model.parameters())
        found = []
        for run in (compiled, model):
            local = [plan.shard(x, 2).requires_grad_() for x in FULL]
            out = run(*local, plan)
            grads = torch.autograd.grad(out.square().sum(), [*local, *parameters])
            found.append([out.detach(), *grads])
        assert_same(*found)
        return rounds

    for rounds in start(rank, 2):
        half = len(rounds) // 2
        assert half > 4
        assert sorted(rounds[:half]) == sorted(rounds[half:])
        assert "forward" in rounds[0]
        assert "sliding" in rounds[0]


def test_the_next_batches_plan_runs_in_the_graph_of_the_first():
    def rank(mesh):
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(with_sinks, backend=counter, fullgraph=True)
        rows, kept = set(), set()
        for lengths in ([23, 49, 29], [8, 23, 24, 30, 16], [38, 59, 4], [2, 21, 26, 25, 27]):
            documents = CAUSAL & masks.document(lengths=lengths)
            plan = plan_for(mesh, mask=documents)
            rows.add(plan.rows)
            kept.add(plan.sizes[""].kept_rows)
            sinks = SINKS.clone().requires_grad_()
            assert_same(results_of(compiled, plan, sinks), results_of(with_sinks, plan, sinks))
        assert len(rows) > 2
        assert 0 in kept
        assert len(kept) > 2
        return counter.frame_count

    assert testing.spawn(rank, 2) == [1, 1]


def test_sharding_and_unsharding_are_ops_of_the_graph():
    def whole(q, k, v, plan):
        q, k, v = (plan.shard(x * 2, -2) for x in (q, k, v))
        return plan.unshard(flexcp.attention(q, k, v, plan), 2)

    def rank(mesh):
        for ids in (IDS, torch.stack([IDS, torch.arange(LENGTH) // 9])):
            plan = plan_for(mesh, mask=CAUSAL & masks.document(ids))
            found = []
            for function in (torch.compile(whole, backend="aot_eager", fullgraph=True), whole):
                full = [x.clone().requires_grad_() for x in FULL]
                out = function(*full, plan)
                grads = torch.autograd.grad((out * WEIGHT).sum(), full)
                found.append([out.detach(), *grads])
            assert_same(*found)
        return True

    assert all(testing.simulate(rank, 3))


def test_a_compiled_rank_and_one_that_is_not_understand_each_other():
    def rank(mesh):
        plan = plan_for(mesh)
        function = with_sinks
        if mesh.get_rank() == 1:
            function = torch.compile(with_sinks, backend="aot_eager", fullgraph=True)
        mixed = results_of(function, plan, SINKS.clone().requires_grad_())
        assert_same(mixed, results_of(with_sinks, plan, SINKS.clone().requires_grad_()))
        return True

    assert all(testing.spawn(rank, 2))


def test_faults_are_found_before_data_moves_as_outside():
    def rank(mesh):
        plan = plan_for(mesh, mask=masks.full() if mesh.get_rank() else CAUSAL)
        compiled = torch.compile(with_sinks, backend="aot_eager", fullgraph=True)
        results_of(compiled, plan, SINKS.clone().requires_grad_())

    with pytest.raises(RankError, match=r"same call of attention, got plan: .* on ranks \[0\]"):
        testing.simulate(rank, 2)


def test_a_checkpoint_of_a_compiled_layer_runs_the_graph_of_its_plan_again():
    """Of one plan's own graph and that of all others: they keep other tensors for backward."""

    def layer(q, k, v, plan):
        return flexcp.attention(q, k, v, plan, score_mod=lambda s, b, h, q, kv: s * (h + 1) / 2)

    def run(mesh, layer):
        plans = [plan_for(mesh, m, layout="head_tail") for m in (CAUSAL, SLIDING, CAUSAL)]
        q, k, v = (plans[0].shard(x, 2).requires_grad_() for x in FULL)
        out = q
        for plan in plans:
            out = checkpoint(layer, out, k, v, plan, use_reentrant=False)
        return [out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))]

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter)
    (wanted,), (found,) = (testing.simulate(lambda m, f=f: run(m, f), 1) for f in (layer, compiled))
    for actual, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, expected)
    assert counter.frame_count == 2
